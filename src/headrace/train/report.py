"""What heads bring where they are used: the engine with them, on prompts they have not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import EngineArgs
from headrace.frontend.llm import LLM
from headrace.sampling.params import SamplingParams
from headrace.train.prompts import Prompt
from headrace.train.settings import TrainArgs
from headrace.train.texts import prompt_ids


def engine_acceptance(
    engine: EngineArgs, settings: TrainArgs, prompts: Sequence[Prompt], heads: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """How often a place of a draft is accepted after right ones, and tokens a step that verified drafts, at each
    temperature of the training, as the engine's ledger counts them; told as lines too."""
    args = replace(engine, speculate=settings.kind, draft_model=str(heads), num_draft_tokens=settings.unroll)
    found = {}
    for temperature in sorted(set(settings.temperature)):
        with LLM.from_args(args) as llm:
            ids = [prompt_ids(llm.engine, prompt) for prompt in prompts]
            room = llm.engine.config.max_model_len - settings.max_tokens
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=settings.max_tokens)
            llm.generate([each for each in ids if len(each) <= room], params)
            totals = llm.engine.ledger.totals
        accepted = [right for _, right in totals.draft_positions]
        steps = totals.draft_positions[0][0] if accepted else 0
        asked = [steps, *accepted]  # a place counts where those before it were right
        shares = [right / before if before else 0.0 for right, before in zip(accepted, asked, strict=False)]
        gained = 1 + totals.accepted_draft_tokens / steps if steps else 1.0
        found[f"{temperature:g}"] = {"accepted_by_place": shares, "tokens_a_step": gained}
        tell(
            f"the engine at temperature {temperature:g}: {gained:.2f} tokens a step, accepted by place "
            + " ".join(f"{share:.3f}" for share in shares)
        )
    return found
