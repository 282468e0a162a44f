"""DeepSpec's formats: DSpark, DFlash and EAGLE-3 on Qwen3 layers, all keys beside one another.

Its DFlash is DSpark without heads: the block's first slot says a token there too, so it is read as
dspark of rank 0. Embedding and head are in the files, as copies of the target's, and all of its
tokens can be named.
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
from outrider.drafters import Drafter, DrafterConfig
from outrider.errors import DataError

DSPARK, EAGLE3 = "Qwen3DSparkModel", "Qwen3Eagle3Model"


def is_theirs(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in (DSPARK, EAGLE3)


def read(directory: Path, values: dict[str, Any]) -> Drafter:
    """See `load_drafter`."""
    shape = shape_of(values, directory)
    is_eagle = values["architectures"] == [EAGLE3]
    config = config_from(
        directory,
        draft_vocab_size=shape["vocab_size"],
        target_num_layers=whole("num_target_layers", values, directory),
        target_layer_ids=layer_ids("target_layer_ids", values.get("target_layer_ids"), directory),
        **shape,
        **(_eagle_fields if is_eagle else _dspark_fields)(values, directory),
    )
    if is_eagle and config.num_layers != 1:  # all their layers read the embedding, only our first
        raise DataError(f"{directory} has {config.num_layers} layers, EAGLE-3 is read with one")
    return read_drafter(directory, config)


def _eagle_fields(values: dict[str, Any], source: Path) -> dict[str, Any]:
    flags = ("fc_norm", "fc_norm_perslice")
    refuse_other(source, {name: (bool(values.get(name)), False) for name in flags})
    return {"algorithm": "eagle3", "num_draft_tokens": whole("ttt_length", values, source)}


def _dspark_fields(values: dict[str, Any], source: Path) -> dict[str, Any]:
    return {
        "algorithm": "dspark",
        "num_draft_tokens": whole("block_size", values, source),
        "mask_token_id": whole("mask_token_id", values, source),
        "markov_rank": whole("markov_rank", values, source),
        "markov_head": values.get("markov_head_type") or "vanilla",
        "confidence_head": bool(values.get("enable_confidence_head", False)),
        "confidence_sees_token": bool(values.get("confidence_head_with_markov", False)),
    }


def write(
    drafter: Drafter,
    directory: Path,
    target_config: Any,
    weights: Mapping[str, torch.Tensor],
    target_name: str | None,
) -> None:
    """See `export_drafter`."""
    config = drafter.config
    _check_kind(config)
    tensors = their_tensors(drafter)
    add_target_tensors(tensors, drafter, weights, ("embed_tokens.weight", "lm_head.weight"))
    is_eagle = config.algorithm == "eagle3"
    values = {
        "architectures": [EAGLE3 if is_eagle else DSPARK],
        **layer_values(config),
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": target_config.num_hidden_layers,
        "dtype": "bfloat16",
    }
    if is_eagle:
        values |= {
            "target_model_name_or_path": target_name,
            "ttt_length": config.num_draft_tokens,
            "draft_num_hidden_layers": config.num_layers,
            "step_loss_decay": 1.0,  # of training; their reader asks for it
        }
    else:
        values |= {
            "block_size": config.num_draft_tokens,
            "mask_token_id": config.mask_token_id,
            "num_anchors": 512,  # of training; their reader asks for it
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_sees_token and config.markov_rank > 0,
        }
    write_checkpoint(directory, values, tensors)


def _check_kind(config: DrafterConfig) -> None:
    if config.algorithm not in ("dspark", "eagle3"):
        raise DataError(
            f"DeepSpec's format is for dspark and eagle3, got a drafter of {config.algorithm}"
        )
    require_qk_norm(config, f"{config.algorithm} of DeepSpec")
    if config.draft_vocab_size != config.vocab_size:
        raise DataError(
            f"DeepSpec's drafters name all {config.vocab_size} tokens of their target, this one "
            f"{config.draft_vocab_size}"
        )
    if config.algorithm == "eagle3" and (
        config.num_layers != 1 or config.norm_before_residual or config.norm_before_fc
    ):
        raise DataError(
            "DeepSpec's eagle3 is written with one layer, without norm_before_residual and "
            f"norm_before_fc, got {config.num_layers} layers, {config.norm_before_residual} and "
            f"{config.norm_before_fc}"
        )
