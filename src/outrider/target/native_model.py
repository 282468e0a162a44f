"""A decoder as the compiled kernels run it: packed weights, KV, one call per forward.

Targets (native.py) and drafters (outrider/drafters/native.py) describe themselves to it.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.native import pointer
from outrider.target.native_batch import NativeBatch

TILE = 16  # outputs per packed tile, as in native/multiply.h
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # Kind of native/multiply.h
SCALE_BYTES = 4  # of an output, where weights are codes

_P = ctypes.c_void_p
_PLACES = ("qkv", "attention_out", "gate_up", "down")
_VECTORS = (
    *("qkv_bias", "out_bias", "input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
    *("query_norm", "key_norm", "side_norm"),
)


class _LayerSpec(ctypes.Structure):  # LayerSpec of native/forward.cpp
    _fields_ = (
        *((name, _P) for name in (*_PLACES, *_VECTORS, "rope")),
        ("window", ctypes.c_int),
        ("residual_is_normed", ctypes.c_int),
    )


class _ModelSpec(ctypes.Structure):  # ModelSpec of native/forward.cpp
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                *("layers", "hidden", "intermediate", "vocab", "padded_vocab", "heads"),
                *("kv_heads", "head_dim", "rope_dim", "kind", "use_gelu"),
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in (
                *("epsilon", "query_scale", "attention_softcap", "logits_softcap"),
                "embedding_scale",
            )
        ),
        ("embedding", _P),
        ("lm_head", _P),
        ("final_norm", _P),
        ("layer", ctypes.POINTER(_LayerSpec)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and constants of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    epsilon: float
    query_scale: float
    use_gelu: bool = False
    attention_softcap: float = 0.0  # 0: none
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    has_side_input: bool = False  # queries, keys and values of layer 0 are made from 2 hidden

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // TILE) * TILE

    @property
    def matrices(self) -> Iterator[tuple[int, int]]:
        """(outputs, inputs) of every packed matrix."""
        for layer in range(self.layers):
            width = 2 * self.hidden if self.has_side_input and layer == 0 else self.hidden
            yield (self.heads + 2 * self.kv_heads) * self.head_dim, width
            yield self.hidden, self.heads * self.head_dim
            yield 2 * self.intermediate, self.hidden
            yield self.hidden, self.intermediate
        yield self.padded_vocab, self.hidden


@dataclass(slots=True)
class Layer:
    """Parameters of one layer: matrices [outputs, inputs], vectors by their names in LayerSpec."""

    queries_keys_values: Sequence[torch.Tensor]
    attention_out: torch.Tensor
    gate_and_up: Sequence[torch.Tensor]
    down: torch.Tensor
    vectors: dict[str, torch.Tensor]
    rope: torch.Tensor  # float32 [positions, rope_dim] = [cos | sin]
    window: int = 0  # 0: the whole context
    residual_is_normed: bool = False

    @property
    def places(self) -> Iterator[Sequence[torch.Tensor]]:
        """The matrices of each of _PLACES."""
        yield self.queries_keys_values
        yield (self.attention_out,)
        yield self.gate_and_up
        yield (self.down,)


class NativeModel:
    """A decoder on the C++ side, and what it points into.

    Args:
        lib: the kernels.
        layers: read one after the other, so that they need not be in memory together.
        head: [vocab, hidden].
        embedding: [vocab, hidden], or None where rows are given in place of tokens.
        dtype: of weights and KV; sums, norms and the residual stream are always float32.
        codes: keep matrices as codes of 7 bits with a scale per output, beside bfloat16: half the
            bytes, and weights that are off by 1.5 % of their spread.
    """

    def __init__(
        self,
        lib: ctypes.CDLL,
        shape: Shape,
        layers: Iterable[Layer],
        final_norm: torch.Tensor,
        head: torch.Tensor,
        embedding: torch.Tensor | None,
        dtype: torch.dtype,
        codes: bool = False,
    ) -> None:
        assert dtype == torch.bfloat16 or not codes, dtype
        self._lib = _declare(lib)
        self.shape, self.dtype = shape, dtype
        packed = torch.uint8 if codes else dtype
        self._kept: dict[int, Any] = {}  # what the C++ side points into, by its address
        self._specs = (_LayerSpec * shape.layers)()
        self._weights = _Block(self._lib, shape, packed)
        for spec, layer in zip(self._specs, layers, strict=True):
            self._fill(spec, layer)
        spec = _ModelSpec(
            kind=KINDS[packed],
            embedding=None if embedding is None else self._keep(embedding, dtype),
            lm_head=self._weights.pack([head], shape.padded_vocab // TILE),
            final_norm=self._keep(final_norm),
            layer=self._specs,
            **{
                name: getattr(shape, name)
                for name, *_ in _ModelSpec._fields_
                if hasattr(shape, name)
            },
        )
        self.weight_bytes = self._weights.num_bytes  # read once by every forward
        self.address = _P(self._lib.outrider_model_new(ctypes.byref(spec)))

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self.dtype.itemsize

    def allocate_kv(self, num_pages: int) -> None:
        self._lib.outrider_model_allocate_kv(self.address, num_pages)

    def forward(self, batch: NativeBatch) -> None:
        self._lib.outrider_model_forward(self.address, ctypes.byref(batch))

    def store_context(self, batch: NativeBatch) -> None:
        """Keys and values that each layer makes of the given rows as they are."""
        self._lib.outrider_model_store_context(self.address, ctypes.byref(batch))

    def move_kv(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        sources = np.ascontiguousarray(sources, dtype=np.int32)
        destinations = np.ascontiguousarray(destinations, dtype=np.int32)
        self._lib.outrider_model_move_kv(
            self.address, pointer(sources), pointer(destinations), len(sources)
        )

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._lib.outrider_model_free(self.address)
            self.address = None

    def _fill(self, spec: _LayerSpec, layer: Layer) -> None:
        """The layer as the C++ side sees it."""
        for place, matrices in zip(_PLACES, layer.places, strict=True):
            num_tiles = sum(len(matrix) // TILE for matrix in matrices)
            setattr(spec, place, self._weights.pack(matrices, num_tiles, place == "gate_up"))
        for name, vector in layer.vectors.items():
            setattr(spec, name, self._keep(vector))
        spec.rope = self._keep(layer.rope)
        spec.window = layer.window
        spec.residual_is_normed = int(layer.residual_is_normed)

    def _keep(self, tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
        """Address of the tensor as contiguous `dtype`, kept for the life of the model."""
        tensor = tensor.detach().to(dtype).contiguous()
        self._kept[tensor.data_ptr()] = tensor
        return tensor.data_ptr()


class _Block:
    """All matrices of a model in tiles, in one block of huge pages in the order of their use."""

    def __init__(self, lib: ctypes.CDLL, shape: Shape, dtype: torch.dtype) -> None:
        self._lib, self._kind, self._item = lib, KINDS[dtype], dtype.itemsize
        self._scale = SCALE_BYTES if dtype == torch.uint8 else 0
        self.num_bytes = sum(self._bytes(*each) for each in shape.matrices)
        self._memory: int = lib.outrider_allocate(self.num_bytes) or 0
        if not self._memory:
            raise MemoryError(f"no memory for {self.num_bytes} bytes of weights")
        self._end = self._memory  # of what is packed

    def pack(
        self, matrices: Sequence[torch.Tensor], num_tiles: int, alternate: bool = False
    ) -> int:
        """Append one matrix of all outputs, tile after tile or in turns; its address."""
        at, first = self._end, 0
        for i, matrix in enumerate(matrices):
            where = (i, len(matrices)) if alternate else (first, 1)
            self._pack(at, matrix.detach(), *where, num_tiles)
            first += len(matrix) // TILE
        self._end += self._bytes(num_tiles * TILE, matrices[0].shape[1])
        assert self._end <= self._memory + self.num_bytes
        return at

    def _bytes(self, outputs: int, inputs: int) -> int:
        return outputs * (inputs * self._item + self._scale)

    def _pack(self, at: int, weight: torch.Tensor, first: int, step: int, num_tiles: int) -> None:
        """Put weights into every `step`-th tile, from the `first`, of the matrix at an address."""
        weight = weight.contiguous()
        if weight.dtype not in (torch.bfloat16, torch.float32):
            weight = weight.float()
        outputs, inputs = weight.shape
        self._lib.outrider_pack(
            *(_P(at), self._kind),
            *(pointer(weight), int(weight.dtype == torch.bfloat16), outputs, inputs),
            *(first, step, num_tiles),
        )

    def __del__(self) -> None:
        if getattr(self, "_memory", None):
            self._lib.outrider_free(_P(self._memory))
            self._memory = 0


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.outrider_model_new.restype = _P
    lib.outrider_allocate.restype = _P
    lib.outrider_allocate.argtypes = [ctypes.c_long]
    lib.outrider_model_allocate_kv.argtypes = [_P, ctypes.c_long]
    return lib
