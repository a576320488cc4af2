"""Messages between the API process and the engine process, and the two sockets that carry them.

Each message is one msgpack array with its tag first, over ZMQ PUSH/PULL on sockets of the local file system, which lie
in a folder that only their owner may enter. Both sides are ours and of one version, so there is no negotiation; a
message that does not decode is a bug and raises msgspec.DecodeError.

    API process --> Add, Abort, Ask, Stop --------------> engine process
    API process <-- Ready, News, Rejected, Answer, Died <-- engine process
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

from headrace.core.request import FinishReason, TokenOutput
from headrace.sampling.params import SamplingParams

MAX_SOCKET_PATH = 100  # bytes: a socket's path must fit into 108 on Linux and 104 elsewhere


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Queue a prompt. Its requests are named as InputProcessor.prepare names them."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    arrival: float  # time.monotonic(), which all processes of a machine share
    batch: bool = False  # nobody waits for its tokens as they come


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End requests, wherever they are; unknown ids are ignored."""

    ids: list[str]
    reason: FinishReason


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """A question that the engine answers between two steps: "ping", "ledger" (argument: "AFTER LAST", a step id and
    how many records), "bill" (argument: an id)."""

    token: int
    what: str
    argument: str = ""


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """End the process, and whatever runs in it."""


class Rejected(msgspec.Struct, tag="rejected", array_like=True, frozen=True):
    """An Add that cannot be served; nothing of it is queued."""

    id: str
    message: str


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """The engine at this moment; totals since it started (0 where no ledger is kept)."""

    running: int = 0
    waiting: int = 0
    blocks_held: int = 0
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # of prompts admitted
    cached_tokens: int = 0  # of them, found in the prefix cache
    preemptions: int = 0
    seconds_by_bound: dict[str, float] = {}
    steps_by_bound: dict[str, int] = {}
    draft_tokens: int = 0  # verified
    accepted_draft_tokens: int = 0
    drafts: dict[str, list[int]] = {}  # proposer -> [verified, accepted]
    draft_positions: list[list[int]] = []  # of each place in a draft: [verified, accepted]
    draft_seconds: float = 0.0  # that proposing took
    wasted_seconds: float = 0.0  # that steps took longer for drafts that were wrong, predicted
    proposers_dropped: int = 0
    backlog: float = 0.0  # predicted seconds until the prompts known now have been run; 0 where nothing predicts


class News(msgspec.Struct, tag="news", array_like=True, frozen=True):
    """What a step, or an abort, brought."""

    outputs: list[TokenOutput]
    stats: Stats
    queued: dict[str, float]  # request that ended -> seconds that it waited for admission; empty without a ledger


class Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    """To the Ask with this token: JSON lines, or nothing."""

    token: int
    data: bytes


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the API process needs to know of an engine."""

    max_model_len: int
    max_prompt_len: int  # the longest prompt that leaves room for one token
    max_num_seqs: int
    num_blocks: int
    block_size: int
    load_seconds: float
    choices: list[tuple[str, str, str]]  # (option, value, reason)
    proposers: tuple[str, ...] = ()  # of drafts


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The model is loaded."""

    info: EngineInfo


class Died(msgspec.Struct, tag="died", array_like=True, frozen=True):
    """The engine cannot go on; the process ends after this."""

    summary: str  # one line
    cause: str  # the whole traceback, or the same line
    fault_of_user: bool  # an option or a model that cannot be, rather than a bug


ToEngine = Add | Abort | Ask | Stop
ToApi = Ready | News | Rejected | Answer | Died
M = TypeVar("M", bound=msgspec.Struct)


class Inbox(Generic[M]):
    """The receiving end of one direction."""

    def __init__(self, socket: zmq.Socket[bytes], decode: Callable[[bytes], M]):
        self._socket = socket
        self._decode = decode

    @property
    def descriptor(self) -> int:
        """For an event loop: readable when something *may* have come. It tells only once, so read until empty."""
        return int(self._socket.getsockopt(zmq.FD))

    def wait(self, seconds: float) -> bool:
        """Whether a message is there, waiting for one at most so long."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def take(self) -> Iterator[M]:
        """The messages that have come."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decode(data)

    def close(self) -> None:
        self._socket.close(linger=0)


class Outbox:
    """The sending end of one direction. It never blocks: what the other side has not read yet is kept in memory, which
    the answers of the requests running bound."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.Again):  # only when the peer is gone and the socket closing
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self, seconds: float = 0.0) -> None:
        """Close, giving the peer at most so long to read what is left."""
        self._socket.close(linger=int(seconds * 1000))


class Addresses(msgspec.Struct, frozen=True):
    """Where the two sockets are."""

    to_engine: str
    to_api: str


class PrivateFolder:
    """A folder for sockets that only this user can enter; removed by `close`."""

    def __init__(self) -> None:
        path = tempfile.mkdtemp(prefix="headrace-")  # mode 0700
        if len(os.fsencode(path)) > MAX_SOCKET_PATH - len("/to-engine"):
            os.rmdir(path)
            path = tempfile.mkdtemp(prefix="headrace-", dir="/tmp")
        self.path = path

    @property
    def addresses(self) -> Addresses:
        return Addresses(f"ipc://{self.path}/to-engine", f"ipc://{self.path}/to-api")

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def api_side(context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses) -> tuple[Outbox, Inbox[ToApi]]:
    """Bind both sockets; before the engine process starts."""
    push, pull = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
    push.bind(addresses.to_engine)
    pull.bind(addresses.to_api)
    return Outbox(push), Inbox(pull, msgspec.msgpack.Decoder(ToApi).decode)


def engine_side(context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses) -> tuple[Outbox, Inbox[ToEngine]]:
    """Connect to both sockets."""
    push, pull = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
    push.connect(addresses.to_api)
    pull.connect(addresses.to_engine)
    return Outbox(push), Inbox(pull, msgspec.msgpack.Decoder(ToEngine).decode)
