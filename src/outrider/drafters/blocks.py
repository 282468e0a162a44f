"""The parts all drafters are made of: norms, rotary positions, a decoder layer.

Parameters carry the names of Hugging Face's Llama and Qwen3, so that checkpoints need no
translation inside a layer.

Shape legend: R rows, H hidden, Q = heads * dim, K = kv heads * dim, D head dim, F feature width.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from outrider.drafters.config import DrafterConfig

# (layer, query [R, heads, D], key [R, kv heads, D], value [R, kv heads, D]) -> [R, Q]; rotation
# and norms are done. Who calls the layer owns what a row may see.
Attend = Callable[["DecoderLayer", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.epsilon).to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of positions, Llama's half rotation."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)  # on any device the same
        self.register_buffer(
            "frequencies", torch.from_numpy(frequencies.astype(np.float32)), persistent=False
        )

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[R] -> [2, R, 1, D / 2]"""
        angles = positions[:, None].float() * self.frequencies  # pyright: ignore
        return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x [R, heads, D] at the positions of `rotation` [2, R, 1, D / 2]."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Projections of one attention block; the attention itself is handed in."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.query_size, bias=False)
        self.k_proj = nn.Linear(input_size, config.kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_epsilon)
            self.k_norm = RMSNorm(config.head_dim, config.norm_epsilon)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """[R, heads, D]"""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)

    def keys_values(
        self, x: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, kv heads, D] each."""
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), rotation)
        return key, self._heads(self.v_proj(x))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


OF_LAYERS = frozenset({"qk_norm", "copy_layers"})  # see Drafter.shape_keys


class DecoderLayer(nn.Module):
    """Llama's block; with a second input, EAGLE-3's first layer (its attention reads 2 H)."""

    def __init__(self, config: DrafterConfig, index: int, has_side_input: bool = False) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        if has_side_input:
            self.hidden_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config, (1 + has_side_input) * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        attend: Attend,
        side: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [R, H] -> [R, H]; `side` [R, H]: token embeddings beside features x."""
        normed = self.input_layernorm(x if side is None else side)
        if side is not None:
            hidden = self.hidden_norm(x)
            normed = torch.cat([normed, hidden], dim=-1)  # [R, 2 H]
            x = hidden if self.norm_before_residual else x
        query = self.self_attn.queries(normed, rotation)
        key, value = self.self_attn.keys_values(normed, rotation)
        x = x + self.self_attn.o_proj(attend(self, query, key, value))
        return x + self.mlp(self.post_attention_layernorm(x))
