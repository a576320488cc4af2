"""The noise: right bits, the same in every library and company, and draws that follow the distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.noise import gumbel_noise, philox

MASK = 0xFFFFFFFF


def ints(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors for philox4x32-10
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, words):
    found = philox(tuple(ints(c) for c in counter), tuple(ints(k) for k in key))
    assert [int(word[0]) for word in found] == words


def test_numpy_and_torch_agree_bit_for_bit():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    counter = tuple(rng.integers(0, 2**32, 500) for _ in range(4))
    key = tuple(rng.integers(0, 2**32, 500) for _ in range(2))
    ours = philox(counter, key)
    theirs = philox(tuple(map(torch.asarray, counter)), tuple(map(torch.asarray, key)))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other.numpy())
    arguments = np.arange(300), ints(0, 7, 99), ints(-(2**63), 5, 2**63 - 1), ints(0, 1, 2)
    noise = gumbel_noise(*map(torch.asarray, arguments))
    assert noise.dtype == torch.float32
    np.testing.assert_allclose(gumbel_noise(*arguments), noise.numpy(), rtol=1e-5, atol=1e-6)  # two logarithms


@given(first=st.integers(0, 70), count=st.integers(1, 40), seed=st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=30, deadline=None)
def test_a_part_of_the_vocabulary_has_the_noise_it_has_in_the_whole(first, count, seed):
    rest = ints(3), ints(seed), ints(1)
    whole = gumbel_noise(np.arange(128), *rest)
    ids = np.arange(first, first + count)
    np.testing.assert_array_equal(gumbel_noise(ids, *rest), whole[:, ids])
    scattered = np.random.default_rng(count).permutation(128)[None, :count]
    np.testing.assert_array_equal(gumbel_noise(scattered, *rest), whole[:, scattered[0]])


def test_a_row_does_not_know_its_neighbours():
    positions, seeds, choices = np.arange(9), np.arange(9) * 7 - 30, np.arange(9) % 3
    together = gumbel_noise(np.arange(1001), positions, seeds, choices)
    for i in range(9):
        alone = gumbel_noise(np.arange(1001), positions[i : i + 1], seeds[i : i + 1], choices[i : i + 1])
        np.testing.assert_array_equal(together[i], alone[0])
    assert len({row.tobytes() for row in together}) == 9


def test_every_part_of_the_key_matters():
    base = gumbel_noise(np.arange(64), ints(1), ints(1), ints(1))
    for other in [(2, 1, 1), (1, 2, 1), (1, 1 + 2**32, 1), (1, 1, 2)]:
        assert not np.array_equal(base, gumbel_noise(np.arange(64), *map(ints, other)))


def test_draws_follow_the_softmax():
    logits = np.array([2.0, 1.0, 0.0, -1.0, -2.0, 0.5, 1.5], np.float32)
    draws = 40_000
    for positions, seeds in [
        (np.arange(draws), np.zeros(draws, np.int64)),  # along one text
        (np.zeros(draws, np.int64), np.arange(draws)),  # the first token of many
    ]:
        noise = gumbel_noise(np.arange(7), positions, seeds, np.zeros(draws, np.int64))
        seen = np.bincount((logits + noise).argmax(-1), minlength=7)
        expected = np.exp(logits) / np.exp(logits).sum() * draws
        assert ((seen - expected) ** 2 / expected).sum() < 22.46  # chi-square, 6 degrees of freedom, p = 0.001


def test_noise_has_the_moments_of_a_gumbel_variable():
    noise = gumbel_noise(np.arange(100_000), ints(0), ints(3), ints(0))[0].astype(np.float64)
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05


def test_noise_is_finite_for_every_word(monkeypatch):
    """The largest words must not round to a uniform number of 1: infinite noise draws a token whatever its logit."""
    words = ints(0, 255, 256, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 257, 2**32 - 256, 2**32 - 1)[None]
    monkeypatch.setattr("headrace.ops.noise.philox", lambda counter, key: (words,) * 4)
    noise = gumbel_noise.reference(np.zeros((1, 9), np.int64), ints(0), ints(0), ints(0))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) >= 0).all()
