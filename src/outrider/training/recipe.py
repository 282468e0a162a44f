"""A recipe: everything that decides how a drafter is trained, as one YAML file or Python object."""

import dataclasses
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from outrider.checks import integer, number, shown
from outrider.errors import ConfigError
from outrider.training.losses import LossWeights

PACKAGED = Path(__file__).parent.parent / "recipes"
PRECISIONS = ("bfloat16", "float32")
LARGEST = sys.float_info.max
# What reading YAML raises besides its own: days that are none, integers too long, nesting too deep.
NO_YAML = (OSError, ValueError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a recipe says of the drafter; the rest follows from the target."""

    algorithm: str
    num_layers: int = 1
    target_layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int = 8192
    num_draft_tokens: int = 7
    qk_norm: bool = False
    mask_token: str | None = None  # a token of the target that its texts never hold
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence_head: bool = False
    num_modules: int = 1
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    copy_layers: tuple[int, ...] = ()  # layers of the target that ours start from; (): random

    def __post_init__(self) -> None:
        for name in ("num_layers", "draft_vocab_size", "num_draft_tokens", "num_modules"):
            integer(f"drafter.{name}", getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class Optimisation:
    """The loop."""

    steps: int = 1000
    tokens_per_pack: int = 4096  # context tokens of one forward of the drafter
    packs_per_step: int = 1  # shared among the processes
    anchors_per_pack: int = 1024
    partitions: int = 1  # passes a pack is divided into: less memory, the same gradients
    keep_ratio: float = 1.0  # conditional drop of tokens, see AnchorRule
    keep_min: float = 0.0
    max_length: int = 2048  # longer texts are cut
    shares: dict[str, float] = field(default_factory=dict)  # of a category's texts, per epoch
    optimizer: str = "adamw"  # or "muon": for the matrices of layers, adamw for the rest
    learning_rate: float = 6e-4
    matrix_learning_rate: float = 6e-4  # of muon
    final_learning_rate: float = 0.0  # as a share, at the end of the cosine
    warm_up: float = 0.04  # share of the steps
    weight_decay: float = 0.0
    clip: float = 1.0  # norm of all gradients
    precision: str = "bfloat16"  # of the products; parameters are float32

    def __post_init__(self) -> None:
        counts = ("steps", "tokens_per_pack", "packs_per_step", "anchors_per_pack", "partitions")
        for name in counts:
            integer(f"training.{name}", getattr(self, name), 1)
        integer("training.max_length", self.max_length, 4)
        for name in ("keep_ratio", "keep_min", "final_learning_rate", "warm_up"):
            number(f"training.{name}", getattr(self, name), 0.0, 1.0)
        for name in ("learning_rate", "matrix_learning_rate", "clip"):
            number(f"training.{name}", getattr(self, name), 0.0, LARGEST, open_low=True)
        for category, share in self.shares.items():
            number(f"training.shares: {category}", share, 0.0, 1.0, open_low=True)
        number("training.weight_decay", self.weight_decay, 0.0, LARGEST)
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"training.precision must be one of {list(PRECISIONS)}, got {shown(self.precision)}"
            )


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module."""

    drafter: DrafterShape
    loss: LossWeights = field(default_factory=LossWeights)
    training: Optimisation = field(default_factory=Optimisation)
    held_out: int = 128  # texts that are never trained on
    seed: int = 0

    def __post_init__(self) -> None:
        integer("held_out", self.held_out, 0)
        integer("seed", self.seed, 0, 2**63 - 1)
        for each in fields(self.loss):
            number(f"loss.{each.name}", getattr(self.loss, each.name), 0.0, LARGEST)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def packaged_recipes() -> list[str]:
    """Names of the recipes that come with outrider."""
    return sorted(path.stem for path in PACKAGED.glob("*.yaml"))


def read_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """A recipe by its name, or from a file of YAML or Python (which sets `recipe`).

    Args:
        changes: values to replace, as ``training.steps=500``.

    Raises:
        ConfigError: it cannot be read, or holds an unknown key or a value of the wrong type.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".py"):
        path = PACKAGED / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(
                f"no recipe {shown(str(name))}: expected one of {', '.join(packaged_recipes())}, "
                "or a file that ends in .yaml or .py"
            )
    content = _of_python(path) if path.suffix == ".py" else _of_yaml(path)
    if isinstance(content, Recipe):
        content = content.as_json()
    _keys(content, Recipe, str(name))
    for change in changes:
        content = _changed(content, change)
    return recipe_of(content, str(name))


class _Loader(yaml.SafeLoader):
    """Which of two values of one key is meant, nobody can tell."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in keys.items():
            if count > 1:
                raise ValueError(f"the key {shown(key)} is there twice in one object")
        return node


def _of_yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except NO_YAML as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None


def _of_python(path: Path) -> Any:
    try:
        found = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # whatever the user's file does
        raise ConfigError(
            f"the recipe {path} cannot be run: {type(error).__name__}: {error}"
        ) from error
    if "recipe" not in found:
        raise ConfigError(f"the recipe {path} must set `recipe` to a Recipe or a dict")
    return found["recipe"]


def _changed(content: Any, change: str) -> Any:
    """The content with one value replaced."""
    key, equals, text = change.partition("=")
    if not equals:
        raise ConfigError(f"a change must be KEY=VALUE, as training.steps=500, got {shown(change)}")
    try:
        value = yaml.safe_load(text)
    except NO_YAML as error:
        raise ConfigError(f"the value of {shown(change)} is no YAML: {error}") from None
    return _replaced(content, key.split("."), value, change)


def _replaced(content: Any, keys: Sequence[str], value: Any, change: str) -> dict[str, Any]:
    """An object with the value at the end of the keys."""
    first, *rest = keys
    if not isinstance(content, dict):
        raise ConfigError(
            f"{shown(change)} names the key {first!r} inside of {shown(content)}, which has no keys"
        )
    inner = _replaced(content.get(first) or {}, rest, value, change) if rest else value
    return {**content, first: inner}


def recipe_of(content: Any, name: str = "the recipe") -> Recipe:
    """A recipe from its content as plain objects; raises as `read_recipe`."""
    parts = {"drafter": DrafterShape, "loss": LossWeights, "training": Optimisation}
    content = _keys(content, Recipe, name)
    if "drafter" not in content:
        raise ConfigError(f'{name} needs the part "drafter"')
    made = {
        key: _made(cls, content[key], f"{name}: {key}")
        for key, cls in parts.items()
        if key in content
    }
    return _made(Recipe, {**content, **made}, name)


def _keys(content: Any, cls: type, name: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{name} must be an object, got {shown(content)}")
    known = [field.name for field in fields(cls)]
    unknown = [key for key in content if key not in known]
    if unknown:
        raise ConfigError(f"{name} has unknown keys {unknown}, known are {known}")
    return content


def _made(cls: type, content: Any, name: str) -> Any:
    content = _keys(content, cls, name)
    values = {
        each.name: _value(content[each.name], _kind(each.type), f"{name}: {each.name}")
        for each in fields(cls)
        if each.name in content
    }
    for each in fields(cls):
        if each.name not in values and each.default is each.default_factory is MISSING:
            raise ConfigError(f"{name} needs the key {each.name!r}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{name.partition(':')[0]}: {error}") from None


def _kind(declared: Any) -> str:
    """The type of a field as it is written."""
    return declared.__name__ if declared in (int, float, str, bool) else str(declared)


def _value(value: Any, kind: str, name: str) -> Any:
    """The value, if it is of the type that the field is declared with."""
    plain = kind.removesuffix(" | None")
    if value is None and plain != kind:
        return value
    if plain.startswith("tuple"):
        given = value if isinstance(value, list | tuple) else [value]
        return tuple(integer(f"each of {name}", each, -1) for each in given)
    if plain.startswith("dict"):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name} must be an object with names as keys, got {shown(value)}")
        return {key: _as_float(each) for key, each in value.items()}
    if plain == "float":
        value = _as_float(value)
    expected = {"int": int, "float": float, "str": str, "bool": bool}.get(plain)
    is_bool = isinstance(value, bool) and expected is not bool
    if expected and (is_bool or not isinstance(value, expected)):
        raise ConfigError(f"{name} must be {plain}, got {shown(value)}")
    return value


def _as_float(value: Any) -> Any:
    """Whole numbers too, and 6e-4, which YAML takes for text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_int else value
