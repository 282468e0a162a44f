"""The target's features of committed tokens, kept where their KV lies.

A request that begins with KV of an earlier text runs no forward over it, yet a drafter wants the
features of every token. They lie by KV slot, so they belong to whoever holds the page.

Shape legend: S slots of the arena, n tokens of one text, F width of all features.
"""

import numpy as np
import torch

from outrider.target.base import PAGE_SIZE


class SlotFeatures:
    """Room for the features of every slot; memory is taken when the first are kept.

    Args:
        dtype: that of the target, which drafters round to as well.
    """

    def __init__(self, num_pages: int, dtype: torch.dtype) -> None:
        self._num_slots = num_pages * PAGE_SIZE
        self._dtype = dtype
        self._given: torch.dtype = dtype
        self._rows: torch.Tensor | None = None  # [S, F]

    def keep(self, slots: np.ndarray, features: torch.Tensor) -> None:
        """Features [n, F] of the tokens in these slots, int [n]."""
        if self._rows is None:
            shape = (self._num_slots, features.shape[1])
            self._rows = torch.empty(shape, dtype=self._dtype, device=features.device)
            self._given = features.dtype
        index = torch.from_numpy(slots).to(features.device)
        self._rows[index] = features.to(self._dtype)  # [n, F]

    def of(self, slots: np.ndarray) -> torch.Tensor:
        """What was kept of the tokens in these slots, in the dtype it was given in: [n, F]."""
        assert self._rows is not None, "no features were kept"
        index = torch.from_numpy(slots).to(self._rows.device)
        return self._rows[index].to(self._given)  # [n, F]


def slots_of(pages: np.ndarray, first: int, end: int) -> np.ndarray:
    """Physical slots of the tokens [first, end) of a text with these pages: int64 [end - first]."""
    places = np.arange(first, end)
    return pages[places // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + places % PAGE_SIZE
