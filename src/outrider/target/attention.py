"""Attention over paged KV, registered with transformers under the name "outrider".

transformers builds no mask for a registered attention function, so this file owns causality,
tree ancestry, sliding windows, soft-capping and sinks. The context is read in place: the pages
of a request are merged into runs of neighbouring slots, and a run is a view of the KV tensors.

Shape legend: T rows of the forward, n rows of one request, S slots, L keys of one request,
H query heads, K key heads, G = H / K, D key width, E value width.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from outrider.target.base import PAGE_SIZE, ForwardBatch

IMPLEMENTATION = "outrider"
STEP_KWARG = "outrider_step"  # how the Step of a forward reaches the attention function
KEY_BLOCK = 1024  # keys per partial softmax: bounds the scores held at once


@dataclass(slots=True)
class Scoring:
    """What one layer does with the products of queries and keys."""

    scale: float
    window: int | None  # keys a row sees, itself included; None: all
    softcap: float | None
    sinks: torch.Tensor | None  # [H], a logit per head that takes weight and gives none


class KVLayers(Protocol):
    """KV of all layers, and the attention over it."""

    @property
    def bytes_per_token(self) -> int: ...

    def resized(self, num_slots: int) -> "KVLayers":
        """Empty KV of the same layers with another number of slots."""
        ...

    def begin(self, batch: ForwardBatch) -> None:
        """A forward is about to call `attend` in each layer."""
        ...

    def attend(
        self,
        step: "Step",
        layer: int,
        query: torch.Tensor,  # [H, T, D]
        key: torch.Tensor,  # [K, T, D]
        value: torch.Tensor,  # [K, T, E]
        scoring: Scoring,
    ) -> torch.Tensor:
        """Store the new rows, attend to what each may see; [T, H, E]."""
        ...

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy slots, int32 [n] each, as if all were read before any is written."""
        ...


@dataclass(slots=True)
class PagedKV:
    """Keys [S, K, D] and values [S, K, E] of every layer, for the operations of torch."""

    num_slots: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> int:
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(t[0].numel() * t.element_size() for t in tensors)

    def resized(self, num_slots: int) -> "PagedKV":
        """Empty KV of the same layers with another number of slots."""
        keys, values = (
            {i: t.new_zeros(num_slots, *t.shape[1:]) for i, t in side.items()}
            for side in (self.keys, self.values)
        )
        return PagedKV(num_slots, keys, values)

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store key [T, K, D] and value [T, K, E] of new rows; a layer is made when first met."""
        for side, rows in ((self.keys, key), (self.values, value)):
            if layer not in side:
                side[layer] = rows.new_zeros(self.num_slots, *rows.shape[1:])
            side[layer].index_copy_(0, slots, rows)

    def begin(self, batch: ForwardBatch) -> None:
        pass

    def attend(
        self,
        step: "Step",
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        self.write(layer, step.slots, key.transpose(0, 1), value.transpose(0, 1))
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])  # [T, H, E]
        for span in step.spans:
            rows = query[:, span.rows]  # [H, n, D]
            runs = span.runs_from(span.first_key(scoring.window))
            if len(runs) == 1 and scoring.softcap is None and scoring.sinks is None:
                attended = _attend_run(rows, self, layer, span, runs[0], scoring)
            else:
                attended = _attend_runs(rows, self, layer, span, runs, scoring)
            output[span.rows] = attended.transpose(0, 1)
        return output

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        for side in (self.keys, self.values):
            for tensor in side.values():
                source, destination = (
                    torch.from_numpy(slots.astype(np.int64)).to(tensor.device)
                    for slots in (sources, destinations)
                )
                tensor[destination] = tensor[source]


@dataclass(slots=True)
class Span:
    """One request's part of a forward."""

    rows: slice  # its rows among T
    context_len: int
    positions: torch.Tensor  # [n]
    seen_rows: torch.Tensor | None  # bool [n, n], new rows each row sees; None: a chain
    runs: list[tuple[int, int]]  # (first slot, length) of logical slots 0 .. context_len + n
    first_position: int  # smallest position of the new rows
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)  # by window

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def is_whole_prompt(self) -> bool:
        return self.seen_rows is None and self.context_len == 0

    def first_key(self, window: int | None) -> int:
        """First logical slot that any row can see."""
        if window is None:
            return 0
        return min(self.context_len, max(0, self.first_position - window + 1))

    def runs_from(self, first: int) -> list[tuple[int, int]]:
        """The runs that hold logical slots from ``first`` on."""
        kept, logical = [], 0
        for slot, length in self.runs:
            skip = min(length, max(0, first - logical))
            if skip < length:
                kept.append((slot + skip, length - skip))
            logical += length
        return kept

    def mask(self, window: int | None) -> torch.Tensor | None:
        """What each row sees from `first_key` on: bool [n, L], or None when it sees everything."""
        if window not in self.masks:
            self.masks[window] = self._build_mask(window)
        return self.masks[window]

    def _build_mask(self, window: int | None) -> torch.Tensor | None:
        n, device, first = self.num_rows, self.positions.device, self.first_key(window)
        if n == 1:
            return None  # one row: its window starts at first_key
        among_rows = self.seen_rows
        if among_rows is None:
            among_rows = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        context = torch.ones(n, self.context_len - first, dtype=torch.bool, device=device)
        visible = torch.cat([context, among_rows], dim=1)  # [n, L]
        if window is not None:
            committed = torch.arange(first, self.context_len, device=device)
            positions = torch.cat([committed, self.positions])  # [L]
            visible &= positions[None, :] > self.positions[:, None] - window
        return visible


