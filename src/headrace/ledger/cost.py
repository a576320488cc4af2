"""How long a step will take: a linear model over its work, started from the machine's rates and fitted as steps pass.

Every feature is in seconds at the machine's measured rates, so a coefficient is a factor on the roofline: 1 is at the
roof, 2 half as fast. Features that are proportional to each other on one kind of step (a decode of constant size) are
told apart only by other steps; a weak pull to the starting values decides meanwhile.

  step     1 ms: what a step costs whatever it does
  span     10 us a span: scheduling, table and batch work
  weights  bytes of weights / bandwidth
  excess   what the linear layers' arithmetic needs beyond that: max(0, FLOP / rate - weights); with `weights` it makes
           the roofline's max(), which a sum cannot
  token    linear FLOP / rate: the part of arithmetic that does not hide behind memory
  tile     weights / bandwidth for each tile of `tile` tokens after the first: paths that stream weights per tile
  kv       bytes of KV read and written / bandwidth
  pairs    attention FLOP / rate
  logits   head FLOP / rate: head and sampling, which both grow with positions x vocabulary

Fit: non-negative least squares in relative error with exponential forgetting,
  min  sum_t forget^(now - t) w_t ((x.f_t - seconds_t) / m_t)^2  +  ridge sum_i ((x_i - start_i) / max(start_i, 0.3))^2
where m_t is the larger of the measured and the then predicted seconds, so that an absurd time counts as an error of 1
in either direction. Kept as normal equations and improved by a few sweeps of projected coordinate descent a step, or
every eight steps where predictions hold (Franc, Hlavac, Navara 2005). Robust: w_t falls with the square of the log
error beyond `_TRUST` times the usual one, a running median. So one pause of the machine moves nothing, while a lasting
change raises the usual error, is believed within some tens of steps, and makes the model forget faster until it fits
again.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ledger.machine import MachineFacts, cache_dir, read_json, write_json_atomic
from headrace.ledger.work import StepWork, WorkModel

FORMAT = 1
FEATURES = ("step", "span", "weights", "excess", "token", "tile", "kv", "pairs", "logits")
_START = (0.5, 1.0, 1.2, 1.2, 0.1, 0.02, 1.5, 2.0, 1.2)  # before any step was seen
_RIDGE = 0.01  # observations that the starting value of a coefficient is worth
_FREEDOM = 0.3  # a coefficient that starts lower is pulled no harder than one that starts here
_SWEEPS = 2
_TRUST = 4.0
_WARM_UP = 8  # observations believed in full, while the usual error is not known
_SETTLED, _TOGETHER = 64, 8  # after so many observations, and while predictions hold, this many are learnt from at once
_USUAL_STEP = 1.05  # a running median moves by this factor
_USUAL_RANGE = (0.02, 1.0)
_LOST = 0.15  # a usual error above this says that the machine or the load is no longer the one that was learnt
_FORGET_LOST = 0.95


class CostModel:
    """Predicts a step's seconds from its work, and learns from what the step took.

    `forget` weighs an observation against the one after it (0.995: the last 200 count); `tile` is the number of tokens
    that the linear layers handle in one pass over their weights. Deterministic; not thread-safe.
    """

    def __init__(self, facts: MachineFacts, *, tile: int = 16, forget: float = 0.995, window: int = 256) -> None:
        if tile < 1 or window < 1 or not 0.0 < forget <= 1.0:
            raise ValueError(f"tile and window must be above 0 and forget in (0, 1]: {tile}, {window}, {forget}")
        self.facts = facts
        self.tile = tile
        self.forget = forget
        self.num_observed = 0
        self._errors: deque[float] = deque(maxlen=window)
        self._usual = _LOST  # running median of |log(measured / predicted)|
        self._coefficients = list(_START)
        self._start = np.array(_START)
        self._pull = _RIDGE / np.maximum(self._start, _FREEDOM) ** 2  # diagonal that the ridge adds
        self._normal = np.zeros((len(_START), len(_START)))  # sum of w r r^T over rows r = features / m
        self._target = np.zeros(len(_START))  # sum of w r seconds / m
        # forget, w, r, seconds / m of observations that are not in the sums yet
        self._waiting: list[tuple[float, float, list[float], float]] = []

    @property
    def coefficients(self) -> dict[str, float]:
        """The fit by feature name; all >= 0."""
        return dict(zip(FEATURES, self._coefficients, strict=True))

    def features(self, work: StepWork) -> tuple[float, ...]:
        """The values of `FEATURES`, in seconds."""
        bandwidth, rate = self.facts.read_bandwidth, self.facts.flops
        weights = work.bytes_weights / bandwidth
        token = work.flops_linear / rate
        logits = work.flops_head / rate
        return (
            1e-3,
            1e-5 * work.num_spans,
            weights,
            max(token + logits - weights, 0.0),
            token,
            weights * max(-(-work.num_tokens // self.tile) - 1, 0),
            (work.bytes_kv_read + work.bytes_kv_write) / bandwidth,
            work.flops_attention / rate,
            logits,
        )

    def predict(self, work: StepWork) -> float:
        """Seconds that a step with this work will take."""
        return _dot(self._coefficients, self.features(work))

    def predict_each(self, model: WorkModel, spans: np.ndarray, yields: np.ndarray, decodes: bool) -> np.ndarray:
        """Seconds that each span (int [4, S], bool [S], as in a StepPlan) would have taken as a step of its own,
        float64 [S]: `predict`, many at once. `decodes` says that all are one token long and yield, and saves time."""
        step, span, by_weights, excess, by_token, by_tile, kv, by_pairs, by_logits = self._coefficients
        bandwidth, rate = self.facts.read_bandwidth, self.facts.flops
        if decodes:
            shared, visible = model.decodes(spans[1])
            num_bytes, flops = model.read_token
            return visible * (kv * num_bytes / bandwidth + by_pairs * flops / rate) + self.predict(shared)
        work = model.each(spans, yields)
        weights = work.bytes_weights / bandwidth
        linear = work.flops_linear / rate
        logits = work.flops_head / rate
        seconds = by_weights * weights + (1e-3 * step + 1e-5 * span)
        seconds += excess * np.maximum(linear + logits - weights, 0.0)
        seconds += by_token * linear
        seconds += by_tile * weights * np.maximum(np.ceil(work.num_tokens / self.tile) - 1.0, 0.0)
        seconds += (kv / bandwidth) * work.bytes_kv
        seconds += (by_pairs / rate) * work.flops_attention
        seconds += by_logits * logits
        return seconds

    def breakdown(self, work: StepWork) -> dict[str, float]:
        """The prediction by feature; the values sum to `predict(work)`."""
        return {
            name: coefficient * value
            for name, coefficient, value in zip(FEATURES, self._coefficients, self.features(work), strict=True)
        }

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this work took `seconds`. One without tokens or without a valid time is ignored."""
        if work.num_tokens == 0 or not (math.isfinite(seconds) and seconds > 0.0):
            return
        features = self.features(work)
        predicted = _dot(self._coefficients, features)
        self._errors.append(abs(predicted - seconds) / seconds)
        weight = self._trust(seconds / max(predicted, 1e-12))
        self.num_observed += 1

        scale = max(predicted, seconds)
        lost = self._usual > _LOST
        forget = min(self.forget, _FORGET_LOST) if lost else self.forget
        self._waiting.append((forget, weight, [value / scale for value in features], seconds / scale))
        if lost or self.num_observed <= _SETTLED or len(self._waiting) >= _TOGETHER:
            self._learn()

    def _learn(self) -> None:
        """Take what waits into the sums, and improve the fit."""
        kept, (forgets, weights, rows, goals) = 1.0, zip(*self._waiting, strict=True)
        weighed = []
        for forget, weight in zip(reversed(forgets), reversed(weights), strict=True):
            weighed.append(weight * kept)  # what is left of it after those behind it
            kept *= forget
        self._waiting.clear()
        each = np.array(rows)
        by_weight = each * np.array(weighed[::-1])[:, None]
        self._normal = self._normal * kept + by_weight.T @ each
        self._target = self._target * kept + np.array(goals) @ by_weight
        self._improve()

    def _trust(self, ratio: float) -> float:
        """Weight of an observation that took `ratio` times what was predicted."""
        error = abs(math.log(ratio))
        limit = _TRUST * self._usual
        low, high = _USUAL_RANGE
        self._usual = min(max(self._usual * (_USUAL_STEP if error > self._usual else 1 / _USUAL_STEP), low), high)
        if self.num_observed < _WARM_UP or error <= limit:
            return 1.0
        return (limit / error) ** 2

    def _improve(self) -> None:
        """Some sweeps of coordinate descent from the present fit: x_i = max(0, the minimiser with the others fixed)."""
        normal, x = self._normal, self._coefficients
        rows = normal.tolist()
        diagonal = normal.diagonal() + self._pull
        scales = (1.0 / diagonal).tolist()
        goals = (self._target + self._pull * self._start).tolist()
        for _ in range(_SWEEPS):
            for i, row in enumerate(rows):
                others = _dot(row, x) - row[i] * x[i]
                x[i] = max((goals[i] - others) * scales[i], 0.0)

    def error(self) -> tuple[float, float]:
        """(median, 90th percentile) of |predicted - measured| / measured over the last window, each prediction made
        before its step was learnt from. NaN before the first observation."""
        if not self._errors:
            return math.nan, math.nan
        median, p90 = np.quantile(np.array(self._errors), (0.5, 0.9))
        return float(median), float(p90)

    def save(self, name: str) -> bool:
        """Keep the fit for this machine and `name` (a model and how it is loaded). False when it cannot be written."""
        if self._waiting:
            self._learn()
        value = {
            **self._identity(name),
            "coefficients": self._coefficients,
            "normal": self._normal.tolist(),
            "target": self._target.tolist(),
            "usual": self._usual,
            "num_observed": self.num_observed,
        }
        return write_json_atomic(self._path(name), value)

    def restore(self, name: str) -> bool:
        """Go on from the fit that `save(name)` kept. False, and nothing changes, when there is none that fits this
        machine, tile and version."""
        stored = read_json(self._path(name))
        identity = self._identity(name)
        if not isinstance(stored, dict) or {key: stored.get(key) for key in identity} != identity:
            return False
        try:
            size = len(FEATURES)
            coefficients = np.array(stored["coefficients"], float)
            normal = np.array(stored["normal"], float)
            target = np.array(stored["target"], float)
            usual, num_observed = float(stored["usual"]), int(stored["num_observed"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        if coefficients.shape != (size,) or normal.shape != (size, size) or target.shape != (size,):
            return False
        values = np.concatenate([coefficients, normal.ravel(), target, [usual]])
        if not np.isfinite(values).all() or (values < 0).any() or num_observed < 0:
            return False
        self._coefficients, self._normal, self._target = coefficients.tolist(), normal, target
        self._waiting.clear()
        self._usual = min(max(usual, _USUAL_RANGE[0]), _USUAL_RANGE[1])
        self.num_observed = num_observed
        return True

    def _identity(self, name: str) -> dict[str, Any]:
        """What a stored fit must agree on: the features are scaled by the machine's rates."""
        facts = self.facts
        return {
            "format": FORMAT,
            "name": name,
            "features": list(FEATURES),
            "tile": self.tile,
            "machine": [facts.device_name, facts.num_threads, facts.read_bandwidth, facts.flops],
        }

    def _path(self, name: str) -> Path:
        facts = self.facts
        key = f"{name}|{facts.device_name}|{facts.num_threads}|{self.tile}"
        return cache_dir() / "cost" / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.json"


def _dot(a: list[float], b: list[float] | tuple[float, ...]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total
