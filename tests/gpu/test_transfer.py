"""Weights that threads bring over in parts are those that one thread reads whole, bit for bit."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.loading.safetensors_file import SafetensorsFolder
from headrace.models.registry import build_model
from headrace.quant.cuda import bind_cuda
from headrace.quant.dense import Dense
from headrace.worker.transfer import WeightTransfer
from loading.test_compressed import write as write_int8
from native.test_native_model import write_model
from tiny import write_tiny_llama, write_tiny_mixtral

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def same(one, two):
    whole = torch.int32 if one.dtype == torch.float32 else torch.int16
    return one.dtype == two.dtype and torch.equal(one.view(whole), two.view(whole))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("stored", [*TYPES, torch.float64, torch.int8], ids=str)
def test_tensors_of_safetensors_files(tmp_path, device, stored, dtype):
    made = (100 * torch.randn(37, 24, generator=torch.Generator().manual_seed(0))).to(stored)
    save_file({"a": made, "b": made[:5].clone()}, tmp_path / "model.safetensors")
    files = SafetensorsFolder(tmp_path)
    want = [torch.empty(size, 24, dtype=dtype, device=device) for size in (37, 5)]
    found = [torch.full((size, 24), 7.0, dtype=dtype, device=device) for size in (37, 5)]
    for name, target in zip("ab", want, strict=True):
        files.fill(name, target)
    with WeightTransfer(device, threads=3, staging_bytes=400) as transfer:  # a few rows
        source = WeightSource(Named(files), transfer=transfer)
        for name, target in zip("ab", found, strict=True):
            source.fill(name, target)
    assert all(map(same, found, want))
    assert transfer.report.num_bytes == 42 * 24 * found[0].element_size() and transfer.report.num_threads == 3


class Named:
    """A folder's tensors as a checkpoint."""

    def __init__(self, files):
        self.names, self.shape, self.read_rows, self.fill = files.names, files.shape, files.read_rows, files.fill


def weights_of(model, device, dtype, threads):
    """Every matrix of a model, by one way or the other."""
    checkpoint, scheme = open_checkpoint(model), bind_cuda(device, dtype)

    def place(array):
        return torch.from_numpy(np.array(array)).to(device)

    with torch.inference_mode():
        if not threads:
            built = build_model(checkpoint.spec, WeightSource(checkpoint, place), scheme)
        else:
            with WeightTransfer(device, threads, staging_bytes=3000) as transfer:
                built = build_model(checkpoint.spec, WeightSource(checkpoint, place, transfer), scheme)
    found = [built.embedding.weight.weight, built.head.weight.weight]
    for layer in built.layers:
        found += [layer.attention.qkv.weights.weight, layer.attention.out.weights.weight]
        mlp = layer.mlp
        if hasattr(mlp, "experts"):
            found += [mlp.router.weights.weight, mlp.experts.gate_up, mlp.experts.down]
        else:
            found += [mlp.gate_up.weights.weight, mlp.down.weights.weight]
    return found


def gguf_model(folder):
    """Its q and k are read in another order than they are stored in, as those of llama models are."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q6_K", "attn_v": "Q8_0", "ffn_up": "F16", "ffn_gate": "BF16", "": "Q5_0"}
    return write_model(folder / "model.gguf", kinds)


@pytest.mark.parametrize("make", [write_tiny_llama, write_tiny_mixtral, gguf_model])
def test_whole_models(tmp_path, gpu_engine, device, make):
    model = make(tmp_path)
    for dtype in TYPES:
        want = weights_of(model, device, dtype, 0)
        for threads in (1, 4):
            assert all(map(same, weights_of(model, device, dtype, threads), want))


@pytest.mark.parametrize("format", ["int-quantized", "pack-quantized"])
def test_models_of_int8_weights(tmp_path, gpu_engine, device, format):
    model, _ = write_int8(tmp_path, format, "group 16")
    want = weights_of(model, device, torch.bfloat16, 0)
    assert all(map(same, weights_of(model, device, torch.bfloat16, 3), want))


def test_a_damaged_gguf_file_is_named(tmp_path, gpu_engine, device):
    model = gguf_model(tmp_path)
    file = open_checkpoint(model).file
    info = file.info("blk.1.ffn_up.weight")
    data = bytearray(model.read_bytes())
    data[info.offset + 10 : info.offset + 12] = np.float16(np.inf).tobytes()
    model.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"'blk.1.ffn_up.weight' .* not finite"):
        weights_of(model, device, torch.bfloat16, 2)


def test_experts_in_one_tensor_are_put_into_every_expert(device):
    """Gate and up of stacked experts lie apart in the file and beside each other on the GPU."""
    stacked = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(0))
    target = Dense(device, torch.float16).experts_memory((4, 12, 10)).zero_()

    def read(first, part):
        part.copy_(stacked.reshape(24, 10)[first : first + part.shape[0]])

    with WeightTransfer(device, threads=2, staging_bytes=50) as transfer:
        transfer.add(read, target[:, 6:])
    assert torch.equal(target[:, 6:].cpu(), stacked.half()) and not target[:, :6].any()


def test_a_row_longer_than_a_buffer(device):
    values, target = torch.randn(3, 100), torch.zeros(3, 100, device=device)
    with WeightTransfer(device, threads=2, staging_bytes=64) as transfer:
        transfer.add(lambda first, part: part.copy_(values[first : first + part.shape[0]]), target)
    assert torch.equal(target.cpu(), values)


def test_buffers_are_two_a_thread_however_much_comes(device):
    seen, lock = set(), threading.Lock()

    def read(first, part):
        with lock:
            seen.add((threading.get_ident(), part.untyped_storage().data_ptr()))
        part.fill_(first)

    before = torch.get_num_threads()
    target = torch.zeros(500, 16, device=device)
    with WeightTransfer(device, threads=3, staging_bytes=128) as transfer:
        transfer.add(read, target)
    assert target[:, 0].tolist() == [row // 2 * 2 for row in range(500)]
    assert 0 < len(seen) <= 6 and len({thread for thread, _ in seen}) <= 3
    assert torch.get_num_threads() == before


def test_damaged_tensors_end_with_their_error(tmp_path, device):
    threads = threading.active_count()

    def read(first, part):
        if first:
            raise CheckpointError("m.gguf: tensor 'w' holds values that are not finite; fetch it again")

    target = torch.zeros(100, 16, device=device)
    with pytest.raises(CheckpointError, match="'w' holds values"), WeightTransfer(device, 2, 256) as transfer:
        transfer.add(read, target)
        for _ in range(1000):
            transfer.add(read, target)
    with pytest.raises(ValueError, match="of the block"), WeightTransfer(device, 2, 256) as transfer:
        transfer.add(lambda first, part: None, target)
        raise ValueError("of the block")
    assert threading.active_count() == threads, "no thread is left behind"
