"""Rotary position tables, computed once: every position's angle is a constant of the model."""

from typing import Any

import torch

EXACT_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def rope_parameters(config: Any, layer_kind: str) -> dict[str, Any]:
    """The rope parameters of one kind of layer ("full_attention", "sliding_attention")."""
    parameters = config.rope_parameters
    return parameters.get(layer_kind, parameters)


def rope_types(config: Any) -> set[str]:
    """Kinds of position scaling a configuration names, over all its layer types."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [t for t in (rope, *rope.values()) if isinstance(t, dict)]
    return {str(t.get("rope_type", t.get("type", "default"))) for t in tables}


def why_not_exact(config: Any) -> str | None:
    """The reason angles depend on more than the position, or None.

    Dynamic and longrope scaling look at the longest text of the batch, so that a request's
    angles would change with its neighbours.
    """
    for kind in sorted(rope_types(config)):
        if kind not in EXACT_TYPES:
            return f"position scaling {kind!r} is not a function of the position alone"
    return None


def rope_table(config: Any, layer_kind: str, max_positions: int) -> torch.Tensor:
    """Cosines and sines of every position, float32 [max_positions, rope_dim] = [cos | sin]."""
    parameters = rope_parameters(config, layer_kind)
    frequencies, scale = _frequencies(config, layer_kind, parameters)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :].float()  # [positions, rope_dim / 2]
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1).contiguous()


def _frequencies(
    config: Any, layer_kind: str, parameters: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rope_dim / 2] and the factor on cosines and sines."""
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        rope_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, rope_dim, 2, dtype=torch.int64).float() / rope_dim
        return 1.0 / (parameters["rope_theta"] ** steps), 1.0
    # The scaled kinds are transformers' own; importing it costs 0.7 s, so only when needed.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = layer_kind in config.rope_parameters
    arguments = {"layer_type": layer_kind} if nested else {}
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **arguments)
