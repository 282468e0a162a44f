"""outrider's own format: the configuration as it is, what it was made for, and how.

config.json         {"format": "outrider drafter", "version": 1, "drafter": DrafterConfig,
                     "target": {name, fingerprint, vocab_size, hidden_size, num_layers,
                                target_id, ...},
                     "provenance": {...}}
model.safetensors   the module's state, bf16; d2t int32, temperatures and shifts float32
"""

from pathlib import Path
from typing import Any

from outrider.checkpoints.build import build_from, tensors_of
from outrider.checkpoints.files import read_tensors, write_checkpoint
from outrider.checks import shown
from outrider.drafters import Drafter, DrafterConfig
from outrider.errors import ConfigError, DataError

NAME = "outrider drafter"
VERSION = 1


def is_ours(config: dict[str, Any]) -> bool:
    return config.get("format") == NAME


def read(directory: Path, config: dict[str, Any]) -> Drafter:
    """See `load_drafter`."""
    if config.get("version") != VERSION:
        raise DataError(
            f"{directory} is of version {shown(config.get('version'))} of the format of drafters, "
            f"expected {VERSION}"
        )
    for name in ("drafter", "target", "provenance"):
        if not isinstance(config.get(name), dict):
            raise DataError(f"config.json of {directory} has no object named {name}")
    try:
        found = DrafterConfig.from_json(config["drafter"])
    except (ConfigError, TypeError, AttributeError) as error:
        raise DataError(f"config.json of {directory}: {error}") from None
    return build_from(found, read_tensors(directory), directory)


def write(
    drafter: Drafter, directory: Path, target: dict[str, Any], provenance: dict[str, Any]
) -> None:
    """See `save_drafter`."""
    config = {
        "format": NAME,
        "version": VERSION,
        "drafter": drafter.config.as_json(),
        "target": target,
        "provenance": provenance,
    }
    write_checkpoint(directory, config, tensors_of(drafter))
