"""The state of a run on disk: one file, written whole, so that a kill leaves the one before it."""

import pickle
from pathlib import Path
from typing import Any

import torch

from outrider.errors import DataError
from outrider.writing import whole_file

STATE = "state.pt"


def save_state(directory: Path, state: dict[str, Any]) -> None:
    """Replace the state in a run's directory.

    Raises:
        DataError: it cannot be written; the one before it is left.
    """
    path = directory / STATE
    try:
        with whole_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, of a stream that fails
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise DataError(f"cannot write {path}: {reason}") from error


def load_state(directory: Path) -> dict[str, Any] | None:
    """The state in a run's directory, on the CPU; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    path = directory / STATE
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is no state of a run, or damaged: {reason}") from None
