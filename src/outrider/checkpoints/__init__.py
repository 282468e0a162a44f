"""Drafters on disk: our own format and those of others, recognised by their config.json."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoints import own
from outrider.checkpoints.files import read_config
from outrider.drafters import Drafter
from outrider.errors import DataError


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter as it was stored: in eval mode, on the CPU, attached to no target."""

    drafter: Drafter
    format: str  # "outrider"
    config: dict[str, Any]  # config.json as it is

    @property
    def target(self) -> dict[str, Any]:
        """What it was made for, as far as the format tells."""
        return self.config.get("target", {}) if self.format == "outrider" else {}


def load_drafter(path: str | os.PathLike[str]) -> LoadedDrafter:
    """Read a drafter in any format that is known here.

    Raises:
        DataError: there is none, its format or its algorithm is unknown, or its tensors do not
            fit its configuration.
    """
    directory = Path(path)
    config = read_config(directory)
    if own.is_ours(config):
        return LoadedDrafter(own.read(directory, config), "outrider", config)
    raise DataError(
        f"{directory} is no drafter of a known format: config.json has none of "
        f'"format": "{own.NAME}"'
    )


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
            num_layers. JSON.
        provenance: how it was made. JSON.

    Raises:
        DataError: `directory` holds something else, or cannot be written.
    """
    own.write(drafter, Path(directory), target, provenance)
