"""Deterministic execution of models that run through transformers on the CPU.

Matrix products and attention of torch sum in an order that depends on the number of rows, so in
bf16 a near-tie falls one way in a plain step and another way in a verification. Here linear
layers and attention are the compiled kernels', whose sums have one order per row.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from outrider.native import library, pointer
from outrider.target.attention import AttentionCall, Scoring, Step
from outrider.target.base import PAGE_SIZE, ForwardBatch
from outrider.target.native_batch import native_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REGISTERS = 64  # elements: a multiple of what torch handles in one turn of a vectorised loop
PIECE = 1 << 15  # elements: what torch leaves to one thread
TILE = 16  # outputs per packed tile, as in native/multiply.h


class RowExactLinear(nn.Module):
    """A linear layer whose rows do not depend on each other. Inference only, on the CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        lib = library()
        assert lib is not None
        self._lib = lib
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        weight = linear.weight.detach().contiguous()
        tiles = -(-self.out_features // TILE)
        self.weight: torch.Tensor | None = None  # [out, in], kept of a head for other targets
        self._packed = torch.zeros(tiles * TILE * self.in_features, dtype=self.dtype)
        bf16 = int(self.dtype == torch.bfloat16)
        lib.outrider_pack(
            *(pointer(self._packed), bf16, pointer(weight), bf16),
            *(self.out_features, self.in_features, 0, 1, tiles),
        )
        self._bias = None if linear.bias is None else linear.bias.detach().float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype:  # the kernels would read beyond its end
            raise TypeError(f"weights packed in {self.dtype} got rows of {x.dtype}")
        x = x.contiguous()  # [..., in_features]
        out = x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.numel() // self.in_features
        self._lib.outrider_linear(
            *(int(self.dtype == torch.bfloat16), pointer(out), pointer(x)),
            *(pointer(self._packed), pointer(self._bias), ctypes.c_long(rows)),
            *(self.in_features, self.out_features),
        )
        return out


class RowExactActivation(nn.Module):
    """An elementwise function, applied in pieces that torch computes in whole registers.

    torch takes another path (with other last bits: SiLU, GELU) for what is left over at the end
    of a tensor, or of the part that one of its threads gets.
    """

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        padded = nn.functional.pad(x, (0, -width % REGISTERS)).reshape(-1)
        pieces = [self._function(piece) for piece in padded.split(PIECE)]
        out = torch.cat(pieces).view(*x.shape[:-1], -1)
        return out[..., :width]


class TiledKV:
    """KV in the kernels' tiles, for layers that all have the same shape: see `KVLayers`."""

    def __init__(
        self,
        *,
        num_layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_slots: int,
    ) -> None:
        lib = library()
        assert lib is not None
        self._lib = lib
        self._shape = (num_layers, heads, kv_heads, head_dim)
        self._dtype = dtype
        self._arrays: dict[str, np.ndarray] = {}  # of the forward under way
        lib.outrider_attention_new.restype = ctypes.c_void_p
        self._attention = ctypes.c_void_p(
            lib.outrider_attention_new(int(dtype == torch.bfloat16), *self._shape)
        )
        pages = ctypes.c_long(-(-num_slots // PAGE_SIZE))
        lib.outrider_attention_allocate(self._attention, pages)

    @property
    def bytes_per_token(self) -> int:
        num_layers, _, kv_heads, head_dim = self._shape
        return 2 * num_layers * kv_heads * head_dim * self._dtype.itemsize

    def resized(self, num_slots: int) -> "TiledKV":
        num_layers, heads, kv_heads, head_dim = self._shape
        return TiledKV(
            num_layers=num_layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self._dtype,
            num_slots=num_slots,
        )

    def begin(self, batch: ForwardBatch) -> None:
        packed, self._arrays = native_batch(batch)
        self._lib.outrider_attention_begin(self._attention, ctypes.byref(packed))

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        _, heads, kv_heads, dim = self._shape
        rows = query.shape[1]
        grouped = query.reshape(kv_heads, heads // kv_heads, rows, dim).transpose(1, 2).contiguous()
        keys, values = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
        out = query.new_empty(rows, heads, dim)
        scale, softcap = ctypes.c_float(scoring.scale), ctypes.c_float(scoring.softcap or 0.0)
        self._lib.outrider_attention_layer(
            *(self._attention, layer, pointer(grouped), pointer(keys), pointer(values)),
            *(scale, softcap, scoring.window or 0, pointer(out)),
        )
        return out

    def move(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        sources = np.ascontiguousarray(sources, dtype=np.int32)
        destinations = np.ascontiguousarray(destinations, dtype=np.int32)
        self._lib.outrider_attention_move(
            self._attention, pointer(sources), pointer(destinations), len(sources)
        )

    def __del__(self) -> None:
        if getattr(self, "_attention", None):
            self._lib.outrider_attention_free(self._attention)
            self._attention = None


def why_not_row_exact(model: "PreTrainedModel", calls: Sequence[AttentionCall]) -> str | None:
    """Why the kernels cannot take over linear layers and attention, or None.

    `calls`: what the attention of each layer was asked for.
    """
    if model.device.type != "cpu":
        return f"deterministic execution runs on the CPU, not on {model.device.type}"
    if library() is None:
        return "the compiled kernels are not available"
    if model.dtype not in (torch.bfloat16, torch.float32):
        return f"there is no kernel for weights of {model.dtype}"
    if any(call.scoring.sinks is not None for call in calls):
        return "there is no kernel for attention sinks"
    shapes = set().union(*(call.kv_shapes for call in calls))
    if len(shapes) != 1 or len({call.num_heads for call in calls}) != 1:
        return f"its layers keep KV of different shapes: {sorted(shapes)}"
    ((_, width),) = shapes
    if width % TILE:
        return f"its heads are {width} wide, not a multiple of {TILE}"
    odd = [name for name, linear in _linears(model) if linear.in_features % 2]
    return f"{odd[0]} has an odd number of inputs" if odd else None


class RowExactModules:
    """Linear layers and activations of a model as ours; `undo` brings its own back."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear:
                self._replace(model, name, module, RowExactLinear(module))
            elif _is_activation(module):
                self._replace(model, name, module, RowExactActivation(module))

    def undo(self) -> None:
        for parent, attribute, module in self._places:
            setattr(parent, attribute, module)

    def _replace(
        self, model: "PreTrainedModel", name: str, module: nn.Module, ours: nn.Module
    ) -> None:
        parent_name, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        self._places.append((parent, attribute, module))
        setattr(parent, attribute, ours)


def _linears(model: "PreTrainedModel") -> list[tuple[str, Any]]:
    return [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ == "transformers.activations" or isinstance(
        module, nn.SiLU | nn.GELU | nn.Sigmoid | nn.Tanh
    )
