"""EAGLE heads: published layouts on tiny random weights, against a written-out reference; and through the engine."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.loading.errors import CheckpointError
from headrace.sampling.params import Grammar
from headrace.spec.eagle import HeadRunner
from headrace.worker.table import RequestTable
from tiny import write_tiny_llama

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, DRAFT_VOCAB = 48, 64, 4, 2, 12, 260, 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=0.8, seed=3)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def write_head(folder, version, *, published="authors", hidden=HIDDEN, layers=6):
    """A head as its authors publish it, or `speculators`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(version)

    def random(*shape):
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    prefix = "midlayer" if version == 3 and published == "authors" else "layers.0"
    wide = 2 * hidden if version == 3 else hidden
    tensors = {
        f"{prefix}.self_attn.q_proj.weight": random(HEADS * DIM, wide),
        f"{prefix}.self_attn.k_proj.weight": random(KV_HEADS * DIM, wide),
        f"{prefix}.self_attn.v_proj.weight": random(KV_HEADS * DIM, wide),
        f"{prefix}.self_attn.o_proj.weight": random(hidden, HEADS * DIM),
        f"{prefix}.mlp.gate_proj.weight": random(INNER, hidden),
        f"{prefix}.mlp.up_proj.weight": random(INNER, hidden),
        f"{prefix}.mlp.down_proj.weight": random(hidden, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + random(hidden),
    }
    config = {**CONFIG, "hidden_size": hidden}
    if version == 1:
        tensors |= {"fc.weight": random(hidden, 2 * hidden), "fc.bias": random(hidden)}
        tensors["embed_tokens.weight"] = random(VOCAB, hidden)
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        ids = np.sort(rng.permutation(VOCAB)[:DRAFT_VOCAB])
        tensors |= {
            "fc.weight": random(hidden, 3 * HIDDEN),
            f"{prefix}.hidden_norm.weight": 1 + random(hidden),
            f"{prefix}.input_layernorm.weight": 1 + random(hidden),
            "norm.weight": 1 + random(hidden),
            "lm_head.weight": random(DRAFT_VOCAB, hidden),
            "d2t": ids - np.arange(DRAFT_VOCAB),
            "t2d": np.isin(np.arange(VOCAB), ids),
        }
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}
        if published == "speculators":
            config = {
                "speculators_model_type": "eagle3",
                "draft_vocab_size": DRAFT_VOCAB,
                "transformer_layer_config": config,
            }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    return {
        "target": str(write_tiny_llama(folder / "target", layers=6)),
        "eagle1": write_head(folder / "one", 1),
        "eagle3": write_head(folder / "three", 3),
        "speculators": write_head(folder / "again", 3, published="speculators"),
        "folder": folder,
    }


