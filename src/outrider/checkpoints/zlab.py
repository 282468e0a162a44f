"""DFlash as its authors release it (z-lab): Qwen3 layers, and a dflash_config beside their values.

Embedding and head are the target's, and not in the files; all of its tokens can be named.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.files import write_checkpoint
from outrider.checkpoints.foreign import (
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
from outrider.drafters import Drafter
from outrider.errors import DataError

ARCHITECTURE = "DFlashDraftModel"
KNOWN = {"mask_token_id", "target_layer_ids", "block_size"}
# Variants that are what we run where they are switched off.
OFF = {
    "use_swa": False,
    "swa_window_size": None,
    "causal": False,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "sample_from_anchor": False,
}


def is_theirs(config: dict[str, Any]) -> bool:
    return isinstance(config.get("dflash_config"), dict)


def read(directory: Path, values: dict[str, Any]) -> Drafter:
    """See `load_drafter`."""
    own = values["dflash_config"]
    if values.get("architectures") != [ARCHITECTURE]:
        raise DataError(
            f"{directory} is of the architecture {shown(values.get('architectures'))}, expected "
            f"{[ARCHITECTURE]}"
        )
    unknown = sorted(own.keys() - KNOWN - OFF.keys())
    if unknown:
        raise DataError(
            f"dflash_config of {directory} has {unknown}, which is not run here: known are "
            f"{sorted(KNOWN | OFF.keys())}"
        )
    off = {name: (own.get(name) or value, value) for name, value in OFF.items()}
    off["is_neox_style"] = (values.get("is_neox_style", True), True)
    refuse_other(directory, off)
    shape = shape_of({k: v for k, v in values.items() if k != "dflash_config"}, directory)
    sizes = {"block_size": values.get("block_size")} | own
    config = config_from(
        directory,
        algorithm="dflash",
        draft_vocab_size=shape["vocab_size"],
        num_draft_tokens=whole("block_size", sizes, directory) - 1,
        mask_token_id=whole("mask_token_id", own, directory),
        target_layer_ids=layer_ids("target_layer_ids", own.get("target_layer_ids"), directory),
        target_num_layers=values.get("num_target_layers"),
        **shape,
    )
    return read_drafter(directory, config)


def write(
    drafter: Drafter,
    directory: Path,
    target_config: Any,
    weights: Mapping[str, torch.Tensor],
    target_name: str | None,
) -> None:
    """See `export_drafter`."""
    del weights, target_name  # this format holds no tensor of the target
    config = drafter.config
    if config.algorithm != "dflash":
        raise DataError(f"z-lab's format is for dflash, got a drafter of {config.algorithm}")
    require_qk_norm(config, "z-lab's DFlash")
    if config.draft_vocab_size != config.vocab_size:
        raise DataError(
            f"z-lab's DFlash names all {config.vocab_size} tokens of its target, this drafter "
            f"{config.draft_vocab_size}"
        )
    if drafter.own_head is not None or drafter.own_embedding is not None:
        raise DataError("z-lab's DFlash has the target's embedding and head, this drafter its own")
    values = {
        "architectures": [ARCHITECTURE],
        **layer_values(config),
        "block_size": config.num_draft_tokens + 1,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": target_config.num_hidden_layers,
        "dtype": "bfloat16",
    }
    write_checkpoint(directory, values, their_tensors(drafter))
