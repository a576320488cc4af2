"""GPU tests: on a GPU where there is one, else the Triton kernels run in Triton's interpreter on the CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed: pip install triton==3.6.0")

import headrace.frontend.engine as engine_module  # noqa: E402
from headrace.device.cuda import GpuFacts  # noqa: E402
from headrace.ledger.machine import machine_facts  # noqa: E402
from headrace.ops.registry import using  # noqa: E402
from headrace.ops.triton.runtime import INTERPRETED, RUNTIME  # noqa: E402


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


# the interpreter multiplies bfloat16 as if it were integers, so there float16 stands for the two-byte types
@pytest.fixture(params=["float32", "float16"] if INTERPRETED else ["float32", "float16", "bfloat16"])
def dtype(request):
    before = RUNTIME.activation
    RUNTIME.activation = getattr(torch, request.param)
    yield RUNTIME.activation
    RUNTIME.activation = before


@pytest.fixture
def tolerance(dtype):
    return {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.fixture
def random(device):
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device)


@pytest.fixture
def gpu_engine(monkeypatch, device):
    """Engines on `device=cuda`, also where there is none: the device's own code on torch's CPU."""
    activation, invariant = RUNTIME.activation, RUNTIME.invariant
    with using():  # whatever an engine binds, the next test finds as it was
        if INTERPRETED:
            from headrace.worker.device_worker import DeviceWorker

            fake = GpuFacts("interpreted", (9, 0), 8 << 30, 8 << 30, 132)
            monkeypatch.setattr(engine_module, "choose_gpu", lambda name: None if name == "cpu" else fake)
            monkeypatch.setattr(engine_module, "gpu_machine_facts", lambda name: machine_facts())
            original = engine_module.make_worker

            def make_worker(spec, checkpoint, config, *rest):
                if config.device == "cpu":
                    return original(spec, checkpoint, config, *rest)
                return DeviceWorker(spec, checkpoint, config, *rest[:3], device=device, draft=rest[3])

            monkeypatch.setattr(engine_module, "make_worker", make_worker)
        yield
    RUNTIME.activation, RUNTIME.invariant = activation, invariant
