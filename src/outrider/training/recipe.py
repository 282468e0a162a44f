"""A recipe: everything that decides how a drafter is trained, as one YAML file or Python object."""

import dataclasses
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from outrider.checks import shown
from outrider.errors import ConfigError
from outrider.training.losses import LossWeights


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


@dataclass(frozen=True, slots=True)
class Optimisation:
    """The loop."""

    steps: int = 1000
    tokens_per_pack: int = 4096  # context tokens of one forward of the drafter
    packs_per_step: int = 1  # shared among the processes
    anchors_per_pack: int = 1024
    keep_ratio: float = 1.0  # conditional drop of tokens, see AnchorRule
    keep_min: float = 0.0
    max_length: int = 2048  # longer texts are cut
    optimizer: str = "adamw"  # or "muon": for the matrices of layers, adamw for the rest
    learning_rate: float = 6e-4
    matrix_learning_rate: float = 6e-4  # of muon
    final_learning_rate: float = 0.0  # as a share, at the end of the cosine
    warm_up: float = 0.04  # share of the steps
    weight_decay: float = 0.0
    clip: float = 1.0  # norm of all gradients
    precision: str = "bfloat16"  # of the products; parameters are float32


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module."""

    drafter: DrafterShape
    loss: LossWeights = field(default_factory=LossWeights)
    training: Optimisation = field(default_factory=Optimisation)
    held_out: int = 128  # texts that are never trained on
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_recipe(path: Path) -> Recipe:
    """A recipe from YAML.

    Raises:
        ConfigError: it cannot be read, or holds an unknown key or a value of the wrong type.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None
    return recipe_of(content, str(path))


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
    values = {}
    for each in fields(cls):
        if each.name not in content:
            continue
        value = content[each.name]
        kind = str(each.type).removesuffix(" | None")
        if kind.startswith("tuple") and isinstance(value, list | tuple):
            value = tuple(value)
        elif kind == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        expected = {"int": int, "float": float, "str": str, "bool": bool}.get(kind)
        empty = value is None and str(each.type).endswith("None")
        if (
            expected
            and not empty
            and (not isinstance(value, expected) or (expected is int and isinstance(value, bool)))
        ):
            raise ConfigError(f"{name}: {each.name} must be {kind}, got {shown(value)}")
        values[each.name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{name} is incomplete: {error}") from None
