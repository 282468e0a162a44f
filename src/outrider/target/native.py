"""The lean forward on CPUs: one C++ call per step, for the common decoder families.

An eager forward through transformers spends four fifths of its time between the matrix products.
Here a whole forward is one job of the compiled kernels, every row's sums run in an order of
their own, and so logits do not depend on what shares the forward: `deterministic` comes for free.
"""

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.native import library, pointer
from outrider.target.base import ForwardBatch, ForwardOutput
from outrider.target.native_batch import native_batch
from outrider.target.rope import rope_table, why_not_exact

FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}
TILE = 16  # outputs per packed tile, as in native/multiply.h
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}

_P = ctypes.c_void_p
_PLACES = ("qkv", "attention_out", "gate_up", "down", "qkv_bias", "out_bias")
_NORMS = (
    "input_norm",
    "post_attention_norm",
    "mlp_norm",
    "post_mlp_norm",
    "query_norm",
    "key_norm",
)


class _LayerSpec(ctypes.Structure):  # LayerSpec of native/forward.cpp
    _fields_ = (
        *((name, _P) for name in (*_PLACES, *_NORMS, "rope")),
        ("window", ctypes.c_int),
    )


class _ModelSpec(ctypes.Structure):  # ModelSpec of native/forward.cpp
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                *("layers", "hidden", "intermediate", "vocab", "padded_vocab", "heads"),
                *("kv_heads", "head_dim", "rope_dim", "is_bf16", "use_gelu"),
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


def why_not_native(config: Any, device: str = "cpu") -> str | None:
    """The reason this model needs the transformers path, or None if the lean forward runs it."""
    if device != "cpu":
        return f"the lean forward runs on the CPU, not on {device}"
    if library() is None:
        return "the compiled kernels are not available"
    if config.model_type not in FAMILIES:
        return f"no lean forward for the family {config.model_type!r}"
    head_dim = _head_dim(config)
    for name, width in (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("head_dim", head_dim),
    ):
        if width % TILE:
            return f"{name} is {width}, not a multiple of {TILE}"
    if _activation(config) not in ACTIVATIONS:
        return f"no kernel for the activation {_activation(config)!r}"
    if getattr(config, "mlp_bias", False):
        return "biases in the MLP"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    return why_not_exact(config)


