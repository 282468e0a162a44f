"""What the target computes on the texts: layer outputs, last states, and log-sums of its logits.

Shape legend: T tokens, F feature width, H hidden.
"""

import itertools
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

from outrider.errors import DataError, ModelError
from outrider.target.base import ForwardBatch, Target
from outrider.target.kv import pages_for
from outrider.target.load import LoadedModel, build_target
from outrider.training.dataset import (
    TARGET_ID,
    Data,
    Shard,
    difference,
    read_header,
    unlike,
    write_header,
    write_tensors,
)

KIND = "outrider training features"
COMPARED = ("data", "layer_ids", "hidden_size", "target", TARGET_ID)
ROWS = 256  # of one forward
LAYOUTS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt_oss")


@dataclass(slots=True)
class Features:
    """Of some texts in a row."""

    layers: torch.Tensor  # bf16 [T, F], in the order of the layer ids
    last: torch.Tensor  # bf16 [T, H], normed: times the head it gives the target's logits
    log_sums: torch.Tensor  # float32 [T], log of the sum of exponentials of those
    best: torch.Tensor  # int32 [T], the target's most likely next token

    def to(self, device: torch.device) -> "Features":
        """The same on a device."""
        return Features(*(getattr(self, name).to(device) for name in self.__slots__))


class FeatureSource(Protocol):
    """Where training takes features from: `FeatureShards` reads, `LiveFeatures` computes them."""

    def read(self, shard: int, start: int, end: int) -> Features:
        """Of the tokens from `start` to `end` of a shard, where a text starts at `start`."""
        ...

    def prepare(self, shard: int, start: int, end: int) -> None:
        """The same is going to be read soon."""
        ...


class FeatureReader:
    """Runs a target over texts. It owns the target's KV.

    Args:
        layer_ids: layers whose outputs are wanted; -1 = embedding.
        final_norm: weight of the norm before the head [H], and its epsilon.
    """

    def __init__(
        self, target: Target, layer_ids: tuple[int, ...], final_norm: torch.Tensor, epsilon: float
    ) -> None:
        self.target = target
        self.layer_ids = layer_ids
        self._norm = final_norm.float()
        self._epsilon = epsilon
        self._pages = pages_for(target.max_model_len)
        target.allocate_kv(self._pages)

    def read(self, token_ids: np.ndarray) -> Features:
        """Of one text, int32 [T].

        Raises:
            DataError: it is longer than the target's context.
        """
        if len(token_ids) > self.target.max_model_len:
            raise DataError(
                f"a text has {len(token_ids)} tokens, the context of {self.target.name} "
                f"{self.target.max_model_len}"
            )
        last_layer = self.target.num_layers - 1
        pages = np.arange(self._pages, dtype=np.int32)
        parts = []
        for start in range(0, len(token_ids), ROWS):
            rows = np.arange(len(token_ids[start : start + ROWS]), dtype=np.int32)
            batch = ForwardBatch(
                token_ids=np.ascontiguousarray(token_ids[start : start + ROWS], np.int32),
                positions=rows + np.int32(start),
                row_starts=np.array([0, len(rows)], np.int32),
                context_lens=np.array([start], np.int32),
                page_tables=[pages],
                parents=rows - np.int32(1),
                logits_rows=rows,
                is_tree=np.zeros(1, np.bool_),
                layer_ids=(*self.layer_ids, last_layer),
            )
            output = self.target.forward(batch)
            assert output.features is not None
            states = output.features.float()
            width = self.target.hidden_size
            normed = F.rms_norm(states[:, -width:], (width,), self._norm, self._epsilon)
            parts.append(
                Features(
                    states[:, :-width].bfloat16(),
                    normed.bfloat16(),
                    output.logits.logsumexp(-1),
                    output.logits.argmax(-1).int(),
                )
            )
        return joined(parts)


def joined(parts: list[Features]) -> Features:
    return Features(
        *(torch.cat([getattr(part, name) for part in parts]) for name in Features.__slots__)
    )


