"""Multi-token prediction: published layouts on tiny random weights, against a written-out reference; and the engine."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.sampling.params import Grammar
from headrace.spec.eagle import HeadFollower
from tiny import write_tiny_llama

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 3, 48, 80, 4, 2, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=0.8, seed=3)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
LAYOUTS = {
    "deepseek": (
        f"model.layers.{LAYERS}.",
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
    ),
    "mimo": (
        "model.mtp_layers.0.",
        {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"},
    ),
    "qwen": (
        "mtp.layers.0.",
        {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"},
    ),
}


def write_model(folder, layout, *, modules=1, own_head=False):
    """A tiny model with a module beside it, in one file."""
    write_tiny_llama(folder, layers=LAYERS)
    rng = np.random.default_rng(5)

    def random(*shape):
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    tensors = load_file(folder / "model.safetensors")
    prefix, names = LAYOUTS[layout]
    outer = prefix.removesuffix("layers.0.") if layout == "qwen" else prefix
    for module in range(modules):
        here = prefix.replace(f"layers.{LAYERS}.", f"layers.{LAYERS + module}.")
        tensors |= {
            f"{here}self_attn.q_proj.weight": random(HEADS * DIM, HIDDEN),
            f"{here}self_attn.k_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            f"{here}self_attn.v_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            f"{here}self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM),
            f"{here}mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{here}mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{here}mlp.down_proj.weight": random(HIDDEN, INNER),
            f"{here}input_layernorm.weight": 1 + random(HIDDEN),
            f"{here}post_attention_layernorm.weight": 1 + random(HIDDEN),
        }
        outer = here if layout == "deepseek" else outer
        tensors |= {f"{outer}{names[name]}.weight": 1 + random(HIDDEN) for name in ("enorm", "hnorm", "norm")}
        tensors[f"{outer}{names['eh_proj']}.weight"] = random(HIDDEN, 2 * HIDDEN)
        if layout == "deepseek":
            tensors[f"{here}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
            head = tensors["lm_head.weight"]
            tensors[f"{here}shared_head.head.weight"] = random(*head.shape) if own_head else head.copy()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = modules
    if layout == "mimo":
        config["architectures"] = ["MiMoForCausalLM"]
        for layer in range(LAYERS):
            for name, size in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
                tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = random(size)
        for name, size in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = random(size)
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    made = {layout: write_model(folder / layout, layout, own_head=layout == "deepseek") for layout in LAYOUTS}
    made["none"] = str(write_tiny_llama(folder / "none", layers=LAYERS))
    return made


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x, positions):
    angles = positions[:, None] / 10000.0 ** (np.arange(0, DIM, 2) / DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Reference:
    """The module over a whole sequence of entries, with nothing kept between calls."""

    def __init__(self, path, layout):
        every = {name: tensor.astype(np.float64) for name, tensor in load_file(f"{path}/model.safetensors").items()}
        self.prefix, self.names = LAYOUTS[layout]
        self.layout, self.every = layout, every
        self.embedding = every["model.embed_tokens.weight"]
        self.output = every.get(f"{self.prefix}shared_head.head.weight", every["lm_head.weight"])

    def outer(self, name):
        prefix = self.prefix.removesuffix("layers.0.") if self.layout == "qwen" else self.prefix
        return self.every[f"{prefix}{self.names[name]}.weight"]

    def linear(self, name, x):
        y = x @ self.every[f"{self.prefix}{name}.weight"].T
        return y + self.every.get(f"{self.prefix}{name}.bias", 0.0)

    def __call__(self, tokens, features):
        """(features that follow, logits of the last) of entries: tokens [E], features [E, H]."""
        both = [normed(self.embedding[tokens], self.outer("enorm")), normed(features, self.outer("hnorm"))]
        x = np.concatenate(both[::-1] if self.layout == "mimo" else both, 1) @ self.outer("eh_proj").T
        count, y = len(x), normed(x, self.every[f"{self.prefix}input_layernorm.weight"])
        q, k, v = (self.linear(f"self_attn.{n}_proj", y).reshape(count, -1, DIM) for n in "qkv")
        q, k = rotated(q, np.arange(count)), rotated(k, np.arange(count))
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + self.linear("self_attn.o_proj", mixed)
        y = normed(x, self.every[f"{self.prefix}post_attention_layernorm.weight"])
        gate, up = self.linear("mlp.gate_proj", y), self.linear("mlp.up_proj", y)
        out = normed(x + self.linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * up), self.outer("norm"))
        return out, self.output @ out[-1]

    def drafts(self, tokens, features, count):
        """The greedy chain behind tokens [E + 1], of the model's features [E, H]."""
        made, drafts = features.astype(np.float64), []
        for _ in range(count):
            out, logits = self(np.array([*tokens[1:], *drafts]), made)
            made = np.concatenate([made, out[-1:]])
            drafts.append(int(np.argmax(logits)))
        return drafts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_reference(models, layout, monkeypatch):
    reference = Reference(models[layout], layout)
    features, compared = {}, []
    keep = HeadFollower._keep

    def kept(self, step, num_tokens):
        keep(self, step, num_tokens)
        for row, start, first, end in zip(step.rows, step.starts, step.query_start, step.query_start[1:], strict=False):
            for offset in range(end - first):
                features[int(row), int(start) + offset] = np.array(step.values[first + offset])

    monkeypatch.setattr(HeadFollower, "_keep", kept)
    with LLM(
        models[layout], speculate="mtp", num_draft_tokens=3, mode="exact", max_num_batched_tokens=16, max_num_seqs=4
    ) as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        propose = proposer.propose

        def compare(context):
            found = propose(context)
            for index, row in enumerate(context.rows.tolist()) if found is not None else ():
                known = int(context.num_tokens[row])
                tokens = context.token_ids[row, :known].tolist()
                drafts = [token for token in found.tokens[index].tolist() if token >= 0]
                if drafts:
                    own = np.stack([features[row, position] for position in range(known - 1)])
                    compared.append(drafts == reference.drafts(tokens, own, len(drafts)))
            return found

        proposer.propose = compare
        llm.generate(PROMPTS, GREEDY)
    assert len(compared) > 100 and all(compared)


