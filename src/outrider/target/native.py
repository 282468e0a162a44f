"""The lean forward on CPUs: one C++ call per step, for the common decoder families.

An eager forward through transformers spends four fifths of its time between the matrix products.
Here a whole forward is one job of the compiled kernels, every row's sums run in an order of
their own, and so logits do not depend on what shares the forward: `deterministic` comes for free.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.native import library
from outrider.target.base import ForwardBatch, ForwardOutput
from outrider.target.native_batch import native_batch
from outrider.target.native_model import TILE, Layer, NativeModel, Shape
from outrider.target.rope import rope_table, why_not_exact

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "gemma3_text"}
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


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
        ModelError: the lean forward cannot run this model, or a weight is missing or of another
            shape than the configuration says; the message says why.
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
        weights = fitting_weights(name or config.model_type, config, weights)
        self.name = name
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.deterministic = True
        self.embedding = weights[EMBEDDING]
        self.head = weights.get(HEAD, self.embedding)
        self._model = NativeModel(
            lib,
            _shape(config, dtype),
            _layers(config, weights, max_model_len),
            _norm_weight(config, weights["model.norm.weight"]),
            self.head,
            self.embedding,
            dtype,
        )
        self.kv_bytes_per_token = self._model.kv_bytes_per_token
        self.weight_bytes = self._model.weight_bytes
        self._logits = torch.empty(0, self.vocab_size)

    def allocate_kv(self, num_pages: int) -> None:
        self._model.allocate_kv(num_pages)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        num_logits = len(batch.logits_rows)
        if len(self._logits) < num_logits:
            self._logits = torch.empty(max(num_logits, 2 * len(self._logits)), self.vocab_size)
        features = None
        if batch.layer_ids:
            features = torch.empty(batch.num_rows, len(batch.layer_ids) * self.hidden_size)
        packed, _arrays = native_batch(batch, logits=self._logits, taps=features)
        self._model.forward(packed)
        return ForwardOutput(self._logits[:num_logits], features)

    def move_kv(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        self._model.move_kv(sources, destinations)


def fitting_weights(
    name: str, config: Any, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those of the weights that the configuration speaks of: the kernels go by its sizes alone.

    Raises:
        ModelError: names the first one that is missing or has another shape.
    """
    expected = dict(_expected_shapes(config))
    if getattr(config, "tie_word_embeddings", True) and HEAD in weights:
        expected[HEAD] = expected[EMBEDDING]  # transformers uses it as well
    for key, shape in expected.items():
        found = tuple(weights[key].shape) if key in weights else None
        if found != shape:
            got = "which is missing" if found is None else f"got {found}"
            raise ModelError(f"the weights of {name} must hold {key} of the shape {shape}, {got}")
    return {key: weights[key] for key in expected}


def _expected_shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, _head_dim(config)
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    gemma, family = config.model_type.startswith("gemma"), config.model_type
    yield EMBEDDING, (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not getattr(config, "tie_word_embeddings", True):
        yield HEAD, (config.vocab_size, hidden)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if gemma:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if gemma or family == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    biases = [*linears][: 3 if family == "qwen2" else 4 * getattr(config, "attention_bias", False)]
    if family == "mistral":  # takes the setting and does not go by it
        biases = []
    for prefix in (f"model.layers.{index}." for index in range(config.num_hidden_layers)):
        for name, width in norms.items():
            yield f"{prefix}{name}.weight", (width,)
        for name, shape in linears.items():
            yield f"{prefix}{name}.weight", shape
        for name in biases:
            yield f"{prefix}{name}.bias", linears[name][:1]


def _shape(config: Any, dtype: torch.dtype) -> Shape:
    head_dim = _head_dim(config)
    gemma = config.model_type.startswith("gemma")
    # Gemma multiplies embeddings by a constant that has been rounded to the weights' type.
    scale = torch.tensor(math.sqrt(config.hidden_size) if gemma else 1.0).to(dtype).item()
    query_scalar = getattr(config, "query_pre_attn_scalar", None) or head_dim
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rope_dim=rope_table(config, _kinds(config)[0], 1).shape[1],
        epsilon=config.rms_norm_eps,
        query_scale=query_scalar**-0.5,
        use_gelu=bool(ACTIVATIONS[_activation(config)]),
        attention_softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        embedding_scale=scale,
    )


def _layers(
    config: Any, weights: Mapping[str, torch.Tensor], max_positions: int
) -> Iterator[Layer]:
    ropes = {kind: rope_table(config, kind, max_positions) for kind in _kinds(config)}
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        kind = _layer_kind(config, index)
        yield Layer(
            [weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"],
            weights[f"{prefix}self_attn.o_proj.weight"],
            [weights[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")],
            weights[f"{prefix}mlp.down_proj.weight"],
            _layer_vectors(config, weights, prefix),
            ropes[kind],
            _window(config, kind),
        )


def _layer_vectors(
    config: Any, weights: Mapping[str, torch.Tensor], prefix: str
) -> dict[str, torch.Tensor]:
    """Norm weights and biases of one layer, under the names of LayerSpec."""
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
