"""Runs a drafter's layers over rows of many requests at once, with paged KV: what drafting needs.

The compiled stack of native.py does the same in one call; this one runs anywhere torch runs.

Shape legend: T rows, R rows whose states are wanted, H hidden, U vocabulary of the drafter.
"""

from typing import Any, Protocol

import numpy as np
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.blocks import DecoderLayer
from outrider.target.attention import PagedKV, Scoring, Step
from outrider.target.base import PAGE_SIZE, ForwardBatch


class Stack(Protocol):
    """Layers, last norm and head of one drafter, and the KV of its layers."""

    kv_bytes_per_token: int

    def allocate_kv(self, num_pages: int) -> None:
        """Make room for ``num_pages`` pages of PAGE_SIZE tokens, dropping what was there."""
        ...

    def store_context(self, batch: ForwardBatch, context: torch.Tensor) -> None:
        """Write keys and values that every layer makes of ``context`` [T, H], and nothing else."""
        ...

    def run(
        self, batch: ForwardBatch, x: torch.Tensor | None, side: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers over rows ``x`` [T, H], beside ``side`` [T, H] where the first reads both.

        Without ``x`` the rows are the embeddings of the batch's tokens, which else nobody reads.

        Returns:
            Of ``batch.logits_rows``: states before the last norm, float32 [R, H], and logits,
            float32 [R, U]. Both are valid until the next call.
        """
        ...


class TorchStack:
    """The layers themselves, with attention over paged KV; see `Stack`."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        config = drafter.config
        self._kv = PagedKV(0)
        self._scoring = Scoring(config.head_dim**-0.5, None, None, None)
        parameter = drafter.norm.weight
        self._device, self._dtype = parameter.device, parameter.dtype
        self.kv_bytes_per_token = 2 * len(self._layers) * config.kv_size * parameter.element_size()

    @property
    def _layers(self) -> Any:
        return getattr(self._drafter, "layers", ())

    def allocate_kv(self, num_pages: int) -> None:
        self._kv = PagedKV(num_pages * PAGE_SIZE)

    @torch.inference_mode()
    def store_context(self, batch: ForwardBatch, context: torch.Tensor) -> None:
        step = Step(batch, self._kv, self._kv.num_slots, self._device)
        rotation = self._rotation(batch)
        for layer in self._layers:
            key, value = layer.self_attn.keys_values(context.to(self._dtype), rotation)
            self._kv.write(layer.index, step.slots, key, value)

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, x: torch.Tensor | None, side: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = Step(batch, self._kv, self._kv.num_slots, self._device)
        rotation = self._rotation(batch)

        def attend(
            layer: DecoderLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            q, k, v = (rows.transpose(0, 1) for rows in (query, key, value))
            return self._kv.attend(step, layer.index, q, k, v, self._scoring).flatten(1)

        if x is None:
            ids = torch.from_numpy(batch.token_ids.astype(np.int64)).to(self._device)
            rows = self._drafter.embed(ids).to(self._dtype)
        else:
            rows = x.to(self._dtype)
        side = None if side is None else side.to(self._dtype)
        for layer in self._layers:
            rows = layer(rows, rotation, attend, side)
            side = None
        kept = rows[torch.from_numpy(batch.logits_rows.astype(np.int64)).to(self._device)]
        return kept.float(), self._drafter.logits(kept).float()

    def _rotation(self, batch: ForwardBatch) -> torch.Tensor:
        positions = torch.from_numpy(batch.positions.astype(np.int64)).to(self._device)
        return self._drafter.rotary(positions)
