"""What the formats of others share: Hugging Face's configuration of layers, names of tensors.

Defaults that a config.json leaves out are those of transformers. What our layers cannot do, such as
sliding windows, biases or scaled rotation, is refused by its name.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.build import EMBEDDING, HEAD, build_from, tensors_of
from outrider.checkpoints.files import read_tensors
from outrider.checks import integer, number, shown
from outrider.drafters import Drafter, DrafterConfig
from outrider.errors import ConfigError, DataError

# Ours to theirs, where they differ.
RENAMED = {
    EMBEDDING: "embed_tokens.weight",
    HEAD: "lm_head.weight",
    "fc_norm.weight": "input_norm.weight",
}
# The target's, which some versions keep beside the drafter's own.
NOT_THEIRS = {"verifier_lm_head.weight", "verifier_norm.weight"}
MODEL_TYPES = ("llama", "qwen3")  # of layers: without and with norms on heads


def shape_of(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Fields of DrafterConfig from Hugging Face's configuration of the drafter's layers.

    Raises:
        DataError: another kind of layer than Llama's or Qwen3's, or a variant that is not run here.
    """
    from transformers import AutoConfig

    model_type = values.get("model_type", "qwen3")
    if model_type not in MODEL_TYPES:
        raise DataError(
            f"{source} has layers of the type {shown(model_type)}, expected one of "
            f"{list(MODEL_TYPES)}"
        )
    given = {name: value for name, value in values.items() if name != "model_type"}
    try:
        layers = AutoConfig.for_model(model_type, **given)
    except Exception as error:  # checks of transformers raise classes of their own
        raise DataError(f"config.json of {source} cannot be used: {error}") from None
    _refuse_variants(layers, source)
    return {
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_layers": layers.num_hidden_layers,
        "num_heads": layers.num_attention_heads,
        "num_kv_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "vocab_size": layers.vocab_size,
        "rope_theta": _rope_theta(layers.rope_parameters, source),
        "norm_epsilon": float(layers.rms_norm_eps),
        "max_position": layers.max_position_embeddings,
        "qk_norm": model_type == "qwen3",
    }


def _rope_theta(rope: Mapping[str, Any], source: object) -> float:
    most = sys.float_info.max
    return number(f"rope_theta of {source}", rope.get("rope_theta"), 0.0, most, DataError, True)


def _refuse_variants(layers: Any, source: object) -> None:
    rope = layers.rope_parameters or {}
    kinds = set(getattr(layers, "layer_types", None) or ["full_attention"])
    refuse_other(
        source,
        {
            "attention_bias": (getattr(layers, "attention_bias", False), False),
            "mlp_bias": (getattr(layers, "mlp_bias", False), False),
            "hidden_act": (layers.hidden_act, "silu"),
            "rope_type": (rope.get("rope_type", "default"), "default"),
            "partial_rotary_factor": (rope.get("partial_rotary_factor") or 1.0, 1.0),
            "layer_types": (sorted(kinds), ["full_attention"]),
            "quantization_config": (getattr(layers, "quantization_config", None), None),
        },
    )


