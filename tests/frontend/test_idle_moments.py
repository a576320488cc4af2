"""What prepares later steps is done in idle moments of an engine process: after a pause, and never before a message."""

from headrace.core.loop import EngineCore
from headrace.executor.inproc import InProcessExecutor
from headrace.frontend.engine_process import IDLE_WAIT, QUIET_WAIT, EngineLoop
from headrace.frontend.ipc import Stop


class Worker:
    """Has so many things to prepare."""

    def __init__(self, num_things, said):
        self.left, self._said = num_things, said

    def execute(self, plan):
        raise AssertionError("there is nothing to run")

    def idle(self):
        self._said.append("prepare")
        self.left -= 1
        return self.left >= 0

    def stop(self):
        pass


class Scheduler:
    has_work = False


class Inbox:
    """A message comes at the n-th wait; waits are noted."""

    def __init__(self, message_at, said):
        self._message_at, self._said, self._waits = message_at, said, 0

    def wait(self, seconds):
        self._waits += 1
        self._said.append(seconds)
        return self._waits >= self._message_at

    def take(self):
        if self._waits >= self._message_at:
            yield Stop()


class Engine:
    def __init__(self, worker):
        self.core = EngineCore(Scheduler(), InProcessExecutor(worker))


def run(num_things, message_at):
    said = []
    EngineLoop(Engine(Worker(num_things, said)), Inbox(message_at, said), None).run()
    return said


def test_all_is_prepared_after_a_pause():
    assert run(2, 4) == [QUIET_WAIT, "prepare", 0.0, "prepare", 0.0, "prepare", IDLE_WAIT]


def test_a_message_comes_first():
    assert run(5, 1) == [QUIET_WAIT], "requests that follow each other leave no pause"
    assert run(5, 2) == [QUIET_WAIT, "prepare", 0.0], "one thing is the most that a request waits for"


def test_a_busy_engine_and_workers_without_anything_prepare_nothing():
    said = []
    core = EngineCore(Scheduler(), InProcessExecutor(Worker(3, said)))
    core.scheduler.has_work = True
    assert not core.idle() and said == []
    core = EngineCore(Scheduler(), InProcessExecutor(object()))
    assert not core.idle()
