"""A checkpoint's directory: config.json and tensors, read with checks, written whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.errors import DataError
from outrider.writing import make_lasting

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights that are spread over several files
# What a checkpoint that is written over may hold besides; it goes with the old one.
COMPANIONS = {CONFIG, WEIGHTS, INDEX, "generation_config.json"}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint.

    Raises:
        DataError: there is none, or it is no JSON object.
    """
    path = directory / CONFIG
    if not directory.is_dir():
        raise DataError(f"no drafter at {directory}: expected a directory with {CONFIG}")
    return _read_json(path)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint as they are stored, by name.

    Raises:
        DataError: the files are missing or damaged.
    """
    names = [WEIGHTS]
    if not (directory / WEIGHTS).exists() and (directory / INDEX).exists():
        places = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(n, str) for n in places.values()):
            raise DataError(f"{directory / INDEX} holds no weight_map of tensors to files")
        names = sorted(set(places.values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise DataError(f"the drafter at {directory} has no {name}: expected its weights there")
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}") from None
    return tensors


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json and the tensors; a checkpoint that is there already is replaced.

    Both are written beside `directory` first and take its place together, so that no configuration
    ever meets the weights of another.

    Raises:
        DataError: `directory` is something else than a checkpoint, or cannot be written.
    """
    directory = Path(os.path.abspath(directory))
    check_replaced(directory)
    text = json.dumps(config, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            made = work / "new"
            made.mkdir()  # with the permissions of any directory, which mkdtemp's has not
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, made / WEIGHTS, metadata={"format": "pt"})
            (made / CONFIG).write_text(text, encoding="utf-8")
            for name in (WEIGHTS, CONFIG):
                make_lasting(made / name)
            _take_place(made, directory, work / "old")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot write {directory}: {reason}") from error


def _take_place(made: Path, directory: Path, old: Path) -> None:
    """Move `made` to `directory`, and what is there to `old`; it comes back if that fails."""
    if not directory.exists():
        made.rename(directory)
        return
    directory.rename(old)
    try:
        made.rename(directory)
    except BaseException:
        old.rename(directory)
        raise


def check_replaced(directory: Path) -> None:
    """Refuse what `write_checkpoint` would not replace.

    Raises:
        DataError: something else than a checkpoint is there.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise DataError(f"cannot write {directory}: expected a directory or a new name")
    other = sorted(path.name for path in directory.iterdir() if path.name not in COMPANIONS)
    if other:
        raise DataError(
            f"cannot write {directory}: it holds other files than a drafter's ({other[0]}); "
            "give a new name, or remove it first"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"no drafter at {path.parent}: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content
