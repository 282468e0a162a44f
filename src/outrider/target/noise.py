"""Counter-based randomness: a pure function of a key and counters, the same on every path.

Nothing here has state, so neither drafts nor other requests can use up a request's randomness.
native/sample.cpp computes the same integers.
"""

import numpy as np
import torch

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # the increment and multipliers of splitmix64 (Steele et al. 2014)
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB

# Purposes of randomness, kept apart by their key; the target's own noise uses the bare key.
ACCEPT, RESIDUAL, DRAFT = 1, 2, 3


def mix(key: int, counter: int) -> int:
    """A new 64-bit key for one counter under a key; every bit depends on every bit of both."""
    return _splitmix((_splitmix(key & MASK) + counter) & MASK)


def noise_key(seed: int, choice: int) -> int:
    """The uint64 key of all randomness of one choice (0 … n-1) of a request with this seed."""
    return mix(seed, choice)


def purpose_key(key: int, purpose: int, position: int) -> int:
    """Key of one purpose in the step whose first new token is at `position` of the text.

    Steps of a request begin at different positions, so no number is ever used twice.
    """
    return mix(mix(key, purpose), position)


def draft_noise_key(key: int, position: int) -> int:
    """Key for drawing drafts under block verification, whose decision looks at all of a draft.

    There, noise shared with an earlier draft of the same position would depend on what that
    draft's rejection said. The other rules do not mind the shared noise.
    """
    return purpose_key(key, DRAFT, position)


def uniform(key: int, counter: int) -> float:
    """A number in (0, 1), with 52 random bits."""
    return ((mix(key, counter) >> 12) + 0.5) * 2.0**-52


def exponentials(key: int, token_ids: np.ndarray) -> np.ndarray:
    """Exponential variates float64 [n] of the ids under a key that is already mixed."""
    ids = token_ids.astype(np.uint64)
    z = np.uint64(key) + ids * np.uint64(GOLDEN) + np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    z ^= z >> np.uint64(31)
    return -np.log1p(-((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def gumbel_rows(keys: list[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise float64 [R, V] of ids int64 [V] under each row's mixed key, on their device."""
    start = torch.tensor([_signed(key) for key in keys], device=token_ids.device)
    z = start[:, None] + token_ids * _signed(GOLDEN) + _signed(GOLDEN)  # [R, V]
    z = (z ^ _shift(z, 30)) * _signed(FIRST)
    z = (z ^ _shift(z, 27)) * _signed(SECOND)
    z = z ^ _shift(z, 31)
    uniforms = (_shift(z, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log1p(-uniforms))


def _splitmix(z: int) -> int:
    z = (z + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * FIRST) & MASK
    z = ((z ^ (z >> 27)) * SECOND) & MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