def everything(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in o.outputs] for o in outputs]


PARAMS = {
    "greedy": GREEDY,
    "penalties": SAMPLED.with_(repetition_penalty=1.3, frequency_penalty=0.4),
    "choices and logprobs": SAMPLED.with_(n=3, logprobs=2),
    "stops": SAMPLED.with_(stop=("a", "Q"), stop_token_ids=tuple(range(0, 200, 7)), min_tokens=5),
    "grammar": SAMPLED.with_(grammar=Grammar("regex", "[a-f]{3,30}x"), ignore_eos=False),
}
RUNNING = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "memory pressure": {"kv_cache": 39 * 4 * 288, "block_size": 4, "max_num_seqs": 6, "max_model_len": 90},
}


@pytest.mark.parametrize("running", RUNNING)
def test_text_is_the_same(models, running):
    path = models["deepseek"]
    with LLM(path) as plain, LLM(path, speculate="mtp", num_draft_tokens=4, **RUNNING[running]) as llm:
        for params in PARAMS.values():
            for _ in range(2):  # the second time prompts are found in the prefix cache, and have no features
                assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        totals = llm.engine.ledger.totals
        assert totals.draft_tokens > totals.accepted_draft_tokens > 0
        assert not totals.proposers_dropped
        llm.engine.core.scheduler.check()
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        proposer.runner.check()


def test_a_model_with_a_module_is_otherwise_as_without_it(models):
    with LLM(models["none"]) as plain, LLM(models["deepseek"]) as llm, LLM(models["qwen"], speculate="auto") as auto:
        wanted = everything(plain.generate(PROMPTS, SAMPLED))
        assert everything(llm.generate(PROMPTS, SAMPLED)) == wanted
        assert everything(auto.generate(PROMPTS, SAMPLED)) == wanted
        assert auto.engine.config.proposers == ("suffix", "ngram", "mtp")
        assert llm.engine._worker.model.num_parameters == plain.engine._worker.model.num_parameters


def test_what_cannot_be_is_refused(models, tmp_path):
    with pytest.raises(ConfigError, match="has no module for multi-token prediction"):
        LLM(models["none"], speculate="mtp")
    with pytest.raises(ConfigError, match="leave out draft_model"):
        LLM(models["deepseek"], speculate="mtp", draft_model=models["none"])
    deep = write_model(tmp_path / "deep", "deepseek", modules=2)
    with pytest.raises(ConfigError, match="has 2 modules for multi-token prediction"):
        LLM(deep, speculate="mtp")
    with LLM(deep, speculate="auto") as llm:
        assert "mtp" not in llm.engine.config.proposers
    config = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "num_hidden_layers": 61}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="DeepseekV3ForCausalLM has multi-head latent attention"):
        open_checkpoint(tmp_path)
