"""Texts to train on, and what the target computed on them, in shards on disk.

A data directory holds ``data.json`` and ``tokens-NNNNN.safetensors`` (ids of all texts in a row,
where each starts and how long its prompt is). A features directory holds ``features.json`` and one
``features-NNNNN.safetensors`` per shard of the data: layer outputs, the last state before the head,
and the log of the sum of exponentials of the target's logits, which give exact probabilities.

Shape legend: N tokens of a shard, D texts of it, F feature width, H hidden.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.checks import shown
from outrider.errors import DataError
from outrider.writing import whole_file, whole_path

if TYPE_CHECKING:
    from outrider.checkpoints import LoadedDrafter
    from outrider.target.load import LoadedModel
    from outrider.tokenizer import Tokenizer

KIND = "outrider training data"
TARGET_ID = "target_id"  # which weights the target had, see `LoadedModel.identity`


@dataclass(slots=True)
class Sample:
    """One text: a prompt and the target's answer to it."""

    category: str
    temperature: float
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]


# Of a shard's file, see Shard.
COLUMNS = {
    "token_ids": np.int32,
    "starts": np.int64,
    "prompt_lengths": np.int32,
    "categories": np.int32,
    "temperatures": np.float32,
}


@dataclass
class Shard:
    """Texts of one file."""

    path: Path

    @cached_property
    def _tensors(self) -> dict[str, np.ndarray]:
        try:
            with safe_open(self.path, "numpy") as file:
                found = {name: file.get_tensor(name) for name in COLUMNS}
        except (OSError, TypeError, SafetensorError) as error:  # TypeError: bf16, unknown to numpy
            raise DataError(
                f"{self.path} cannot be read: {error}; deleted, it is written again by the command "
                "that made its directory"
            ) from None
        wrong = _fault(found)
        if wrong:
            raise DataError(f"{self.path} holds no texts as they are written here: {wrong}")
        return found

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [N]"""
        return self._tensors["token_ids"]

    @property
    def starts(self) -> np.ndarray:
        """int64 [D + 1]"""
        return self._tensors["starts"]

    @property
    def prompt_lengths(self) -> np.ndarray:
        """int32 [D]"""
        return self._tensors["prompt_lengths"]

    @property
    def categories(self) -> np.ndarray:
        """Index into the data's list of categories, int32 [D]."""
        return self._tensors["categories"]

    @property
    def temperatures(self) -> np.ndarray:
        """float32 [D]"""
        return self._tensors["temperatures"]

    def __len__(self) -> int:
        return len(self.starts) - 1


def _fault(found: dict[str, np.ndarray]) -> str:
    """What is wrong with the tensors of a shard; empty where nothing is."""
    for name, dtype in COLUMNS.items():
        if found[name].ndim != 1 or found[name].dtype != dtype:
            shape = list(found[name].shape)
            return f"{name} is {found[name].dtype} {shape}, expected {np.dtype(dtype)} in a row"
    starts, prompts = found["starts"], found["prompt_lengths"]
    lengths = np.diff(starts)
    if not len(starts) or starts[0] or starts[-1] != len(found["token_ids"]) or (lengths < 1).any():
        return f"starts must ascend from 0 to its {len(found['token_ids'])} tokens"
    for name in ("prompt_lengths", "categories", "temperatures"):
        if len(found[name]) != len(lengths):
            return f"{name} are {len(found[name])}, expected one for each of {len(lengths)} texts"
    if (prompts < 1).any() or (prompts > lengths).any():
        return "prompt_lengths must be from 1 to the length of their texts"
    if (found["token_ids"] < 0).any() or (found["categories"] < 0).any():
        return "token_ids and categories must not be below 0"
    return ""


