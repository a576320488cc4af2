"""Counter-based random numbers: the noise of a token depends on its key alone, never on who else is in the batch.

Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), written in int64 arithmetic so that
numpy and torch give the same bits. Token t of a sequence's position p and choice c under seed s takes word t mod 4 of
the block with key s and counter (t div 4, p, c, 0).
"""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, namespace

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # round multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments (golden ratio, sqrt(3) - 1)


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Four uint32 words (in int64 arrays) for int64 counters and keys of broadcastable shapes, each below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wrap around: the low 64 bits are exact, and the mask undoes the sign
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@op
def gumbel_noise(token_ids: Array, positions: Array, seeds: Array, choices: Array) -> Array:
    """Gumbel(0, 1) noise float32 [N, V] of tokens int64 [V] (or [N, V]) at positions, seeds and choices int64 [N].

    Adding it to log-probabilities and taking the argmax draws from them (Gumbel-max trick).
    """
    xp = namespace(token_ids)
    seeds, positions, choices = seeds[:, None], positions[:, None], choices[:, None]
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    if token_ids.ndim == 1:
        # one block serves four neighbouring tokens
        first, count = int(token_ids[0]), token_ids.shape[0]
        blocks = xp.arange(first >> 2, ((first + count - 1) >> 2) + 1, dtype=xp.int64)[None, :]
        words = philox((blocks, positions, choices, xp.zeros_like(choices)), key)
        bits = xp.reshape(xp.stack(words, axis=-1), (seeds.shape[0], -1))[:, first & 3 : (first & 3) + count]
    else:
        words = philox((token_ids >> 2, positions, choices, xp.zeros_like(choices)), key)
        lane = token_ids & 3
        bits = xp.where(lane < 2, xp.where(lane == 0, words[0], words[1]), xp.where(lane == 2, words[2], words[3]))
    # 23 bits centred in their cells: exact in float32, and never 0 or 1
    uniform = xp.astype(bits >> 9, xp.float32) * 2.0**-23 + 2.0**-24
    return -xp.log(-xp.log(uniform))
