"""What the engine asks of a target: one ragged forward over paged KV.

Shape legend: T rows of the forward, B requests in it, R rows whose logits are wanted,
V vocabulary, P pages of one request.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

PAGE_SIZE = 16  # tokens per KV page; the width of one AVX-512 register of scores


@dataclass(slots=True)
class ForwardBatch:
    """New tokens of all requests, packed without padding.

    Request b owns rows ``row_starts[b]:row_starts[b + 1]``. Its row j is written to the
    request's logical slot ``context_lens[b] + j`` (so its physical slot is
    ``page_tables[b][i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE``) and attends to the
    ``context_lens[b]`` committed tokens, to its ancestors among the new rows, and to itself.
    There is no flag for prefill: a prompt is many new rows, a plain step is one.
    """

    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T], place in the text; a tree node's is its depth
    row_starts: np.ndarray  # int32 [B + 1]
    context_lens: np.ndarray  # int32 [B], tokens already committed to KV
    page_tables: list[np.ndarray]  # B arrays int32 [>= P]
    parents: np.ndarray  # int32 [T], row of the parent within its request; -1 = last committed
    logits_rows: np.ndarray  # int32 [R], rows of the batch, ascending
    is_tree: np.ndarray  # bool [B]; False: every row's parent is the row before it
    layer_ids: tuple[int, ...] = field(default=())  # layers whose OUTPUT is wanted; -1 = embedding
    two_way: bool = False  # new rows see all new rows of their request, not only those before

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)


@dataclass(slots=True)
class ForwardOutput:
    """Logits of the rows asked for, and the features asked for."""

    logits: torch.Tensor  # float32 [R, V], on the target's device; valid until the next forward
    features: torch.Tensor | None = None  # [T, len(layer_ids) * hidden], in the order of layer_ids


class Target(Protocol):
    """A causal language model with KV of ours. Methods are called from one thread."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int  # longest text it can hold, prompt and output together
    dtype: torch.dtype
    device: torch.device
    deterministic: bool  # a row's logits do not depend on what shares its forward
    kv_bytes_per_token: int
    embedding: torch.Tensor  # [V, hidden], of tokens, as a drafter shares it
    head: torch.Tensor  # [V, hidden], from the last normed state to logits

    def allocate_kv(self, num_pages: int) -> None:
        """Make room for ``num_pages`` pages of PAGE_SIZE tokens, dropping what was there."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the new rows, write their KV, return logits of ``batch.logits_rows``."""
        ...

    def move_kv(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy KV between physical slots, int32 [n] each, as if all were read before any write.

        This is how an accepted tree branch is brought into its place.
        """
        ...
