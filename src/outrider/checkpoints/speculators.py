"""The format of the package speculators (0.9), which vLLM serves as it is.

    config.json         speculators_model_type; speculators_config {algorithm, proposal_methods,
                         verifier {name_or_path, architectures}}; transformer_layer_config;
                         draft_vocab_size; layer ids that count the embedding as 0, ours + 1
    model.safetensors   our names except embed_tokens, lm_head and input_norm; d2t holds offsets

Two keys are written for vLLM. It takes EAGLE-3's features for three layers unless
num_aux_hidden_states among the layer's values says another number, and it serves DFlash causally
unless sliding_window_non_causal is true, also where no layer has a window.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.files import write_checkpoint
from outrider.checkpoints.foreign import (
    add_target_tensors,
    config_from,
    layer_ids,
    layer_values,
    read_drafter,
    refuse_other,
    require_qk_norm,
    shape_of,
    their_tensors,
    whole,
)
from outrider.checks import shown
from outrider.drafters import Drafter, DrafterConfig
from outrider.errors import DataError

VERSION = "0.9.0"
ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}
EAGLES = ("eagle3", "peagle")


def is_theirs(config: dict[str, Any]) -> bool:
    return "speculators_model_type" in config


def read(directory: Path, values: dict[str, Any]) -> Drafter:
    """See `load_drafter`."""
    algorithm = values["speculators_model_type"]
    if not isinstance(algorithm, str) or algorithm not in ARCHITECTURES:
        raise DataError(
            f"{directory} is a speculator of the type {shown(algorithm)}, expected one of "
            f"{sorted(ARCHITECTURES)}"
        )
    layers = values.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise DataError(f"config.json of {directory} has no object transformer_layer_config")
    shape = shape_of(layers, directory)
    found = _eagle_fields if algorithm in EAGLES else _block_fields
    config = config_from(
        directory,
        algorithm=algorithm,
        draft_vocab_size=whole("draft_vocab_size", values, directory),
        target_hidden_size=values.get("target_hidden_size"),
        target_num_layers=values.get("num_target_layers"),
        **shape,
        **found(algorithm, values, directory),
    )
    return read_drafter(directory, config)


def _eagle_fields(algorithm: str, values: dict[str, Any], source: Path) -> dict[str, Any]:
    refuse_other(
        source,
        {name: (bool(values.get(name)), False) for name in ("fc_norm", "norm_output")},
    )
    mask = whole("mask_token_id", values, source) if algorithm == "peagle" else None
    return {
        "num_draft_tokens": _proposed(values, source),
        "mask_token_id": mask,
        "target_layer_ids": _outputs("eagle_aux_hidden_state_layer_ids", values, source),
        "norm_before_residual": bool(values.get("norm_before_residual", False)),
        "norm_before_fc": bool(values.get("norm_before_fc", False)),
    }


def _block_fields(algorithm: str, values: dict[str, Any], source: Path) -> dict[str, Any]:
    from_anchor = algorithm == "dspark"
    given = bool(values.get("sample_from_anchor", from_anchor))
    refuse_other(source, {"sample_from_anchor": (given, from_anchor)})
    found: dict[str, Any] = {
        "num_draft_tokens": whole("block_size", values, source) - (not from_anchor),
        "mask_token_id": whole("mask_token_id", values, source),
        "target_layer_ids": _outputs("aux_hidden_state_layer_ids", values, source),
    }
    if from_anchor:
        found |= {
            "markov_rank": whole("markov_rank", values, source),
            "markov_head": values.get("markov_head_type", "vanilla"),
            "confidence_head": bool(values.get("enable_confidence_head", True)),
            "confidence_sees_token": bool(values.get("confidence_head_with_markov", True)),
        }
    return found


def _outputs(name: str, values: dict[str, Any], source: Path) -> list[int]:
    """Layer ids as we count them."""
    return [i - 1 for i in layer_ids(name, values.get(name), source)]


def _proposed(values: dict[str, Any], source: Path) -> int:
    try:
        method = values["speculators_config"]["proposal_methods"][0]
    except (KeyError, IndexError, TypeError):
        raise DataError(f"config.json of {source} has no proposal_methods") from None
    if not isinstance(method, dict):
        raise DataError(
            f"proposal_methods of {source} must be a list of objects, got {shown(method)} in it"
        )
    return whole("speculative_tokens", method, source)


def write(
    drafter: Drafter,
    directory: Path,
    target_config: Any,
    weights: Mapping[str, torch.Tensor],
    target_name: str | None,
) -> None:
    """See `export_drafter`."""
    config = drafter.config
    if config.algorithm not in ARCHITECTURES:
        raise DataError(
            f"a drafter of {config.algorithm} has no place in the format of speculators, expected "
            f"one of {sorted(ARCHITECTURES)}"
        )
    layers = config.target_layer_ids
    if list(layers) != sorted(set(layers)):
        raise DataError(
            f"target_layer_ids must ascend to be written for speculators, got {list(layers)}"
        )
    tensors = their_tensors(drafter)
    if config.algorithm in EAGLES:
        add_target_tensors(tensors, drafter, weights, ("embed_tokens.weight", "lm_head.weight"))
    else:
        require_qk_norm(config, f"{config.algorithm} of speculators")
        if drafter.own_embedding is not None:
            raise DataError(
                f"{config.algorithm} of speculators always reads the target's embedding, and this "
                "drafter has its own"
            )
        if "d2t" in tensors:
            add_target_tensors(tensors, drafter, weights, ("lm_head.weight",))
        elif drafter.own_head is not None:
            raise DataError(
                f"{config.algorithm} of speculators with a full vocabulary always reads the "
                "target's head, and this drafter has its own"
            )
    verifier = {
        "name_or_path": target_name,
        "architectures": list(getattr(target_config, "architectures", None) or []),
    }
    values = _values(config, verifier)
    values["num_target_layers"] = target_config.num_hidden_layers  # of no other reader
    write_checkpoint(directory, values, tensors)


def _values(config: DrafterConfig, verifier: dict[str, Any]) -> dict[str, Any]:
    """config.json"""
    eagle = config.algorithm in EAGLES
    layers = [i + 1 for i in config.target_layer_ids]
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.algorithm]],
        "speculators_model_type": config.algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": config.algorithm,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": layer_values(config),
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    if eagle:
        values["transformer_layer_config"]["num_aux_hidden_states"] = len(layers)
        values |= {
            "eagle_aux_hidden_state_layer_ids": layers,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
        }
        if config.algorithm == "peagle":
            values["mask_token_id"] = config.mask_token_id
        return values
    return values | _block_values(config, layers)


def _block_values(config: DrafterConfig, layers: list[int]) -> dict[str, Any]:
    from_anchor = config.algorithm == "dspark"
    values = {
        "block_size": config.num_draft_tokens + (not from_anchor),
        "aux_hidden_state_layer_ids": layers,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": True,
    }
    if from_anchor:
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_sees_token and config.markov_rank > 0,
        }
    return values
