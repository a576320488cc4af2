"""AsyncLLM: the same answers as LLM, cancellation that frees memory, errors that reach everyone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.config import EngineArgs
from headrace.core.request import RequestError
from headrace.frontend.async_llm import EngineDeadError, _Channel
from headrace.frontend.engine import Engine
from headrace.frontend.output import CompletionOutput, RequestOutput, Update
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.with_(max_tokens=400)
PROMPTS = ["hello", "the river runs", "a", "to be or not to be", "hello there"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, timeout=60))


async def text_of(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> str:
    return "".join([update.text async for update in llm.stream(prompt, params)])


async def settled(llm: AsyncLLM) -> Any:
    """The core, once it has nothing left to do."""
    while llm._engine.has_work:
        await asyncio.sleep(0.001)
    return llm._engine.core


def test_many_at_once_are_what_llm_gives(folder, expected):
    async def main():
        async with AsyncLLM(folder) as llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))
            assert [output.outputs[0].text for output in outputs] == expected
            assert list(await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS))) == expected
            bill = await llm.bill(outputs[0])
            assert bill is not None and bill.output_tokens == 12 and sum(bill.items().values()) == bill.wall
            assert "steps in" in await llm.explain()
            chat = await llm.chat([{"role": "user", "content": "hi"}], GREEDY)
            assert chat.finished and len(chat.outputs[0].token_ids) == 12

    run(main())


def test_choices_come_merged_by_choice(folder):
    async def main():
        params = GREEDY.with_(n=3, temperature=1.0, seed=4)
        async with AsyncLLM(folder) as llm:
            whole = await llm.generate("hi", params)
            texts: dict[int, str] = {}
            async for update in llm.stream("hi", params):
                await asyncio.sleep(0.002)  # slower than the engine
                index = update.choice.index
                texts[index] = texts.get(index, "") + update.text
            assert [texts[index] for index in range(3)] == [choice.text for choice in whole.outputs]
            best = [update async for update in llm.stream("hi", params.with_(n=1, best_of=3))]
            assert [len(update.token_ids) for update in best] == [12]

    run(main())


def test_cancelling_a_task_frees_its_memory(folder):
    async def main():
        async with AsyncLLM(folder) as llm:
            tasks = [asyncio.create_task(llm.generate("hello", LONG)) for _ in range(3)]
            tasks += [asyncio.create_task(text_of(llm, "there", LONG)) for _ in range(3)]
            tasks.append(asyncio.create_task(llm.generate("never begun", LONG)))
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(result, asyncio.CancelledError)
                for result in await asyncio.gather(*tasks, return_exceptions=True)
            )
            core = await settled(llm)
            core.scheduler.check()
            assert core.scheduler.kv.pool.num_held == 0 and not llm._driver._channels
            assert len((await llm.generate("hello", GREEDY)).outputs[0].token_ids) == 12

    run(main())


def test_leaving_the_loop_ends_the_request(folder):
    async def main():
        async with AsyncLLM(folder) as llm:
            async with contextlib.aclosing(llm.stream("hello", LONG)) as updates:
                async for update in updates:
                    output = update.output
                    break
            await settled(llm)
            assert output.outputs[0].finish_reason == "abort"

    run(main())


def test_a_refused_prompt_is_its_callers_affair(folder, expected):
    async def main():
        async with AsyncLLM(folder) as llm:
            good = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
            with pytest.raises(RequestError, match="no tokens"):
                await llm.generate([], GREEDY)
            with pytest.raises(RequestError, match="prompt has"):
                await text_of(llm, "x" * 600)
            with pytest.raises(TypeError):
                await llm.generate("hi", GREEDY, nonsense=1)
            assert (await good).outputs[0].text == expected[0]

    run(main())


def test_a_failing_step_reaches_every_caller(folder, monkeypatch):
    engine = Engine(EngineArgs(model=folder))

    async def main():
        llm = AsyncLLM.from_engine(engine)
        step, count = engine.step, 0

        def failing():
            nonlocal count
            count += 1
            if count == 5:
                raise MemoryError("no more")
            return step()

        monkeypatch.setattr(engine, "step", failing)
        tasks = [llm.generate("hello", LONG), text_of(llm, "there", LONG), text_of(llm, "you", LONG)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and isinstance(result.__cause__, MemoryError)
            assert "no more" in str(result)
        with pytest.raises(EngineDeadError, match="no more"):
            await llm.generate("hello", GREEDY)
        with pytest.raises(EngineDeadError, match="no more"):
            await llm.explain()
        await llm.close()

    run(main())


def test_closing_ends_what_runs(folder):
    async def main():
        llm = AsyncLLM(folder)
        task = asyncio.create_task(llm.generate("hello", LONG))
        await asyncio.sleep(0.02)
        await llm.close()
        await llm.close()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, RequestOutput):  # else it had not been begun
            assert result.outputs[0].finish_reason == "abort"
        else:
            assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError, match="closed"):
            await llm.generate("hello", GREEDY)

    run(main())


def test_a_slow_consumer_gets_merged_updates_in_bounded_memory():
    async def main():
        channel = _Channel(asyncio.get_running_loop(), keep=True)
        output = RequestOutput("r", None, [1], [CompletionOutput(0), CompletionOutput(1)])
        for token in range(10_000):
            for choice in output.outputs:
                channel.put(Update(output, choice, f"{token} ", [token], [{}]))
            assert sum(map(len, channel._pending.values())) < 2 * 64
        channel.finish()
        assert channel.needs_telling() and not channel.needs_telling()
        channel.wake()
        first, second = await channel.take()
        assert first.choice is output.outputs[0] and second.choice is output.outputs[1]
        assert first.token_ids == second.token_ids == list(range(10_000)) and len(first.logprobs or []) == 10_000
        assert first.text.split() == [str(token) for token in range(10_000)]
        assert await channel.take() == [] and await channel.take() == []

    run(main())


def test_progress_shows_a_bar(folder, capsys):
    with LLM(folder) as llm:
        llm.generate(PROMPTS, GREEDY, progress=True)
        err = capsys.readouterr().err
        assert "5/5" in err and "prompts" in err
        llm.generate(PROMPTS, GREEDY)
        assert capsys.readouterr().err == ""