def refuse_other(source: object, found: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse values that are not those that can be run here; by name, (found, expected).

    Raises:
        DataError: one differs.
    """
    for name, (value, expected) in found.items():
        if value != expected:
            raise DataError(
                f"{source} has {name} {shown(value)}, which is not run here: expected "
                f"{shown(expected)}"
            )


def layer_ids(name: str, values: Any, source: object) -> list[int]:
    """A list of layer ids.

    Raises:
        DataError: something else.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise DataError(f"{name} of {source} must be a list of layers, got {shown(values)}")
    return [integer(f"a layer in {name} of {source}", i, -1, error=DataError) for i in values]


def whole(name: str, values: Mapping[str, Any], source: object) -> int:
    """A whole number that has to be there.

    Raises:
        DataError: it is missing, or something else.
    """
    if values.get(name) is None:
        raise DataError(f"config.json of {source} has no {name}")
    return integer(f"{name} of {source}", values[name], 0, error=DataError)


def config_from(source: object, **values: Any) -> DrafterConfig:
    """A DrafterConfig; a number of the target's layers that the format does not tell is 0.

    Raises:
        DataError: fields that do not fit together.
    """
    values["target_num_layers"] = values.get("target_num_layers") or 0
    values["target_hidden_size"] = values.get("target_hidden_size") or values["hidden_size"]
    values["target_layer_ids"] = tuple(values["target_layer_ids"])
    try:
        return DrafterConfig(**values)
    except ConfigError as error:
        raise DataError(f"{source}: {error}") from None


def read_drafter(directory: Path, config: DrafterConfig) -> Drafter:
    """A drafter of this configuration with the tensors of the directory.

    Raises:
        DataError: they are missing, damaged, or do not fit.
    """
    tensors = _our_tensors(read_tensors(directory), config, directory)
    return build_from(config, tensors, directory, RENAMED)


def _our_tensors(
    tensors: Mapping[str, torch.Tensor], config: DrafterConfig, source: object
) -> dict[str, torch.Tensor]:
    """Tensors by our names: their d2t holds offsets, a d2t that is left out names all tokens."""
    ours = {theirs: name for name, theirs in RENAMED.items()}
    found = {ours.get(n, n): value for n, value in tensors.items() if n not in NOT_THEIRS}
    named = found.pop("t2d", None)
    ids = torch.arange(config.draft_vocab_size)
    if "d2t" in found:
        offsets = found["d2t"]
        if offsets.shape != ids.shape:
            raise DataError(
                f"d2t of {source} is {list(offsets.shape)}, expected [{config.draft_vocab_size}]"
            )
        ids = ids + offsets.long()
    elif config.draft_vocab_size != config.vocab_size:
        raise DataError(
            f"{source} has no d2t, which tells the {config.draft_vocab_size} tokens of its "
            f"vocabulary among the target's {config.vocab_size}"
        )
    if named is not None and not named.nonzero().squeeze(1).equal(ids.sort().values):
        raise DataError(f"t2d and d2t of {source} name different tokens")
    found["temperatures"] = torch.ones(config.num_draft_tokens)
    found["shifts"] = torch.zeros(config.num_draft_tokens)
    return {**found, "d2t": ids}


def their_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Tensors in bf16 by their names, without what the formats have no place for.

    d2t and t2d are there where the vocabulary is a part of the target's.

    Raises:
        DataError: the vocabulary is in another order than the target's.
    """
    config = drafter.config
    if bool((drafter.d2t.diff() <= 0).any()):
        raise DataError("the d2t of this drafter must ascend to be written in another format")
    found = tensors_of(drafter)
    del found["d2t"], found["temperatures"], found["shifts"]
    found = {RENAMED.get(name, name): value for name, value in found.items()}
    if config.draft_vocab_size < config.vocab_size:
        found["d2t"] = drafter.d2t - torch.arange(config.draft_vocab_size)
        named = torch.zeros(config.vocab_size, dtype=torch.bool)
        named[drafter.d2t] = True
        found["t2d"] = named
    return found


def add_target_tensors(
    found: dict[str, torch.Tensor],
    drafter: Drafter,
    weights: Mapping[str, torch.Tensor],
    names: Sequence[str],
) -> None:
    """Add embed_tokens.weight or lm_head.weight of the target, unless the drafter has its own."""
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    of_target = {
        RENAMED[EMBEDDING]: lambda: embedding,
        RENAMED[HEAD]: lambda: head[drafter.d2t.to(head.device)],
    }
    for name in names:
        if name not in found:
            found[name] = of_target[name]().detach().cpu().bfloat16()


def layer_values(config: DrafterConfig) -> dict[str, Any]:
    """Hugging Face's configuration of the drafter's layers; the reverse of `shape_of`."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,  # readers older than transformers 5 know only this one
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def require_qk_norm(config: DrafterConfig, kind: str) -> None:
    """Raises:
    DataError: the format norms queries and keys, and this drafter does not.
    """
    if not config.qk_norm:
        raise DataError(
            f"{kind} has a norm on every head of queries and keys, which this drafter lacks: "
            "expected one that was trained with qk_norm"
        )