class NativeTarget:
    """A target whose forward is compiled: see `outrider.target.base.Target`.

    Args:
        config: the Hugging Face config, or anything with its fields.
        weights: checkpoint tensors under their Hugging Face names, bf16 or fp32.
        dtype: of weights and KV; sums, norms and the residual stream are always float32.
        max_model_len: longest text in tokens.

    Raises:
        ModelError: the lean forward cannot run this model; the message says why.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        max_model_len: int,
        name: str = "",
    ) -> None:
        reason = why_not_native(config)
        lib = library()
        if reason is not None or lib is None:
            raise ModelError(f"{name or config.model_type}: {reason}")
        self.name = name
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.deterministic = True
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self._lib = _declare(lib)
        self._kept: list[Any] = []  # what the C++ side points into
        self._weights = _PackedWeights(self._lib, config, weights, dtype)
        spec = self._spec(config, weights)
        self.kv_bytes_per_token = (
            2 * spec.layers * spec.kv_heads * spec.head_dim * torch.finfo(dtype).bits // 8
        )
        self.weight_bytes = self._weights.num_bytes  # read once by every forward
        self._model = _P(self._lib.outrider_model_new(ctypes.byref(spec)))
        self._logits = torch.empty(0, self.vocab_size)

    def allocate_kv(self, num_pages: int) -> None:
        self._lib.outrider_model_allocate_kv(self._model, num_pages)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        num_logits = len(batch.logits_rows)
        if len(self._logits) < num_logits:
            self._logits = torch.empty(max(num_logits, 2 * len(self._logits)), self.vocab_size)
        features = None
        if batch.layer_ids:
            features = torch.empty(batch.num_rows, len(batch.layer_ids) * self.hidden_size)
        packed, _arrays = native_batch(batch, self._logits, features)
        self._lib.outrider_model_forward(self._model, ctypes.byref(packed))
        return ForwardOutput(self._logits[:num_logits], features)

    def move_kv(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        sources = np.ascontiguousarray(sources, dtype=np.int32)
        destinations = np.ascontiguousarray(destinations, dtype=np.int32)
        self._lib.outrider_model_move_kv(
            self._model, pointer(sources), pointer(destinations), len(sources)
        )

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._lib.outrider_model_free(self._model)
            self._model = None

    def _spec(self, config: Any, weights: Mapping[str, torch.Tensor]) -> _ModelSpec:
        """The model as the C++ side sees it; arrays it points to are kept alive here."""
        gemma = config.model_type.startswith("gemma")
        head_dim = _head_dim(config)
        layers = (_LayerSpec * config.num_hidden_layers)()
        ropes = {kind: rope_table(config, kind, self.max_model_len) for kind in _kinds(config)}
        for index, layer in enumerate(layers):
            kind = _layer_kind(config, index)
            for place, address in self._weights.layers[index].items():
                setattr(layer, place, address)
            for place, tensor in _layer_vectors(config, weights, index).items():
                setattr(layer, place, self._keep(tensor))
            layer.rope = self._keep(ropes[kind])
            layer.window = _window(config, kind)
        self._kept.append(layers)
        # Gemma multiplies embeddings by a constant that has been rounded to the weights' type.
        scale = torch.tensor(math.sqrt(config.hidden_size) if gemma else 1.0).to(self.dtype).item()
        query_scalar = getattr(config, "query_pre_attn_scalar", None) or head_dim
        return _ModelSpec(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            padded_vocab=-(-config.vocab_size // TILE) * TILE,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rope_dim=next(iter(ropes.values())).shape[1],
            is_bf16=int(self.dtype == torch.bfloat16),
            use_gelu=ACTIVATIONS[_activation(config)],
            epsilon=config.rms_norm_eps,
            query_scale=query_scalar**-0.5,
            attention_softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
            embedding_scale=scale,
            embedding=self._keep(weights["model.embed_tokens.weight"], self.dtype),
            lm_head=self._weights.lm_head,
            final_norm=self._keep(_norm_weight(config, weights["model.norm.weight"])),
            layer=layers,
        )

    def _keep(self, tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
        """Address of the tensor as contiguous `dtype`, kept for the life of the target."""
        tensor = tensor.to(dtype).contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


class _PackedWeights:
    """All matrices of a model in tiles, in one block of huge pages in the order of their use."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        config: Any,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._lib, self._dtype = lib, dtype
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim, hidden, wide = _head_dim(config), config.hidden_size, config.intermediate_size
        vocab = -(-config.vocab_size // TILE) * TILE
        qkv, query = (heads + 2 * kv_heads) * head_dim, heads * head_dim
        sizes = {"qkv": qkv * hidden, "attention_out": query * hidden}
        sizes |= {"gate_up": 2 * wide * hidden, "down": wide * hidden}
        element = torch.finfo(dtype).bits // 8
        self.num_bytes = element * (config.num_hidden_layers * sum(sizes.values()) + vocab * hidden)
        self._block = lib.outrider_allocate(self.num_bytes)
        if not self._block:
            raise MemoryError(f"no memory for {self.num_bytes} bytes of weights")
        at = self._block
        self.layers: list[dict[str, int]] = []
        for index in range(config.num_hidden_layers):
            places = {}
            for place, size in sizes.items():
                places[place] = at
                self._pack_place(place, at, weights, f"model.layers.{index}.")
                at += size * element
            self.layers.append(places)
        self.lm_head = at
        tied = "lm_head.weight" not in weights
        head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        self._pack(at, head, vocab // TILE)

    def _pack_place(
        self, place: str, at: int, weights: Mapping[str, torch.Tensor], prefix: str
    ) -> None:
        """Pack the matrices of one place; tiles of gate and up alternate."""
        names = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention_out": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }[place]
        matrices = [weights[f"{prefix}{name}.weight"] for name in names]
        tiles = [weight.shape[0] // TILE for weight in matrices]
        for i, weight in enumerate(matrices):
            if place == "gate_up":
                self._pack(at, weight, sum(tiles), first=i, step=2)
            else:
                self._pack(at, weight, sum(tiles), first=sum(tiles[:i]))

    def _pack(
        self, at: int, weight: torch.Tensor, num_tiles: int, first: int = 0, step: int = 1
    ) -> None:
        """Put weights into every `step`-th tile, from the `first`, of the matrix at an address."""
        weight = weight.contiguous()
        if weight.dtype not in (torch.bfloat16, torch.float32):
            weight = weight.float()
        outputs, inputs = weight.shape
        self._lib.outrider_pack(
            *(_P(at), int(self._dtype == torch.bfloat16)),
            *(pointer(weight), int(weight.dtype == torch.bfloat16), outputs, inputs),
            *(first, step, num_tiles),
        )

    def __del__(self) -> None:
        if getattr(self, "_block", None):
            self._lib.outrider_free(_P(self._block))
            self._block = None


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.outrider_model_new.restype = _P
    lib.outrider_allocate.restype = _P
    lib.outrider_allocate.argtypes = [ctypes.c_long]
    lib.outrider_model_allocate_kv.argtypes = [_P, ctypes.c_long]
    return lib


def _layer_vectors(
    config: Any, weights: Mapping[str, torch.Tensor], index: int
) -> dict[str, torch.Tensor]:
    """Norm weights and biases of one layer, under the names of LayerSpec."""
    prefix = f"model.layers.{index}."
    names = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.model_type.startswith("gemma"):
        names["post_attention_norm"] = "post_attention_layernorm"
        names["mlp_norm"] = "pre_feedforward_layernorm"
        names["post_mlp_norm"] = "post_feedforward_layernorm"
    names |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    vectors = {
        place: _norm_weight(config, weights[f"{prefix}{name}.weight"])
        for place, name in names.items()
        if f"{prefix}{name}.weight" in weights
    }
    if f"{prefix}self_attn.q_proj.bias" in weights:
        vectors["qkv_bias"] = torch.cat(
            [weights[f"{prefix}self_attn.{x}_proj.bias"].float() for x in "qkv"]
        )
    if f"{prefix}self_attn.o_proj.bias" in weights:
        vectors["out_bias"] = weights[f"{prefix}self_attn.o_proj.bias"]
    return vectors


def _norm_weight(config: Any, weight: torch.Tensor) -> torch.Tensor:
    """What the normalised row is multiplied with; Gemma stores it less one."""
    return weight.float() + 1.0 if config.model_type.startswith("gemma") else weight.float()


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _layer_kind(config: Any, index: int) -> str:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return kinds[index]
    sliding = config.model_type == "mistral" and getattr(config, "sliding_window", None)
    return "sliding_attention" if sliding else "full_attention"


def _kinds(config: Any) -> list[str]:
    return sorted({_layer_kind(config, i) for i in range(config.num_hidden_layers)})


def _window(config: Any, kind: str) -> int:
    return config.sliding_window if kind == "sliding_attention" else 0
