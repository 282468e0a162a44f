"""A whole draft in one compiled call: features in, tokens out.

Between the calls it stands for, Python would cost half as much again as they do.

Shape legend: B requests, m rows of texts that are new, F feature width, R tokens to say of all
requests, H hidden, U vocabulary of the drafter.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.dflash import DFlash
from outrider.drafters.masked import Masked
from outrider.drafters.native import NativeStack
from outrider.drafters.native_heads import (
    Confidence,
    FuseJob,
    MarkovChains,
    MarkovJob,
    PackedLinear,
)
from outrider.drafters.recurrent import Recurrent
from outrider.drafters.stack import Stack
from outrider.native import library, pointer
from outrider.target.rows import ROW

_P = ctypes.c_void_p


class _DraftJob(ctypes.Structure):  # DraftJob of native/draft.cpp
    _fields_ = (
        ("model", _P),
        ("fuse", ctypes.POINTER(FuseJob)),
        ("confidence", ctypes.POINTER(FuseJob)),
        ("markov", ctypes.POINTER(MarkovJob)),
        *(
            (name, ctypes.c_int)
            for name in ("requests", "hidden", "columns", "mask", "first_slot", "shift")
        ),
        *(
            (name, _P)
            for name in (
                *("held", "lengths", "budgets", "last", "fresh", "ids", "rows", "page_offsets"),
                *("pages", "features", "mask_input", "token_chances", "context", "states"),
                *("logits", "tokens", "probs", "chances"),
            )
        ),
    )


@dataclass(slots=True)
class Asked:
    """What a draft is made from; lists are [B]."""

    held: list[int]  # rows of each text whose KV is there
    texts: list[np.ndarray]  # int32, all tokens of each
    budgets: list[int]  # tokens to say
    page_tables: list[np.ndarray]  # int32
    features: torch.Tensor  # float32 [m, F], of the rows from `held` on; [m, 0] where none are read
    # How tokens are sampled, a ROW of target/rows.py for each of R; b"": the most likely ones;
    # None: they are chosen elsewhere.
    settings: bytes | None = b""


@dataclass(slots=True)
class Said:
    """What a draft came to; states and logits are valid until the next call."""

    states: torch.Tensor  # float32 [R, H], before the last norm
    logits: torch.Tensor  # float32 [R, U]; where nothing was chosen, no bias of a sequential head
    tokens: np.ndarray  # int32 [R], where they were to be chosen …
    probs: np.ndarray  # … float32 [R], their probabilities, unless the drafter knows …
    chances: np.ndarray | None  # … float32 [R], logits of acceptance


class OneCall:
    """Base: the job of one drafter, and what it points into."""

    function: str  # of the compiled code

    def __init__(
        self, drafter: Drafter, stack: NativeStack, projection: PackedLinear | None, **parts: Any
    ) -> None:
        lib, config = library(), drafter.config
        assert lib is not None
        self._call = getattr(lib, self.function)
        self._stack, self._config = stack, config
        self._shift: int = parts["shift"]
        self._is_sure = False
        self._kept: list[Any] = [projection]
        self._job = _DraftJob(
            model=stack.address,
            hidden=config.hidden_size,
            columns=config.draft_vocab_size,
            mask=config.mask_token_id or 0,
            **parts,
        )
        self._ids = drafter.d2t.cpu().numpy().astype(np.int32)
        if projection is not None and projection.job is not None:
            self._job.fuse = ctypes.pointer(projection.job)
        self._context = torch.empty(0)

    def _run(self, asked: Asked, scratch_rows: int, num_beyond: int = -1) -> Said:
        """Set the job for these requests and run it. Each has rows for what its text has, and
        for its budget and `num_beyond` more."""
        lengths = [len(text) for text in asked.texts]
        new = sum(lengths) - len(lengths) * self._shift - sum(asked.held)
        assert asked.features.shape == (new, self._config.feature_size), asked.features.shape
        ends = map(sum, zip(lengths, asked.budgets, strict=True))
        num_positions = max(ends) - self._shift + num_beyond
        assert num_positions <= self._stack.num_positions, num_positions
        last = [text[-1] for text in asked.texts]
        assert min(last) >= 0 and max(last) < self._config.vocab_size, last
        if self._context.numel() < scratch_rows * self._config.hidden_size:
            self._context = torch.empty(2 * scratch_rows * self._config.hidden_size)
        said = self._room(sum(asked.budgets))
        per_request = (asked.held, lengths, asked.budgets, last)
        tables = asked.page_tables
        arrays = {
            name: np.array(values, np.int32)
            for name, values in zip(
                ("held", "lengths", "budgets", "last"), per_request, strict=True
            )
        } | {
            "page_offsets": np.cumsum([0, *map(len, tables[:-1])], dtype=np.int32),
            "pages": tables[0] if len(tables) == 1 else np.concatenate(tables),
            "fresh": self._fresh(asked),
            "tokens": said.tokens,
            "probs": said.probs,
        }
        if said.chances is not None:
            arrays["chances"] = said.chances
        features = asked.features.float().contiguous()
        tensors = {"features": features, "context": self._context}
        tensors |= {"states": said.states, "logits": said.logits}
        job = self._job
        job.requests = len(tables)
        job.ids = None if asked.settings is None else pointer(self._ids)
        rows = np.frombuffer(asked.settings, ROW) if asked.settings else None
        assert rows is None or len(rows) == len(said.tokens), (len(rows), len(said.tokens))
        job.rows = pointer(rows)
        for name, array in arrays.items():
            setattr(job, name, array.__array_interface__["data"][0])
        for name, tensor in tensors.items():
            setattr(job, name, tensor.data_ptr())
        self._call(ctypes.byref(job))
        return said

    def _fresh(self, asked: Asked) -> np.ndarray:
        """Tokens of the rows that are new, int32 [m]."""
        new = [
            text[held + self._shift :] for text, held in zip(asked.texts, asked.held, strict=True)
        ]
        return new[0] if len(new) == 1 else np.concatenate(new)

    def _room(self, count: int) -> Said:
        states, logits = self._stack.room(count)
        return Said(
            states[:count],
            logits[:count],
            np.empty(count, np.int32),
            np.empty(count, np.float32),
            np.empty(count, np.float32) if self._is_sure else None,
        )


class NativeBlocks(OneCall):
    """DFlash and DSpark.

    Args:
        chains: of a DSpark whose sequential head it is.
        confidence: of DSpark.
    """

    function = "outrider_draft_block"

    def __init__(
        self,
        drafter: DFlash,
        stack: NativeStack,
        projection: PackedLinear,
        chains: MarkovChains | None,
        confidence: Confidence | None,
    ) -> None:
        super().__init__(drafter, stack, projection, first_slot=drafter.first_slot, shift=1)
        self._kept += [chains, confidence]
        head = getattr(drafter, "markov_head", None)
        self.can_choose = head is None or (chains is not None and chains.job is not None)
        if chains is not None and chains.job is not None:
            self._job.markov = ctypes.pointer(chains.job)
        if confidence is not None and confidence.of_state.job is not None:
            self._is_sure = True
            self._job.confidence = ctypes.pointer(confidence.of_state.job)
            self._job.token_chances = pointer(confidence.of_token)

    def draft(self, asked: Asked) -> Said:
        """Take in what is new of each text, and fill its block."""
        return self._run(asked, len(asked.features), self._job.first_slot)


class NativeMasks(OneCall):
    """P-EAGLE and PARD."""

    function = "outrider_draft_masks"

    def __init__(
        self, drafter: Masked, stack: NativeStack, projection: PackedLinear | None
    ) -> None:
        super().__init__(drafter, stack, projection, shift=drafter.shift)
        if projection is not None:
            with torch.inference_mode():
                mask = drafter.mask_inputs(1)[0].float().contiguous()  # [1, H]
            self._kept.append(mask)
            self._job.mask_input = pointer(mask)

    def draft(self, asked: Asked) -> Said:
        """Run the rows that are new of each text, one at least, and masks behind them."""
        new = len(asked.features)
        assert new >= len(asked.texts), (new, len(asked.texts))
        rows = new + sum(asked.budgets) - len(asked.budgets)
        return self._run(asked, new + rows)


class NativeChains(OneCall):
    """EAGLE-3, and MTP of one module: tokens are always chosen, one after the other."""

    function = "outrider_draft_chain"

    def __init__(self, drafter: Recurrent, stack: NativeStack, projection: PackedLinear) -> None:
        super().__init__(drafter, stack, projection, shift=1)

    def draft(self, asked: Asked) -> Said:
        """Run the rows that are new of each text, one at least, and go on from the last one."""
        new = len(asked.features)
        assert new >= len(asked.texts), (new, len(asked.texts))
        return self._run(asked, 2 * new)


def native_blocks(
    drafter: DFlash,
    stack: Stack,
    chains: MarkovChains | None = None,
    confidence: Confidence | None = None,
) -> NativeBlocks | None:
    """The one call where all its parts are compiled, else None."""
    parts = _compiled(drafter, stack)
    if parts is None or (confidence is not None and confidence.of_state.job is None):
        return None
    return NativeBlocks(drafter, *parts, chains, confidence)


def native_masks(drafter: Masked, stack: Stack) -> NativeMasks | None:
    """Likewise."""
    if drafter.config.feature_size == 0 and isinstance(stack, NativeStack):
        return NativeMasks(drafter, stack, None)
    parts = _compiled(drafter, stack)
    return None if parts is None else NativeMasks(drafter, *parts)


def native_chains(drafter: Recurrent, stack: Stack) -> NativeChains | None:
    """Likewise."""
    parts = _compiled(drafter, stack)
    return None if parts is None else NativeChains(drafter, *parts)


def _compiled(drafter: Drafter, stack: Stack) -> tuple[NativeStack, PackedLinear] | None:
    projection = drafter.projection
    if not isinstance(stack, NativeStack) or not isinstance(projection, PackedLinear):
        return None
    return None if projection.job is None else (stack, projection)