@dataclass(slots=True)
class AttentionCall:
    """What one layer asked of the attention function; the probe of a new model looks at it."""

    layer: int
    scoring: Scoring
    num_heads: int
    kv_shapes: set[tuple[int, int]]  # (heads, width) of keys and of values


class Step:
    """One forward: where its rows are written, and what each of them may see."""

    def __init__(self, batch: ForwardBatch, kv: KVLayers, num_slots: int, device: torch.device):
        self.kv = kv
        self.calls: list[AttentionCall] = []
        kv.begin(batch)
        slots = np.empty(batch.num_rows, dtype=np.int64)
        self.spans: list[Span] = []
        for b in range(batch.num_requests):
            start, stop = int(batch.row_starts[b]), int(batch.row_starts[b + 1])
            context_len = int(batch.context_lens[b])
            table = batch.page_tables[b]
            logical = np.arange(context_len, context_len + stop - start)
            assert len(table) * PAGE_SIZE >= context_len + stop - start, (b, len(table))
            slots[start:stop] = table[logical // PAGE_SIZE].astype(np.int64) * PAGE_SIZE
            slots[start:stop] += logical % PAGE_SIZE
            positions = batch.positions[start:stop]
            among_rows = None
            if batch.two_way:
                among_rows = torch.ones(stop - start, stop - start, dtype=torch.bool)
            elif batch.is_tree[b]:
                among_rows = ancestors(batch.parents[start:stop])
            self.spans.append(
                Span(
                    rows=slice(start, stop),
                    context_len=context_len,
                    positions=torch.from_numpy(positions.astype(np.int64)).to(device),
                    seen_rows=None if among_rows is None else among_rows.to(device),
                    runs=page_runs(table, context_len + stop - start),
                    first_position=int(positions.min(initial=context_len)),
                )
            )
        assert slots.size == 0 or (slots.min() >= 0 and slots.max() < num_slots), slots.max()
        self.slots = torch.from_numpy(slots).to(device)


def ancestors(parents: np.ndarray) -> torch.Tensor:
    """Bool [n, n]: entry [i, j] says that row j is row i or above it. Parents precede children."""
    seen = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return torch.from_numpy(seen)


def page_runs(table: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Merge the pages that hold ``length`` tokens into (first slot, length) runs."""
    pages = table[: -(-length // PAGE_SIZE)].astype(np.int64)
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    runs = [
        (int(pages[a]) * PAGE_SIZE, min(b * PAGE_SIZE, length) - a * PAGE_SIZE)
        for a, b in pairwise(bounds)
        if b > a
    ]
    assert sum(run for _, run in runs) == length, (runs, length)
    return runs


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, K, T, D]
    value: torch.Tensor,  # [1, K, T, E]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [H], a logit per head that takes weight and gives none
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: store the new rows, attend to what each may see."""
    step: Step = kwargs[STEP_KWARG]
    assert attention_mask is None, "a mask was built although this attention owns causality"
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scoring = Scoring(scale, sliding_window or None, softcap, s_aux)
    shapes = {(side.shape[1], side.shape[-1]) for side in (key, value)}
    step.calls.append(AttentionCall(layer, scoring, query.shape[1], shapes))
    return step.kv.attend(step, layer, query[0], key[0], value[0], scoring)[None], None


def _attend_run(
    query: torch.Tensor,
    kv: PagedKV,
    layer: int,
    span: Span,
    run: tuple[int, int],
    scoring: Scoring,
) -> torch.Tensor:
    """The common case: all keys are neighbours, so torch's fused attention reads them in place."""
    where = slice(run[0], run[0] + run[1])
    key = kv.keys[layer][where].transpose(0, 1)  # [K, L, D], a view
    value = kv.values[layer][where].transpose(0, 1)  # [K, L, E], a view
    window = scoring.window
    causal = span.is_whole_prompt and (window is None or span.num_rows <= window)
    return F.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=None if causal else span.mask(window),
        is_causal=causal and span.num_rows > 1,
        scale=scoring.scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]  # [H, n, E]


def _attend_runs(
    query: torch.Tensor,
    kv: PagedKV,
    layer: int,
    span: Span,
    runs: list[tuple[int, int]],
    scoring: Scoring,
) -> torch.Tensor:
    """The general case: a softmax in fp32 over blocks of keys, each block read in place."""
    heads, n, _ = query.shape
    keys, values = kv.keys[layer], kv.values[layer]
    groups = heads // keys.shape[1]
    softcap, sinks = scoring.softcap, scoring.sinks
    mask = span.mask(scoring.window)
    grouped = (query.float() * scoring.scale).reshape(
        -1, groups * n, query.shape[-1]
    )  # [K, G*n, D]
    top = grouped.new_full((heads // groups, groups, n, 1), -torch.inf)
    if sinks is not None:
        top = top.new_zeros(()) + sinks.float().view(-1, groups, 1, 1).expand_as(top)
    weight = torch.full_like(top, 0.0 if sinks is None else 1.0)
    total = grouped.new_zeros(*top.shape[:3], values.shape[-1])  # [K, G, n, E]
    seen = 0
    for slot, length in _blocks(runs):
        where = slice(slot, slot + length)
        scores = grouped @ keys[where].float().permute(1, 2, 0)  # [K, G*n, l]
        scores = scores.view(*top.shape[:3], length)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask[:, seen : seen + length], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet has top = -inf; 0 in its place keeps exp() at 0, not NaN.
        anchor = new_top.masked_fill(new_top == -torch.inf, 0.0)
        shares, keep = torch.exp(scores - anchor), torch.exp(top - anchor)
        weight = weight * keep + shares.sum(-1, keepdim=True)
        gained = shares.view(-1, groups * n, length) @ values[where].float().transpose(0, 1)
        total = total * keep + gained.view_as(total)
        top, seen = new_top, seen + length
    return (total / weight).view(heads, n, -1).to(query.dtype)


def _blocks(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        (slot + start, min(KEY_BLOCK, length - start))
        for slot, length in runs
        for start in range(0, length, KEY_BLOCK)
    ]
