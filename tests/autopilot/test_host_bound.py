"""How many runs a visit: on a machine made of two numbers, what the host takes for a visit and the GPU for a run."""

import pytest

from headrace.autopilot.host_bound import HostBound


def simulate(policy, host, token, device, num_rows=8, visits=600):
    """Seconds of the last quarter of the visits for each run, and the runs that were chosen in it. The host takes
    `host` seconds a visit and `token` a run, the GPU `device` a run."""
    seconds, chosen = [], []
    for _ in range(visits):
        runs = policy.runs(num_rows)
        work, gpu = host + token * runs, device * runs
        took = max(work, gpu)
        policy.observe(num_rows, runs, took, took - work)
        seconds.append(took / runs)
        chosen.append(runs)
    last = visits // 4
    return sum(seconds[-last:]) / last, chosen[-last:]


def test_where_the_gpu_bounds_steps_nothing_changes():
    _, chosen = simulate(HostBound(), 0.3e-3, 0.1e-3, 4e-3)
    assert set(chosen) == {1}


@pytest.mark.parametrize(
    ("host", "token", "device", "best"),
    [(1e-3, 0.1e-3, 0.6e-3, 2), (1e-3, 0.05e-3, 0.3e-3, 4), (2e-3, 0.02e-3, 0.3e-3, 8), (0.5e-3, 0.02e-3, 0.1e-3, 8)],
)
def test_as_many_runs_as_hide_the_host(host, token, device, best):
    took, chosen = simulate(HostBound(), host, token, device)
    assert set(chosen) == {best}
    assert took < 1.05 * max(device, host / best + token)


def test_not_where_more_runs_bring_little():
    """The host's work is that of tokens, not of visits."""
    _, chosen = simulate(HostBound(), 0.01e-3, 1e-3, 0.2e-3)
    assert max(chosen) <= 2 and chosen.count(1) > 0.9 * len(chosen)


def test_a_visit_stays_short():
    _, chosen = simulate(HostBound(), 9e-3, 0.1e-3, 3e-3)
    assert set(chosen) == {1}


def test_fewer_again_when_the_host_has_become_fast():
    policy = HostBound()
    assert set(simulate(policy, 2e-3, 0.02e-3, 0.3e-3)[1]) == {8}
    assert max(simulate(policy, 0.1e-3, 0.02e-3, 0.3e-3)[1]) == 1


@pytest.mark.parametrize(
    ("still", "run", "want"),
    [(0.28e-3, 0.7e-3, 5), (0.3e-3, 8e-3, 1), (1e-3, 0.3e-3, 8), (0.02e-3, 2e-3, 1), (9e-3, 4e-3, 2)],
)
def test_verifications_are_looked_at_seldom_enough_to_keep_the_gpu_busy(still, run, want):
    """The GPU stands `still` for so many seconds before each visit, and takes `run` for each of its runs."""
    policy = HostBound()
    assert policy.runs(3, serial=True) == 1 and policy.decisions() == []
    for visit in range(200):
        runs = policy.runs(3, serial=True)
        pause = 0.5 if visit == 130 else 0.0
        policy.observe(3, runs, still + runs * run + pause, runs * run, serial=True)
    assert policy.runs(3, serial=True) == want
    assert [told[:2] for told in policy.decisions()] == ([("runs a visit", str(want))] if want > 1 else [])
    assert policy.runs(3) == 1, "decodes are another matter"


def test_loads_are_told_apart_and_the_ledger_is_told():
    policy = HostBound()
    simulate(policy, 1e-3, 0.05e-3, 0.3e-3, num_rows=8)
    assert policy.runs(100) == 1 and policy.decisions() == []
    assert policy.runs(8) == 4
    ((what, chosen, reason, over),) = policy.decisions()
    assert (what, chosen, over) == ("runs a visit", "4", "1") and "1: 952 steps/s" in reason
