"""A whole draft of DFlash or DSpark in one compiled call: features in, tokens out.

Between the calls it stands for, Python would cost half as much again as they do.

Shape legend: B requests, m tokens with new features, F feature width, R tokens to say of all
requests, H hidden, U vocabulary of the drafter.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.drafters.dflash import DFlash
from outrider.drafters.native import NativeStack
from outrider.drafters.native_heads import (
    Confidence,
    FuseJob,
    MarkovChains,
    MarkovJob,
    PackedLinear,
)
from outrider.drafters.stack import Stack
from outrider.native import library, pointer

_P = ctypes.c_void_p
_PER_REQUEST = ("held", "lengths", "budgets", "last")


class _BlockJob(ctypes.Structure):  # BlockJob of native/draft_block.cpp
    _fields_ = (
        ("model", _P),
        ("fuse", ctypes.POINTER(FuseJob)),
        ("confidence", ctypes.POINTER(FuseJob)),
        ("markov", ctypes.POINTER(MarkovJob)),
        *((name, ctypes.c_int) for name in ("requests", "block", "first_slot", "mask", "hidden")),
        *(
            (name, _P)
            for name in (
                *_PER_REQUEST,
                *("page_offsets", "pages", "features", "token_chances", "context"),
                *("states", "logits", "tokens", "probs", "chances"),
            )
        ),
    )


@dataclass(slots=True)
class Said:
    """What a draft came to; states and logits are valid until the next call."""

    states: torch.Tensor  # float32 [R, H], before the last norm
    logits: torch.Tensor  # float32 [R, U], without the bias of a sequential head
    tokens: np.ndarray  # int32 [R], the most likely ones, where they were to be chosen
    probs: np.ndarray  # float32 [R], of these
    chances: np.ndarray  # float32 [R], logits of acceptance; of a drafter that knows them


class NativeBlocks:
    """The draft of one drafter, from the parts that would each be a call.

    Args:
        chains: of DSpark; None: tokens are never chosen here.
        confidence: of DSpark.
    """

    def __init__(
        self,
        drafter: DFlash,
        stack: NativeStack,
        projection: PackedLinear,
        chains: MarkovChains | None,
        confidence: Confidence | None,
    ) -> None:
        lib, fuse, config = library(), projection.job, drafter.config
        assert lib is not None and fuse is not None and config.mask_token_id is not None
        self._lib, self._stack = lib, stack
        self._feature_size, self._vocab_size = config.feature_size, config.vocab_size
        self._size = drafter.block_size
        self._kept: list[Any] = [projection, chains, confidence]  # what the job points into
        self._job = _BlockJob(
            model=stack.address,
            fuse=ctypes.pointer(fuse),
            block=drafter.block_size,
            first_slot=drafter.first_slot,
            mask=config.mask_token_id,
            hidden=config.hidden_size,
        )
        self._markov = None if chains is None or chains.job is None else ctypes.pointer(chains.job)
        if confidence is not None and confidence.of_state.job is not None:
            self._job.confidence = ctypes.pointer(confidence.of_state.job)
            self._job.token_chances = pointer(confidence.of_token)
        self._context = torch.empty(0, config.hidden_size)

    @property
    def can_choose(self) -> bool:
        """True where it can say the most likely tokens itself."""
        return self._markov is not None

    def draft(
        self,
        per_request: dict[str, list[int]],
        page_tables: Sequence[np.ndarray],
        features: torch.Tensor,
        choose: bool,
    ) -> Said:
        """Take in what is new of each text, and fill its block.

        Args:
            per_request: [B] each: rows of KV that are `held`, `lengths` of the texts, `budgets`,
                and the `last` token of each text.
            page_tables: int32, of each request.
            features: float32 [m, F], of the tokens of all texts from `held` to the last but one.
            choose: say the most likely tokens, and how sure they are.
        """
        assert per_request.keys() == set(_PER_REQUEST), per_request.keys()
        arrays = {name: np.array(values, np.int32) for name, values in per_request.items()}
        new = int((arrays["lengths"] - 1 - arrays["held"]).sum())
        assert features.shape == (new, self._feature_size), (features.shape, new)
        assert arrays["lengths"].max() - 1 + self._size <= self._stack.num_positions
        assert arrays["last"].min() >= 0 and arrays["last"].max() < self._vocab_size
        features = features.float().contiguous()
        if len(self._context) < new:
            self._context = torch.empty(2 * new, self._context.shape[1])
        count = sum(per_request["budgets"])
        states, logits = self._stack.room(count)
        said = Said(
            states[:count],
            logits[:count],
            np.empty(count, np.int32),
            np.empty(count, np.float32),
            np.empty(count, np.float32),
        )
        starts = np.cumsum([0, *(len(table) for table in page_tables[:-1])], dtype=np.int32)
        pages = page_tables[0] if len(page_tables) == 1 else np.concatenate(page_tables)
        arrays |= {"page_offsets": starts, "pages": np.ascontiguousarray(pages, np.int32)}
        arrays |= {"tokens": said.tokens, "probs": said.probs, "chances": said.chances}
        job = self._job
        job.requests = len(page_tables)
        job.markov = self._markov if choose else None
        for name, array in arrays.items():
            setattr(job, name, array.__array_interface__["data"][0])
        job.features, job.context = features.data_ptr(), self._context.data_ptr()
        job.states, job.logits = states.data_ptr(), logits.data_ptr()
        self._lib.outrider_draft_block(ctypes.byref(job))
        return said


def native_blocks(
    drafter: DFlash,
    stack: Stack,
    chains: MarkovChains | None = None,
    confidence: Confidence | None = None,
) -> NativeBlocks | None:
    """The one call where all its parts are compiled, else None."""
    projection = drafter.projection
    if not isinstance(stack, NativeStack) or not isinstance(projection, PackedLinear):
        return None
    if projection.job is None or (confidence is not None and confidence.of_state.job is None):
        return None
    return NativeBlocks(drafter, stack, projection, chains, confidence)
