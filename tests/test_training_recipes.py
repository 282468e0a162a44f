"""What a recipe asks for is done or refused: every key, the optimizer, shares, and starts."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_models import VOCAB, toy_model
from train_cases import MASK, SHAPES, toy_recipe, write_data

from outrider.checkpoints import export_drafter, load_drafter
from outrider.drafters import ALGORITHMS, Drafter
from outrider.errors import ConfigError, DataError
from outrider.training.batches import Place, Shares
from outrider.training.build import build_drafter
from outrider.training.dataset import Data
from outrider.training.optimizers import make_optimizers
from outrider.training.recipe import DrafterShape, packaged_recipes, read_recipe, recipe_of
from outrider.training.start import Start

OTHER: dict[str, Any] = {  # a value that is no default, of every key that not all drafters have
    "num_layers": 2,
    "qk_norm": True,
    "mask_token": MASK,
    "markov_rank": 8,
    "markov_head": "gated",
    "confidence_head": True,
    "num_modules": 3,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "copy_layers": [0],
}
DEFAULTS = {each.name: each.default for each in dataclasses.fields(DrafterShape)}
COMMON = {"algorithm", "target_layer_ids", "draft_vocab_size", "num_draft_tokens"}
MASK_ID = 2


@pytest.fixture(scope="module")
def target() -> SimpleNamespace:
    module = toy_model("llama", tie_word_embeddings=True)
    weights = {k: v for k, v in module.state_dict().items() if k != "lm_head.weight"}
    return SimpleNamespace(config=module.config, weights=weights)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(write_data(tmp_path_factory.mktemp("recipes") / "data", num_shards=1))


def built(target: SimpleNamespace, data: Data, **drafter: Any) -> Drafter:
    recipe = toy_recipe(drafter["algorithm"])
    recipe["drafter"] |= drafter
    mask = MASK_ID if recipe["drafter"].get("mask_token") else None
    return build_drafter(recipe_of(recipe), data, target.config, target.weights, mask)


def look(drafter: Drafter) -> list[Any]:
    """Parameters, and what else decides what it says."""
    parts = [
        (name, tuple(p.shape), float(p.detach().sum())) for name, p in drafter.named_parameters()
    ]
    flags = [getattr(part, "norm_before_residual", None) for part in drafter.modules()]
    head = getattr(getattr(drafter, "markov_head", None), "kind", None)
    return [parts, flags, head, drafter.config.mask_token_id]


def test_every_key_is_known_here() -> None:
    assert OTHER.keys() | COMMON == DEFAULTS.keys()


@pytest.mark.parametrize("key", OTHER)
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_key_is_read_or_refused(algorithm: str, key: str, target, data) -> None:
    if key in ALGORITHMS[algorithm].shape_keys:
        more = {"copy_layers": []} if key in ("num_layers", "num_modules") else {}
        changed = built(target, data, algorithm=algorithm, **more, **{key: OTHER[key]})
        if key != "mask_token":  # without one there is no drafter
            plain = built(target, data, algorithm=algorithm, **more, **{key: DEFAULTS[key]})
            assert look(changed) != look(plain)
    else:
        message = f"{algorithm} has no {key}, and the recipe says .*: expected .*; it has"
        with pytest.raises(ConfigError, match=message):
            built(target, data, algorithm=algorithm, **{key: OTHER[key]})


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_say_what_is_done(name: str, target, data) -> None:
    recipe = read_recipe(name)
    layers = (2,) * min(1, len(recipe.drafter.target_layer_ids))
    copies = tuple(0 for _ in recipe.drafter.copy_layers)
    shape = replace(
        recipe.drafter, target_layer_ids=layers, copy_layers=copies, draft_vocab_size=64
    )
    recipe = replace(recipe, drafter=shape)
    mask = MASK_ID if shape.mask_token else None
    drafter = build_drafter(recipe, data, target.config, target.weights, mask)
    kinds = [type(each).__name__.lower() for each in make_optimizers(drafter, recipe.training)]
    assert recipe.training.optimizer in kinds


def test_muon_without_matrices_is_refused(target, data) -> None:
    medusa = built(target, data, algorithm="medusa")
    with pytest.raises(ConfigError, match="muon is for matrices inside layers, and medusa has no"):
        make_optimizers(medusa, recipe_of(toy_recipe("medusa", optimizer="muon")).training)


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.05, 0.3, 1.0])
def test_every_epoch_has_a_text_however_small_its_share(share: float) -> None:
    places = [Place(0, i, 0, 9, 2, True, category=i % 2) for i in range(10)]
    shares = Shares(places, {0: share, 1: share}, seed=3)
    assert all(shares.of(epoch) for epoch in range(60))


# ---- starts

ALL = {"draft_vocab_size": VOCAB, "qk_norm": True}
HELD = [  # every format, with the drafters it holds
    ("speculators", {"algorithm": "eagle3"}),
    ("speculators", {"algorithm": "peagle"}),
    ("speculators", {"algorithm": "dflash", "qk_norm": True}),
    ("speculators", {"algorithm": "dspark", "qk_norm": True}),
    ("speculators", {"algorithm": "dspark", "qk_norm": True, "markov_rank": 0}),
    ("z-lab", {"algorithm": "dflash", **ALL}),
    ("deepspec", {"algorithm": "dspark", **ALL}),
    ("deepspec", {"algorithm": "dspark", **ALL, "markov_rank": 0, "confidence_head": False}),
    ("deepspec", {"algorithm": "eagle3", **ALL}),
]


def exported(drafter: Drafter, format: str, directory: Path, target: SimpleNamespace) -> Path:
    export_drafter(
        drafter,
        directory,
        format,
        target_config=target.config,
        target_weights=target.weights,
    )
    return directory


@pytest.mark.parametrize(("format", "shape"), HELD)
def test_what_was_exported_is_a_start(format, shape, target, data, tmp_path, monkeypatch) -> None:
    source = built(target, data, **shape)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter))
    path = exported(source, format, tmp_path / "theirs", target)
    for told in (True, False):
        start = Start(path)
        if not told:
            config = replace(start._loaded.drafter.config, target_num_layers=0)
            start._loaded.drafter.config = config
        fresh = built(target, data, **shape)
        start.give(fresh, target.weights)
        expected = load_drafter(path).drafter.state_dict()
        for name, value in fresh.named_parameters():
            assert value.equal(expected[name].to(value.dtype)), name


def test_a_start_with_a_head_of_its_own_is_refused(target, data, tmp_path) -> None:
    source = built(target, data, algorithm="eagle3")
    source.own_head = torch.randn(64, 32).bfloat16()
    start = Start(exported(source, "speculators", tmp_path / "theirs", target))
    with pytest.raises(DataError, match="has own_head, expected the target's"):
        start.give(built(target, data, algorithm="eagle3"), target.weights)


@pytest.mark.parametrize("algorithm", SHAPES)
def test_drafters_of_the_tests_say_only_what_they_are(algorithm: str, target, data) -> None:
    assert built(target, data, algorithm=algorithm).config.algorithm == algorithm
