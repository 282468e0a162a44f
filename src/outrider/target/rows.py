"""The rows of one request in one verification, and the settings of a row for the kernels."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.grammar import GrammarState
    from outrider.target.edits import TextCounts

# One row for sampling; the struct `Row` of native/sample.cpp has the same layout.
ROW = np.dtype(
    [
        ("logits", np.uint64),  # address of the row, float32 [V]
        ("noise_key", np.uint64),
        ("position", np.int64),  # of the token to choose, in prompt + output
        ("temperature", np.float64),  # 0: greedy
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),  # 0: all
    ]
)
# Python's struct writes a row in 0.3 µs; numpy takes as long for each field of it.
pack_row = struct.Struct("=QQqdddq").pack
UNUSED_ROW = pack_row(0, 0, -1, 0.0, 1.0, 0.0, 0)


@dataclass(slots=True)
class RowGroup:
    """One request's rows in a forward: ``first_row`` holds the logits after its last token,
    row ``first_row + 1 + i`` those after draft token i.

    A draft id outside the vocabulary stands for an unknown token: it is counted nowhere.
    """

    params: SamplingParams
    noise_key: int  # uint64 of (seed, choice)
    token_ids: np.ndarray  # int32 [n], prompt + output, the text before any draft
    num_prompt_tokens: int
    first_row: int
    draft_ids: Sequence[int] = ()
    parents: Sequence[int] = ()  # draft index of each parent, -1 = the text; empty = chain
    eos_token_ids: Sequence[int] = ()
    grammar: "GrammarState | None" = None  # where the output is in the one it follows
    counts: "TextCounts | None" = None  # kept by the engine between steps; None: counted anew

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def depths(self) -> list[int]:
        """Ancestors of each row in the draft, itself included: 0 for the first row."""
        if not self.parents:
            return list(range(self.num_rows))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return depths

    @property
    def needs_edits(self) -> bool:
        """Whether the logits of any row are edited before sampling."""
        params = self.params
        return bool(
            params.min_tokens > self.num_output_tokens
            or params.allowed_token_ids is not None
            or params.banned_token_ids
            or params.logit_bias
            or params.has_penalties
            or self.grammar is not None
        )

    def packed(self, address: int, stride: int) -> list[bytes]:
        """Each row in the layout of ROW; the first one's logits lie at `address`, the next
        `stride` bytes on."""
        params = self.params
        temperature = 0.0 if params.is_greedy else params.temperature
        settings = (temperature, params.top_p, params.min_p, max(0, params.top_k))
        position, key = len(self.token_ids), self.noise_key
        return [
            pack_row(address + row * stride, key, position + depth, *settings)
            for row, depth in enumerate(self.depths)
        ]