# -- the reference


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x, positions):
    angles = positions[:, None] / 10000.0 ** (np.arange(0, DIM, 2) / DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Reference:
    """A head over a whole sequence of entries, with nothing kept between calls."""

    def __init__(self, path, target):
        tensors = load_file(f"{path}/model.safetensors")
        prefix = "midlayer." if any(name.startswith("midlayer") for name in tensors) else "layers.0."
        self.own = {name.removeprefix(prefix): tensor.astype(np.float64) for name, tensor in tensors.items()}
        model = load_file(f"{target}/model.safetensors")
        self.embedding = self.own.get("embed_tokens.weight", model["model.embed_tokens.weight"].astype(np.float64))
        self.output = model["lm_head.weight"].astype(np.float64)
        self.is_eagle3 = "hidden_norm.weight" in self.own

    def block(self, x, residual):
        own, count = self.own, len(x)
        positions = np.arange(count)
        q, k, v = ((x @ own[f"self_attn.{n}_proj.weight"].T).reshape(count, -1, DIM) for n in "qkv")
        q, k = rotated(q, positions), rotated(k, positions)
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
        residual = residual + mixed @ own["self_attn.o_proj.weight"].T
        y = normed(residual, own["post_attention_layernorm.weight"])
        gate, up = (y @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return residual + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T

    def __call__(self, tokens, features):
        """(features that follow, logits [VOCAB] of the last) of entries: tokens [E], the head's features [E, H]."""
        own, embedded = self.own, self.embedding[tokens]
        if not self.is_eagle3:
            x = np.concatenate([embedded, features], 1) @ own["fc.weight"].T + own["fc.bias"]
            out = self.block(x, x)
            return out, self.output @ out[-1]
        both = [normed(embedded, own["input_layernorm.weight"]), normed(features, own["hidden_norm.weight"])]
        out = self.block(np.concatenate(both, 1), features)
        logits = np.full(VOCAB, -np.inf)
        ids = np.arange(DRAFT_VOCAB) + own["d2t"].astype(int)
        logits[ids] = own["lm_head.weight"] @ normed(out[-1], own["norm.weight"])
        return out, logits

    def fuse(self, features):
        return features @ self.own["fc.weight"].T if self.is_eagle3 else features

    def drafts(self, tokens, features, count):
        """The greedy chain behind tokens [E + 1], of the model's features [E, F]."""
        features, made, drafts = self.fuse(features.astype(np.float64)), [], []
        for _ in range(count):
            inputs = np.concatenate([features, *made]) if made else features
            out, logits = self(np.array([*tokens[1:], *drafts]), inputs)
            made.append(out[-1:])
            drafts.append(int(np.argmax(logits)))
        return drafts


@pytest.mark.parametrize("head", ["eagle1", "eagle3", "speculators"])
def test_drafts_are_those_of_the_reference(models, head, monkeypatch):
    reference = Reference(models[head], models["target"])
    features, compared = {}, []
    keep = HeadRunner._keep

    def kept(self, step, num_tokens):
        keep(self, step, num_tokens)
        for row, start, first, end in zip(step.rows, step.starts, step.query_start, step.query_start[1:], strict=False):
            for offset in range(end - first):
                features[int(row), int(start) + offset] = np.array(step.values[first + offset])

    monkeypatch.setattr(HeadRunner, "_keep", kept)
    with LLM(
        models["target"], speculate="eagle", draft_model=models[head], num_draft_tokens=3, mode="exact",
        max_num_batched_tokens=16, max_num_seqs=4,
    ) as llm:  # fmt: skip
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
        assert bool(proposer.runner._launcher._programs) == (head != "eagle1")  # passes are replayed
        assert llm.engine._worker._runner._launcher._programs  # and steps, layers that the head looks at or not
    assert len(compared) > 100 and all(compared)


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_features_are_the_hidden_states_of_transformers(models, head):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with LLM(models["target"], speculate="eagle", draft_model=models[head], mode="exact", num_draft_tokens=3) as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        seen = []
        propose = proposer.propose
        proposer.propose = lambda context: seen.append(np.array(context.features.values)) or propose(context)
        llm.generate(PROMPTS[:1], GREEDY.with_(max_tokens=1))
    model = transformers.AutoModelForCausalLM.from_pretrained(models["target"], dtype=torch.float32)
    with torch.no_grad():
        states = model.model(torch.tensor(PROMPTS[:1]), output_hidden_states=True).hidden_states
    wanted = states[-1] if head == "eagle1" else torch.cat([states[2], states[3], states[3]], -1)
    assert np.allclose(seen[0], wanted[0].numpy(), atol=1e-4)


# -- through the engine

PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalties": SAMPLED.with_(repetition_penalty=1.3, frequency_penalty=0.4),
    "choices and logprobs": SAMPLED.with_(n=3, logprobs=2),
    "few tokens": SAMPLED.with_(allowed_token_ids=tuple(range(70, 76))),
    "stops": SAMPLED.with_(stop=("a", "Q"), stop_token_ids=tuple(range(0, 200, 7)), min_tokens=5),
    "grammar": SAMPLED.with_(grammar=Grammar("regex", "[a-f]{3,30}x"), ignore_eos=False),
}
RUNNING = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "memory pressure": {"kv_cache": 39 * 4 * 576, "block_size": 4, "max_num_seqs": 6, "max_model_len": 90},
    "no prefix cache": {"prefix_caching": False},
}


def everything(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in o.outputs] for o in outputs]


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
@pytest.mark.parametrize("running", RUNNING)
def test_text_is_the_same(models, head, running, monkeypatch):
    run, lengths = HeadRunner._run, []

    def counted(self, rows, own, *rest):
        lengths.append(own.tolist())
        return run(self, rows, own, *rest)

    monkeypatch.setattr(HeadRunner, "_run", counted)
    with (
        LLM(models["target"]) as plain,
        LLM(
            models["target"], speculate="eagle", draft_model=models[head], num_draft_tokens=4, **RUNNING[running]
        ) as llm,
    ):
        for params in PARAMS.values():
            for _ in range(2):  # the second time prompts are found in the prefix cache, and have no features
                assert everything(llm.generate(PROMPTS, params)) == everything(plain.generate(PROMPTS, params))
        totals = llm.engine.ledger.totals
        assert totals.draft_tokens > totals.accepted_draft_tokens > 0
        assert any(1 < max(own) <= 5 and len(own) > 1 for own in lengths)  # what was accepted runs with the next draft
        assert not totals.proposers_dropped
        llm.engine.core.scheduler.check()
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        proposer.runner.check()


