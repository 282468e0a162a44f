"""The rows of one request in one verification, and the settings of a row for the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
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
        )

    def fill(self, rows: np.ndarray) -> None:
        """Write the settings of this group's rows, dtype ROW [num_rows], all but addresses."""
        params = self.params
        rows["noise_key"] = self.noise_key
        rows["position"] = self.depths
        rows["position"] += len(self.token_ids)
        rows["temperature"] = 0.0 if params.is_greedy else params.temperature
        rows["top_p"] = params.top_p
        rows["min_p"] = params.min_p
        rows["top_k"] = max(0, params.top_k)
