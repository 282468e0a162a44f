"""Drafters on disk: our own format and those of others, recognised by their config.json."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from outrider.checkpoints import deepspec, own, speculators, zlab
from outrider.checkpoints.files import read_config
from outrider.checks import shown
from outrider.drafters import Drafter, DrafterConfig
from outrider.errors import DataError

OURS = "outrider"
# Formats of others; each says of a config.json whether it is its own, reads and writes.
FORMATS: dict[str, ModuleType] = {"speculators": speculators, "z-lab": zlab, "deepspec": deepspec}


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter as it was stored: in eval mode, on the CPU, attached to no target."""

    drafter: Drafter
    format: str  # "outrider" or one of FORMATS
    config: dict[str, Any]  # config.json as it is

    @property
    def target(self) -> dict[str, Any]:
        """What it was made for, as far as our own format tells; else empty."""
        return self.config["target"] if self.format == OURS else {}


def load_drafter(path: str | os.PathLike[str]) -> LoadedDrafter:
    """Read a drafter in any format that is known here.

    An embedding or head that came with it goes before the target's, see `Drafter.attach`.

    Raises:
        DataError: there is none, its format or its algorithm is unknown, it has something that is
            not run here, or its tensors do not fit its configuration.
    """
    directory = Path(path)
    config = read_config(directory)
    if own.is_ours(config):
        return LoadedDrafter(own.read(directory, config), OURS, config)
    for name, module in FORMATS.items():
        if module.is_theirs(config):
            return LoadedDrafter(module.read(directory, config), name, config)
    raise DataError(
        f"{directory} is no drafter of a known format: expected one of {OURS}, "
        f"{', '.join(FORMATS)}, found architectures {shown(config.get('architectures'))}"
    )


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a drafter in a format that is known here."""
    read = dict(config)
    return own.is_ours(read) or any(module.is_theirs(read) for module in FORMATS.values())


def save_drafter(
    drafter: Drafter,
    directory: str | os.PathLike[str],
    *,
    target: dict[str, Any],
    provenance: dict[str, Any],
) -> None:
    """Write a drafter in our own format, bf16; one that is there is replaced as a whole.

    Args:
        target: what it drafts for: name, fingerprint of the tokenizer, vocab_size, hidden_size,
            num_layers, target_id of the weights. JSON.
        provenance: how it was made. JSON.

    Raises:
        DataError: `directory` holds something else, or cannot be written.
    """
    own.write(drafter, Path(directory), target, provenance)


def export_drafter(
    drafter: Drafter,
    directory: str | os.PathLike[str],
    format: str,
    *,
    target_config: Any,
    target_weights: Mapping[str, torch.Tensor],
    target_name: str | None = None,
) -> None:
    """Write a drafter in a format of others, bf16; one that is there is replaced as a whole.

    The calibration of confidences has no place in them and is left out.

    Args:
        format: one of FORMATS.
        target_config: the target's Hugging Face configuration.
        target_weights: the target's tensors by Hugging Face name; of its embedding and head, what
            the format keeps is copied.
        target_name: name or directory of the target that readers of the format will load.

    Raises:
        DataError: the format has no place for this drafter, the target is another one than it was
            made for, or `directory` holds something else or cannot be written.
    """
    if format not in FORMATS:
        raise DataError(f"the format must be one of {list(FORMATS)}, got {shown(format)}")
    check_target(drafter.config, target_config)
    FORMATS[format].write(drafter, Path(directory), target_config, target_weights, target_name)


def check_target(config: DrafterConfig, target_config: Any) -> None:
    """Refuse a target that a drafter was not made for.

    Args:
        target_config: the target's Hugging Face configuration.

    Raises:
        DataError: another vocabulary or hidden size, or fewer layers than are read.
    """
    sizes = {
        "vocab_size": (target_config.vocab_size, config.vocab_size),
        "hidden_size": (target_config.hidden_size, config.target_hidden_size),
    }
    for name, (found, expected) in sizes.items():
        if found != expected:
            raise DataError(
                f"the drafter was made for a target of {name} {expected}, this one has {found}"
            )
    deepest = max(config.target_layer_ids, default=-1)
    if deepest >= target_config.num_hidden_layers:
        raise DataError(
            f"the drafter reads layer {deepest} of its target, this one has "
            f"{target_config.num_hidden_layers} layers"
        )