def drafts_by_place(monkeypatch):
    """A list, into whose last dictionary goes (row, position) -> first two drafts, of all that engines hold."""
    places, original = [], RequestTable.hold_drafts

    def hold(self, rows, drafts):
        known = self.num_tokens[rows].tolist()
        for row, place, found in zip(rows.tolist(), known, drafts.tokens.tolist() if drafts else known, strict=True):
            if drafts and found[0] >= 0:
                places[-1][row, place] = found[:2]
        return original(self, rows, drafts)

    monkeypatch.setattr(RequestTable, "hold_drafts", hold)
    return places


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_steps_without_drafts_leave_what_the_head_needs(models, head, monkeypatch):
    """Its drafts after some steps in which nobody was asked are those of a head that was asked after every step."""
    places = drafts_by_place(monkeypatch)
    found = []
    for resting in (False, True):
        options = {"speculate": "eagle", "draft_model": models[head], "num_draft_tokens": 2}
        with LLM(models["target"], prefix_caching=False, **options) as llm:
            policy, steps = llm.engine.core.scheduler.drafting, [0]
            limits = policy.limits

            def some(requests, num_rows, limits=limits, steps=steps, resting=resting):
                steps[0] += 1
                rests = resting and steps[0] % 50 < 40  # longer than features are kept unsorted
                return np.zeros((0, len(requests)), np.int32) if rests else limits(requests, num_rows)

            policy.limits = some
            places.append({})
            params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
            found.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS[:2], params)])
            llm.engine.core.scheduler.check()
    assert found[0] == found[1]
    always, seldom = places
    both = always.keys() & seldom.keys()
    assert len(both) > 8 and {each: seldom[each] for each in both} == {each: always[each] for each in both}


def test_a_text_whose_beginning_was_found_computed_goes_to_its_end(models):
    """The head's entries then begin behind that, and would reach beyond the longest text."""
    options = {"speculate": "eagle", "draft_model": models["eagle1"], "num_draft_tokens": 4, "max_model_len": 64}
    prompt = list(range(40))
    with LLM(models["target"], **options) as llm:
        found = [llm.generate([prompt], GREEDY.with_(max_tokens=24))[0].outputs[0].token_ids for _ in range(2)]
        assert found[0] == found[1] and llm.engine.ledger.totals.proposers_dropped == 0


def test_with_residual_verification_and_with_auto(models):
    for options in ({"verify": "residual", "speculate": "eagle"}, {"speculate": "auto"}):
        with LLM(models["target"], draft_model=models["eagle3"], **options) as llm:
            assert "eagle" in llm.engine.config.proposers and "draft" not in llm.engine.config.proposers
            llm.generate(PROMPTS, SAMPLED)
            assert not llm.engine.ledger.totals.proposers_dropped


def test_what_does_not_fit_is_refused(models):
    folder = models["folder"]
    narrow = write_head(folder / "narrow", 1, hidden=32)
    with pytest.raises(ValueError, match="continues features of 32 numbers, not 48"):
        LLM(models["target"], speculate="eagle", draft_model=narrow)
    shallow = str(write_tiny_llama(folder / "shallow", layers=2))
    with pytest.raises(ValueError, match="takes features of layers"):
        LLM(shallow, speculate="eagle", draft_model=models["eagle3"])
    with pytest.raises(ConfigError, match="give speculate=eagle"):
        LLM(models["target"], speculate="draft", draft_model=models["eagle1"])
    with pytest.raises(ConfigError, match="is a model; give speculate=draft"):
        LLM(models["target"], speculate="eagle", draft_model=models["target"])
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(CheckpointError):
        LLM(models["target"], speculate="eagle", draft_model=str(folder / "empty"))


def test_files_with_other_things_than_expected(models):
    """Values of other types, and outputs without rows, end with a line that names the file; what the tensors tell is
    not asked of config.json."""

    def changed(name, config=None, head=None):
        folder = models["folder"] / name
        write_head(folder, 3)
        if config is not None:
            whole = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(whole | config))
        if head is not None:
            tensors = load_file(folder / "model.safetensors")
            save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        return str(folder)

    with LLM(models["target"], speculate="eagle", draft_model=changed("odd", {"architectures": 5})) as llm:
        assert llm.engine.config.proposers == ("eagle",)
    for folder, reason in (
        (changed("listed", {"hidden_act": ["silu"]}), r"listed/config\.json: hidden_act .* is not supported"),
        (changed("scalar", head=np.array(1.0, np.float32)), r"scalar: lm_head\.weight must have a row .* not \[\]"),
        (changed("rowless", head=np.zeros((0, HIDDEN), np.float32)), r"must have a row .* not \[0, 48\]"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            LLM(models["target"], speculate="eagle", draft_model=folder)
    shapeless = changed("wide", head=np.zeros((DRAFT_VOCAB, HIDDEN + 1), np.float32))
    with pytest.raises(ValueError, match=r"wide: the checkpoint does not fit the model: .*lm_head\.weight"):
        LLM(models["target"], speculate="eagle", draft_model=shapeless)
