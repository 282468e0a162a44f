"""A command of `outrider train` given again: what is done stays, and what a kill left goes."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_models import toy_model
from train_cases import TEMPLATE, quiet_torch, toy_recipe, write_data, write_target
from typer.testing import CliRunner

from outrider.bench.peers.models import model_directory
from outrider.cli.main import app
from outrider.errors import ConfigError, DataError
from outrider.target.load import load_model
from outrider.training.dataset import Data, read_header, write_header
from outrider.training.hold import held
from outrider.training.recipe import recipe_of
from outrider.training.run import Inputs, Run

pytestmark = pytest.mark.slow

__all__ = ["quiet_torch"]


def train(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def bytes_of(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trimming = TEMPLATE.replace("m.content", "m.content | trim")
    return write_target(tmp_path_factory.mktemp("target") / "model", trimming)


@pytest.fixture(scope="module")
def sibling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same name, tokenizer and sizes, with other weights."""
    directory = tmp_path_factory.mktemp("sibling") / "model"
    shutil.copytree(model, directory)
    toy_model("llama", seed=7, tie_word_embeddings=True).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, features, a finished run: all that the commands make, by one that makes each."""
    root = tmp_path_factory.mktemp("made")
    asked = [f"{word} {number}" for word in ("say", "do") for number in range(8)]
    asked += [f"{prompt} " for prompt in asked]  # the same texts, by a template that trims
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in asked)
    (root / "prompts.jsonl").write_text("".join(lines))
    (root / "recipe.json.yaml").write_text(json.dumps(toy_recipe(steps=2)))
    for command in commands(root, model).values():
        train(*command)
    return root


def commands(root: Path, model: Path) -> dict[str, list[Any]]:
    data = ["data", "--prompts", root / "prompts.jsonl", "-o", root / "data", "--max-tokens", 24]
    kept = ["--features", root / "kept", "--layers", "0,1", "--dtype", "float32"]
    of_run = ["--data", root / "data", "--features", root / "features"]
    found: dict[str, list[Any]] = {
        "data": [*data, *kept, "--temperature", "0", "--batch", 8],
        "features": ["features", root / "data", "-o", root / "features", "--layers", "0,1"],
        "run": ["run", root / "recipe.json.yaml", *of_run, "-o", root / "run"],
        "calibrate": ["calibrate", root / "run", *of_run],
    }
    return {name: [*words, "--model", model] for name, words in found.items()}


@pytest.mark.parametrize("name", ["data", "features", "run", "calibrate"])
def test_a_command_that_ended_changes_nothing_when_it_is_given_again(name, made, model) -> None:
    before = bytes_of(made)
    shown = train(*commands(made, model)[name])
    assert bytes_of(made) == before
    assert name != "run" or "the run has ended, its drafter is" in shown


def test_a_drafter_that_is_gone_damaged_or_of_another_run_is_written_again(
    made, model, tmp_path
) -> None:
    again = tmp_path / "made"
    shutil.copytree(made, again)
    inputs = Inputs(made / "data", again / "run", made / "features", str(model))
    run = Run(recipe_of(toy_recipe(steps=2)), inputs)
    assert run.finished() == again / "run" / "drafter"
    with torch.no_grad():
        run.drafter.norm.weight[0] += 1
    assert run.finished() is None
    (again / "run" / "drafter" / "model.safetensors").write_bytes(b"")
    assert run.finished() is None


def test_headers_made_earlier_stay_as_they_are_and_are_enough(
    made, model, sibling, tmp_path
) -> None:
    """They do not say which weights the target had."""
    early = tmp_path / "early"
    shutil.copytree(made, early)
    for path in ("data/data.json", "features/features.json", "kept/features.json", "run/run.json"):
        header = json.loads((early / path).read_text())
        assert header.pop("target_id") == load_model(str(model)).identity
        (early / path).write_text(json.dumps(header))
    config = json.loads((early / "run" / "drafter" / "config.json").read_text())
    del config["target"]["target_id"]
    (early / "run" / "drafter" / "config.json").write_text(json.dumps(config))
    before = {k: json.loads(v) for k, v in bytes_of(early).items() if k.endswith(".json")}
    for command in commands(early, sibling).values():
        train(*command)
    after = {k: json.loads(v) for k, v in bytes_of(early).items() if k.endswith(".json")}
    del before["run/drafter/config.json"], after["run/drafter/config.json"]  # calibrated
    assert after == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data", "holds other data; .* target_id was (.*), is (.*)"),
        ("features", "holds other features; .* target_id was (.*), is (.*)"),
        ("run", "holds features of another target than model: target_id was (.*), is (.*)"),
        ("calibrate", "was made for other weights of model than .*: target_id was (.*), is (.*)"),
    ],
)
def test_another_model_of_the_same_name_is_refused(name, message, made, sibling) -> None:
    before = bytes_of(made)
    with pytest.raises(DataError, match=message):
        train(*commands(made, sibling)[name])
    live = commands(made, sibling)["run"]
    del live[live.index("--features") : live.index("--features") + 2]
    with pytest.raises(DataError, match=r"holds another run; .* target_id was (.*), is (.*)"):
        train(*live)
    assert bytes_of(made) == before


def test_the_identity_of_a_model_is_that_of_its_files(model, sibling, tmp_path) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(model, copy)
    identity = load_model(str(model)).identity
    assert load_model(str(copy), "float32").identity == identity
    assert load_model(str(sibling)).identity != identity
    assert load_model(load_model(str(model)).hf_model()).identity is None
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert load_model(str(copy)).identity != identity


def test_peers_get_the_weights_that_are_named(model, sibling, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    for path in (model, sibling):
        made = load_model(str(model_directory(str(path))), "bfloat16").state_dict()
        given = load_model(str(path), "bfloat16").state_dict()
        assert all(made[name].equal(given[name]) for name in given)
        assert model_directory(str(path)) == model_directory(str(path))


def test_texts_that_come_twice_keep_their_features(made, model, tmp_path) -> None:
    command = commands(made, model)["data"]
    command[command.index(made / "data")] = tmp_path / "alone"
    for option in ("--features", "--layers"):
        del command[command.index(option) : command.index(option) + 2]
    train(*command)
    [alone], [kept] = Data(tmp_path / "alone").shards, Data(made / "data").shards
    assert alone.token_ids.tolist() == kept.token_ids.tolist()
    texts = [tuple(alone.token_ids[a:b]) for a, b in itertools.pairwise(alone.starts)]
    assert len(texts) == 2 * len(set(texts)) > 8


@pytest.mark.parametrize("same", [lambda path: path, lambda path: path / ".." / path.name])
def test_data_and_features_go_to_different_directories(
    same: Callable[[Path], Path], model, made, tmp_path
) -> None:
    command = commands(made, model)["data"]
    command[command.index(made / "data")] = tmp_path / "one"
    command[command.index(made / "kept")] = same(tmp_path / "one")
    with pytest.raises(ConfigError, match="--features must be another directory than that of"):
        train(*command)
    assert not (tmp_path / "one").exists()


def test_what_was_asked_for_and_never_written_binds_nobody(model, tmp_path, monkeypatch) -> None:
    data = write_data(tmp_path / "data")
    words = ("features", data, "--model", model, "-o", tmp_path / "features", "--layers")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
        with pytest.raises(DataError, match="name fewer layers"):
            train(*words, "0,1,2")
    train(*words, "0,1")
    header = read_header(tmp_path / "features" / "features.json", "outrider training features")
    assert header["layer_ids"] == [0, 1]


OURS = ["state.pt", "run.json", "data.json", "features.json", "log.jsonl", "curve.png"]
OURS += ["tokens-00003.safetensors", "features-00012.safetensors", "drafter"]


@pytest.mark.parametrize("name", OURS)
def test_what_a_killed_command_was_writing_goes(name: str, tmp_path: Path) -> None:
    stays = [
        tmp_path / each for each in (name, f".{name}", f".{name}.orig", f".my.{name}.abcdefgh")
    ]
    for path in [*stays, tmp_path / f".{name}.a1_cdefg"]:
        path.touch()
    work = tmp_path / f".{name}.abcdefgh" / "new"
    work.mkdir(parents=True)
    (work / "model.safetensors").touch()
    with held(tmp_path):
        assert sorted(tmp_path.iterdir()) == sorted(stays)


def test_a_drafter_that_was_just_being_replaced_comes_back(tmp_path: Path) -> None:
    for part in ("old", "new"):
        (tmp_path / ".drafter.abcdefgh" / part).mkdir(parents=True)
        (tmp_path / ".drafter.abcdefgh" / part / "config.json").write_text(part)
    with held(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
        assert (tmp_path / "drafter" / "config.json").read_text() == "old"


def test_names_of_what_is_written_are_those_that_are_deleted(tmp_path, monkeypatch) -> None:
    """Whatever training writes whole has a name that `held` knows."""
    monkeypatch.setattr("os.replace", lambda *_: None)  # killed before it takes its place
    write_header(tmp_path / "data.json", "kind", {})
    assert len(list(tmp_path.iterdir())) == 1
    with held(tmp_path):
        assert not list(tmp_path.iterdir())
