"""bench/soak.py finds what it is to find: leaks, growth, requests that end badly, and tokens that differ."""

import argparse
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from headrace.sampling.params import SamplingParams
from tiny import write_tiny_llama

SCRIPT = Path(__file__).parents[2] / "bench" / "soak.py"
spec = importlib.util.spec_from_file_location("soak", SCRIPT)
soak = importlib.util.module_from_spec(spec)
sys.modules["soak"] = soak
spec.loader.exec_module(soak)


@pytest.fixture
def arguments(tmp_path):
    model = str(write_tiny_llama(tmp_path / "tiny"))
    return argparse.Namespace(model=model, device="cpu", growth_mib=48.0, graph_mib=2.0, device_growth_mib=256.0)


def test_a_sound_engine_under_pressure(arguments):
    engine = soak.make_engine(arguments, "ngram")
    ticks = itertools.count()
    watch, kept = soak.soak(engine, 6.0, 0, lambda text: None, clock=lambda: next(ticks) / 200)
    soak.judge(watch, engine, arguments)
    assert watch.faults == [] and watch.preemptions and watch.aborted and set(watch.ends) <= soak.ENDS
    assert sum(watch.ends.values()) >= watch.submitted > 20, "every choice of every request ended"
    engine.close()
    engine = soak.make_engine(arguments, "off")
    soak.run_again(engine, kept, watch, 10)
    assert watch.compared == 10 and watch.faults == []
    kept[0].tokens[-1] ^= 1
    soak.run_again(engine, kept[:1], watch, 1)
    assert len(watch.faults) == 1 and watch.faults[0].startswith("a greedy request of"), "a wrong token is found"
    engine.close()


def test_what_is_wrong_is_found(arguments):
    engine = soak.make_engine(arguments, "off")
    watch = soak.Watch(ends=soak.Counter(length=3, error=1), memory_mib=[100.0, 120.0, 153.0], graphs=[7, 9])
    watch.device_mib = [0.0, 300.0]
    soak.judge(watch, engine, arguments)
    found = "; ".join(watch.faults)
    for words in ("ended with error", "no request was preempted", "process grew by 53 MiB, 52 are", "GPU grew by 300"):
        assert words in found
    pool = engine.core.scheduler.kv.pool
    engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    engine.step()
    (lost,) = pool.take(1)
    watch = soak.Watch(preemptions=1)
    soak.note(watch, engine)
    assert "the account of rows and blocks" in watch.faults[0]
    pool.release([lost])
    engine.close()
