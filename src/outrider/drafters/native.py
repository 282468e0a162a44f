"""A drafter's layers compiled: one C++ call per forward, where torch needs a hundred.

Shape legend: T rows, R rows whose states are wanted, H hidden, U vocabulary of the drafter.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from outrider.drafters.base import Drafter
from outrider.drafters.blocks import DecoderLayer, RMSNorm
from outrider.errors import ModelError
from outrider.native import library
from outrider.target.base import ForwardBatch
from outrider.target.native_batch import native_batch
from outrider.target.native_model import TILE, Layer, NativeModel, Shape


def why_not_native(drafter: Drafter) -> str | None:
    """The reason this drafter needs `TorchStack`, or None if `NativeStack` runs it."""
    config = drafter.config
    device = drafter.norm.weight.device.type
    if device != "cpu":
        return f"compiled layers run on the CPU, not on {device}"
    if library() is None:
        return "the compiled kernels are not available"
    widths = {"hidden_size": config.hidden_size}
    if len(_layers(drafter)):
        widths |= {"intermediate_size": config.intermediate_size, "head_dim": config.head_dim}
    odd = [f"{name} is {width}" for name, width in widths.items() if width % TILE]
    return f"{odd[0]}, not a multiple of {TILE}" if odd else None


class NativeStack:
    """Compiled layers, last norm and head of a drafter: see `outrider.drafters.stack.Stack`.

    A row's results have the same bits whatever shares the call. New row j of a request has the
    position ``context_lens[b] + j``, below the configuration's
    ``max_position + num_draft_tokens``.

    Args:
        drafter: attached to its target; later changes to its parameters are not seen.
        dtype: bfloat16 or float32, of weights and KV; sums, norms and states are float32.
        codes: as of `NativeModel`; None: with bfloat16. Reading its weights is most of what a small
            draft takes, and what is proposed hardly changes.

    Raises:
        ModelError: this drafter cannot be run; the message says why.
    """

    def __init__(self, drafter: Drafter, dtype: torch.dtype, codes: bool | None = None) -> None:
        reason, lib = why_not_native(drafter), library()
        if reason is not None or lib is None:
            raise ModelError(f"drafter {drafter.config.algorithm}: {reason}")
        config, layers = drafter.config, _layers(drafter)
        self._has_side = len(layers) > 0 and hasattr(layers[0], "hidden_norm")
        self.num_positions = config.max_position + config.num_draft_tokens
        rotation = drafter.rotary(torch.arange(self.num_positions))  # [2, positions, 1, D / 2]
        shape = Shape(
            layers=len(layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=len(drafter.head),
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_dim=config.head_dim,
            epsilon=config.norm_epsilon,
            query_scale=config.head_dim**-0.5,
            has_side_input=self._has_side,
        )
        self._model = NativeModel(
            lib,
            shape,
            _parameters(layers, torch.cat([*rotation], dim=-1)[:, 0]),
            drafter.norm.weight,
            drafter.head,
            drafter.embedding,
            dtype,
            dtype == torch.bfloat16 if codes is None else codes,
        )
        self.kv_bytes_per_token = self._model.kv_bytes_per_token
        self.weight_bytes = self._model.weight_bytes
        self._states = torch.empty(0, config.hidden_size)
        self._logits = torch.empty(0, len(drafter.head))

    def allocate_kv(self, num_pages: int) -> None:
        self._model.allocate_kv(num_pages)

    def store_context(self, batch: ForwardBatch, context: torch.Tensor) -> None:
        assert not self._has_side, "keys and values of the first layer need both inputs"
        rows = self._rows(batch, context)
        packed, _arrays = native_batch(batch, x=rows)
        self._model.store_context(packed)

    def run(
        self, batch: ForwardBatch, x: torch.Tensor | None, side: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._has_side == (side is not None)
        count = len(batch.logits_rows)
        states, logits = self.room(count)
        x = None if x is None else self._rows(batch, x)
        side = None if side is None else self._rows(batch, side)
        packed, _arrays = native_batch(batch, x=x, side=side, states=states, logits=logits)
        self._model.forward(packed)
        return states[:count], logits[:count]

    def room(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where states [.., H] and logits [.., U] of so many rows go; taken again by each call."""
        if len(self._states) < count:
            room = max(count, 2 * len(self._states))
            self._states = torch.empty(room, self._states.shape[1])
            self._logits = torch.empty(room, self._logits.shape[1])
        return self._states, self._logits

    @property
    def address(self) -> ctypes.c_void_p:
        """Of the layers, for compiled code that runs them itself."""
        assert self._model.address is not None
        return self._model.address

    def _rows(self, batch: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] as the kernels read them."""
        assert rows.shape == (batch.num_rows, self._states.shape[1]), rows.shape
        assert batch.positions.max(initial=0) < self.num_positions, self.num_positions
        return rows.detach().float().contiguous()


def _layers(drafter: Drafter) -> Any:
    return getattr(drafter, "layers", ())


def _parameters(layers: Any, rope: torch.Tensor) -> Iterator[Layer]:
    layer: DecoderLayer
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        has_side = hasattr(layer, "hidden_norm")
        vectors = {
            "side_norm": layer.input_layernorm if has_side else None,
            "input_norm": layer.hidden_norm if has_side else layer.input_layernorm,
            "mlp_norm": layer.post_attention_layernorm,
            "query_norm": attention.q_norm,
            "key_norm": attention.k_norm,
        }
        yield Layer(
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
            attention.o_proj.weight,
            [mlp.gate_proj.weight, mlp.up_proj.weight],
            mlp.down_proj.weight,
            {n: norm.weight for n, norm in vectors.items() if isinstance(norm, RMSNorm)},
            rope,
            residual_is_normed=has_side and layer.norm_before_residual,
        )