class Data:
    """A data directory, read.

    Raises:
        DataError: it is missing, or no data of ours.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.header = read_header(directory / "data.json", KIND)
        names = self.header.get("categories")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(
                f"{directory / 'data.json'}: categories must be a list of names, got {shown(names)}"
            )
        self.shards = [Shard(path) for path in sorted(directory.glob("tokens-*.safetensors"))]
        if not self.shards:
            raise DataError(f"{directory} holds no texts: no tokens-*.safetensors in it")

    @property
    def categories(self) -> list[str]:
        return self.header["categories"]

    @property
    def num_texts(self) -> int:
        return sum(len(shard) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(len(shard.token_ids) for shard in self.shards)


def read_header(path: Path, kind: str) -> dict[str, Any]:
    """The JSON header of a directory.

    Raises:
        DataError: it is missing, or says another kind.
    """
    try:
        header = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path.parent} is no {kind}: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}") from None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise DataError(f"{path} is no {kind}")
    return header


def write_header(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Write a header as `read_header` reads it; its directory is made.

    Raises:
        DataError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(json.dumps({"kind": kind, **content}, indent=1).encode() + b"\n")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def check_target(data: Data, loaded: "LoadedModel") -> None:
    """Refuse data whose ids mean something else to a model.

    Raises:
        DataError: it says what was found and expected.
    """
    given, tokenizer = data.header.get("tokenizer"), loaded.tokenizer
    if given and tokenizer is not None and given != tokenizer.fingerprint:
        raise DataError(
            f"{data.directory} holds token ids of the tokenizer {given}, {loaded.name} has "
            f"{tokenizer.fingerprint}"
        )
    largest = max(int(shard.token_ids.max(initial=0)) for shard in data.shards)
    if largest >= loaded.config["vocab_size"]:
        raise DataError(
            f"{data.directory} holds the token id {largest}, {loaded.name} has "
            f"{loaded.config['vocab_size']} of them"
        )
    last = max(int(shard.categories.max(initial=0)) for shard in data.shards)
    if last >= max(1, len(data.categories)):
        raise DataError(
            f"{data.directory} holds texts of the category number {last}, its data.json names "
            f"{len(data.categories)}"
        )


def check_made_for(
    drafter: "LoadedDrafter", path: object, name: str, tokenizer: "Tokenizer | None"
) -> None:
    """Refuse a drafter whose token ids mean something else to the model `name`.

    Raises:
        DataError: it says what was found and expected.
    """
    theirs, given = drafter.target, drafter.target.get("fingerprint")
    if given and tokenizer is not None and given != tokenizer.fingerprint:
        raise DataError(
            f"{path} was made for {theirs.get('name')} with the tokenizer {given}, {name} has "
            f"{tokenizer.fingerprint}"
        )


def write_shard(directory: Path, index: int, samples: Sequence[Sample], names: list[str]) -> None:
    """Samples as one file; `names` are the categories of the data, and may grow."""
    texts = [[*sample.prompt_token_ids, *sample.token_ids] for sample in samples]
    for sample in samples:
        if sample.category not in names:
            names.append(sample.category)
    lengths = [len(text) for text in texts]
    tensors = {
        "token_ids": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "starts": torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(s.prompt_token_ids) for s in samples]).int(),
        "categories": torch.tensor([names.index(s.category) for s in samples]).int(),
        "temperatures": torch.tensor([s.temperature for s in samples], dtype=torch.float32),
    }
    write_tensors(directory / f"tokens-{index:05d}.safetensors", tensors)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file that is whole or not there.

    Raises:
        DataError: it cannot be written.
    """
    try:
        with whole_path(path) as partial:
            save_file(tensors, partial)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot write {path}: {reason}") from error


def unlike(header: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What differs between a header and what is expected in it; empty where nothing does.

    The weights of the target are compared where both tell them: directories made earlier do not.
    """
    keys = [key for key in about if key != TARGET_ID or (header.get(key) and about[key])]
    return difference({key: header.get(key) for key in keys}, {key: about[key] for key in keys})


def difference(old: Any, new: Any, path: str = "") -> str:
    """What differs between two headers, by key; empty where nothing does."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [difference(old.get(k), new.get(k), f"{path}.{k}") for k in {*old, *new}]
        return "; ".join(sorted(part for part in parts if part))
    same = json.dumps(old, default=str) == json.dumps(new, default=str)  # a tuple is a list there
    return "" if same else f"{path[1:]} was {old}, is {new}"