class LiveFeatures:
    """Computes features when they are asked for: no disk, and a target forward at every step."""

    def __init__(self, reader: FeatureReader, data: Data) -> None:
        self._reader, self._data = reader, data

    def read(self, shard: int, start: int, end: int) -> Features:
        """See `FeatureSource`."""
        return self._reader.read(self._data.shards[shard].token_ids[start:end])

    def prepare(self, shard: int, start: int, end: int) -> None:
        """Nothing: what computes them is busy with the step before."""


class FeatureShards:
    """A features directory beside its data: random access by text.

    Raises:
        DataError: it is missing, of other data, or lacks a layer that is asked for.
    """

    def __init__(self, directory: Path, data: Data, layer_ids: tuple[int, ...]) -> None:
        self.header = read_header(directory / "features.json", KIND)
        stored, self._width = self.header.get("layer_ids"), self.header.get("hidden_size")
        if not isinstance(stored, list) or not isinstance(self._width, int):
            raise DataError(f"{directory / 'features.json'} names no layer_ids and hidden_size")
        missing = [layer for layer in layer_ids if layer not in stored]
        if missing:
            raise DataError(
                f"{directory} holds the layers {stored}, and {missing} are asked for as well"
            )
        if self.header.get("data") != data.header.get("id"):
            raise DataError(f"{directory} was made from other data than {data.directory}")
        self._places = [stored.index(layer) for layer in layer_ids]
        self._all = self._places == list(range(len(stored)))
        self._files = [
            _opened(feature_path(directory, shard), len(shard.token_ids), stored, self._width)
            for shard in itertools.takewhile(
                lambda shard: feature_path(directory, shard).exists(), data.shards
            )
        ]
        if not self._files:
            raise DataError(f"{directory} holds no features yet: no features-*.safetensors in it")
        shards = data.shards[: len(self._files)]
        self._paths = [feature_path(directory, shard) for shard in shards]
        self._rows = [_rows(path) for path in self._paths]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, shard: int, start: int, end: int) -> Features:
        """Of the tokens from `start` to `end` of a shard."""
        file = self._files[shard]
        layers, last, log_sums, best = (
            file.get_slice(name)[start:end] for name in ("layers", "last", "log_sums", "best")
        )
        if not self._all:
            parts = layers.unflatten(1, (-1, self._width))
            layers = parts[:, self._places].flatten(1)
        return Features(layers, last, log_sums, best)

    def prepare(self, shard: int, start: int, end: int) -> None:
        """Have the disk read ahead: a step that waits for it takes a quarter longer."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._paths[shard].open("rb") as file:
            for at, row in self._rows[shard]:
                place = at + start * row, (end - start) * row
                os.posix_fadvise(file.fileno(), *place, os.POSIX_FADV_WILLNEED)


def _rows(path: Path) -> list[tuple[int, int]]:
    """Of the large tensors in a file of features: where their rows begin, and bytes per row."""
    with path.open("rb") as file:
        [length] = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    found = []
    for name in ("layers", "last"):
        begin, end = header[name]["data_offsets"]
        found.append((8 + length + begin, (end - begin) // max(1, header[name]["shape"][0])))
    return found


def _opened(path: Path, num_tokens: int, layer_ids: list[int], width: int) -> Any:
    """A file of features, its tensors of the shapes that `Features` tells."""
    expected = {
        "layers": [num_tokens, len(layer_ids) * width],
        "last": [num_tokens, width],
        "log_sums": [num_tokens],
        "best": [num_tokens],
    }
    try:
        file = safe_open(path, "pt")
        found = {name: file.get_slice(name).get_shape() for name in expected}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if found != expected:
        raise DataError(
            f"{path} does not fit its data and features.json: {difference(expected, found)}"
        )
    return file


def feature_source(
    loaded: LoadedModel, data: Data, layer_ids: tuple[int, ...], directory: Path | None
) -> tuple[FeatureSource, int | None]:
    """Where features come from, and how many shards have some; None: all."""
    if directory is not None:
        shards = FeatureShards(directory, data, layer_ids)
        differs = unlike(shards.header, target_names(loaded))
        if differs:
            raise DataError(
                f"{directory} holds features of another target than {loaded.name}: {differs}"
            )
        return shards, len(shards)
    return LiveFeatures(feature_reader(loaded, layer_ids), data), None


def feature_reader(loaded: LoadedModel, layer_ids: tuple[int, ...]) -> FeatureReader:
    """Runs the target over texts for these layers.

    Raises:
        ModelError: as `check_layout`.
    """
    check_layout(loaded)
    target = build_target(loaded)
    norm = loaded.state_dict()["model.norm.weight"]
    return FeatureReader(target, layer_ids, norm, loaded.config["rms_norm_eps"])


def check_layout(loaded: LoadedModel) -> None:
    """Refuse targets whose logits are not the last norm's plain output times the head.

    Raises:
        ModelError: it is of a family that is not known to be laid out as Llama is.
    """
    if loaded.config["model_type"] not in LAYOUTS:
        raise ModelError(
            f"drafters are trained for targets laid out as Llama: {', '.join(LAYOUTS)}; "
            f"{loaded.name} is of the family {loaded.config['model_type']}"
        )


def feature_path(directory: Path, shard: Shard) -> Path:
    return directory / shard.path.name.replace("tokens-", "features-")


def bytes_per_token(num_layers: int, hidden_size: int) -> int:
    """On disk: layer outputs and the last state in bf16, a log-sum and a token."""
    return 2 * hidden_size * (num_layers + 1) + 8


def shards_to_do(directory: Path, data: Data) -> list[Shard]:
    """Shards of the data whose features are not there yet."""
    return [shard for shard in data.shards if not feature_path(directory, shard).exists()]


def about_features(loaded: LoadedModel, layer_ids: tuple[int, ...]) -> dict[str, Any]:
    """What features of a model say of themselves, for `open_features`."""
    return {
        "layer_ids": list(layer_ids),
        "hidden_size": loaded.config["hidden_size"],
        **target_names(loaded),
    }


def target_names(loaded: LoadedModel) -> dict[str, Any]:
    """What tells a target from all others, for headers."""
    return {"target": loaded.name, TARGET_ID: loaded.identity}


def open_features(directory: Path, data: Data, about: dict[str, Any]) -> None:
    """Make a features directory, or make sure that one which is there is of the same kind.

    Raises:
        DataError: it holds features of other data or other layers, or cannot be written.
    """
    path = directory / "features.json"
    about = {"data": data.header.get("id"), **about}
    # A header without features, of a command that ended early, binds nobody.
    if not (path.exists() and any(directory.glob("features-*"))):
        write_header(path, KIND, about)
        return
    header = read_header(path, KIND)
    differs = unlike(header, {key: about.get(key) for key in COMPARED})
    if differs:
        raise DataError(f"{directory} holds other features; give another directory: {differs}")


def write_features(reader: FeatureReader, data: Data, directory: Path) -> Iterator[int]:
    """Write what is not there yet, shard by shard; yields the tokens done after each text.

    A shard that was written whole before is kept, so that a kill loses one at most.
    """
    for shard in shards_to_do(directory, data):
        total = len(shard.token_ids)
        width, last = len(reader.layer_ids) * reader.target.hidden_size, reader.target.hidden_size
        whole = Features(
            torch.empty(total, width, dtype=torch.bfloat16),
            torch.empty(total, last, dtype=torch.bfloat16),
            torch.empty(total),
            torch.empty(total, dtype=torch.int32),
        )
        for start, end in itertools.pairwise(shard.starts.tolist()):
            part = reader.read(shard.token_ids[start:end])
            for name in Features.__slots__:
                getattr(whole, name)[start:end] = getattr(part, name)
            yield end - start
        write_shard_features(directory, shard, whole)


def write_shard_features(directory: Path, shard: Shard, features: Features) -> None:
    """Features of all tokens of a shard, as one file that is whole or not there."""
    tensors = {name: getattr(features, name).contiguous() for name in Features.__slots__}
    write_tensors(feature_path(directory, shard), tensors)
