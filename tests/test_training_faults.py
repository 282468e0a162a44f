"""Damaged, foreign and odd files for training: each is refused in one sentence that names it."""

import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_models import FAMILIES, toy_model, toy_tokenizer
from train_cases import (
    TEMPLATE,
    quiet_torch,
    toy_recipe,
    write_all_features,
    write_data,
    write_target,
)

from outrider.checkpoints import load_drafter, save_drafter
from outrider.errors import ConfigError, DataError, ModelError, TrainingError
from outrider.target.load import load_model
from outrider.training.calibrate import calibrate, recalibrate
from outrider.training.dataset import Data, check_target, read_header, write_header, write_tensors
from outrider.training.evaluate import Judged
from outrider.training.features import (
    LAYOUTS,
    feature_reader,
    feature_source,
)
from outrider.training.hold import held
from outrider.training.log import Log, read_log
from outrider.training.recipe import DrafterShape, read_recipe, recipe_of
from outrider.training.recorder import Recorder
from outrider.training.run import Inputs, Pace, Run
from outrider.training.world import StopSignals

__all__ = ["quiet_torch"]
SHARD, FEATURES = "tokens-00001.safetensors", "features-00001.safetensors"
DRAFTER = {each.name for each in fields(DrafterShape)}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("training")
    model, data = write_target(root / "model"), write_data(root / "data")
    features = write_all_features(root / "features", model, Data(data))
    return {"model": model, "data": data, "features": features}


def inputs(places: dict[str, Path], directory: Path, **more: Path) -> Inputs:
    chosen = {"data": places["data"], **more}
    return Inputs(chosen["data"], directory, chosen.get("features"), str(places["model"]))


def changed(source: Path, target: Path, name: str, change: Callable[[Tensors], object]) -> Path:
    """A copy of a directory, one file of it with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / name)
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, target / name)
    return target


# ---- recipes


@pytest.mark.parametrize(
    "text",
    [
        "held_out: 1\nheld_out: 2",
        "drafter: {num_layers: 1, 'num_layers': 2}",
        "a: 2020-13-45",
        "a: " + "9" * 5000,
        "[" * 5000,
        "- " * 3000,
        "\t",
        "a: &a [*a",
        "\xff\xfe",
    ],
)
def test_a_recipe_that_is_no_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"r\.yaml cannot be read"):
        read_recipe(path)
    if "\xff" not in text and text.startswith("a: "):
        with pytest.raises(ConfigError, match="is no YAML"):
            read_recipe("dspark", [f"seed={text.removeprefix('a: ')}"])


def test_what_a_recipe_says_at_all_is_looked_at_before_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text, told in {
        "": "r.yaml must be an object, got None",
        "3": "r.yaml must be an object, got 3",
        "drafter: {num_layers: 2}": "r.yaml: drafter needs the key 'algorithm'",
        "drafter: &a {<<: &b {num_layers: 3}, num_layers: 2}\nloss: {<<: *a}": "needs the key",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_recipe(path, ["training.steps=2"])


def test_a_recipe_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match="cannot be run: SystemExit"):
        read_recipe(tmp_path / "r.py")


# ---- data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("starts"), "cannot be read: .* starts"),
        (lambda t: t.update(starts=t["starts"].float()), "starts is float32"),
        (lambda t: t["starts"][-1:].fill_(10**6), "starts must ascend from 0 to its"),
        (lambda t: t.update(starts=t["starts"].flip(0)), "starts must ascend"),
        (lambda t: t.update(starts=t["starts"][:0]), "starts must ascend"),
        (lambda t: t.update(prompt_lengths=t["prompt_lengths"][:3]), "prompt_lengths are 3"),
        (lambda t: t["prompt_lengths"].fill_(-5), "prompt_lengths must be from 1"),
        (lambda t: t["prompt_lengths"].fill_(999), "prompt_lengths must be from 1"),
        (lambda t: t["token_ids"][7:8].fill_(-3), "must not be below 0"),
        (lambda t: t.update(token_ids=t["token_ids"][None]), r"token_ids is int32 \[1, "),
        (lambda t: t.update(temperatures=t["temperatures"].bfloat16()), "cannot be read"),
        (lambda t: t["categories"].fill_(9), "category number 9, its data.json names 2"),
    ],
)
def test_shards_that_are_damaged(change, message, places, tmp_path) -> None:
    data = changed(places["data"], tmp_path / "data", SHARD, change)
    with pytest.raises(DataError, match=message):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run", data=data))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [None, "ab", [1], {}])
def test_categories_are_names(names: object, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    write_header(tmp_path / "data" / "data.json", "outrider training data", {"categories": names})
    with pytest.raises(DataError, match="categories must be a list of names"):
        Data(tmp_path / "data")


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"[]", b"", b"null"])
def test_headers_that_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.json (cannot be read|is no kind)"):
        read_header(tmp_path / "data.json", "kind")


def test_files_of_tensors_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(3)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640


# ---- features


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("best"), "cannot be read: .* best"),
        (lambda t: t.update(best=t["best"][:50]), r"best was \[\d+\], is \[50\]"),
        (lambda t: t.update(layers=t["layers"][:, :20]), r"layers was .* is \[\d+, 20\]"),
        (lambda t: t.update(last=t["last"][:, :20]), r"last was .* is \[\d+, 20\]"),
    ],
)
def test_features_that_are_damaged(change, message, places, tmp_path) -> None:
    features = changed(places["features"], tmp_path / "f", FEATURES, change)
    with pytest.raises(DataError, match=message):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run", features=features))


def test_a_shard_that_is_cut_off_is_named_with_the_way_out(places, tmp_path) -> None:
    data = tmp_path / "data"
    shutil.copytree(places["data"], data)
    os.truncate(data / SHARD, 300)
    with pytest.raises(
        DataError, match=f"{SHARD} cannot be read: .*; deleted, it is written again"
    ):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run", data=data))


@pytest.mark.parametrize("size", [0, 5, 300])
def test_features_that_are_cut_off(size: int, places, tmp_path) -> None:
    features = tmp_path / "features"
    shutil.copytree(places["features"], features)
    os.truncate(features / FEATURES, size)
    with pytest.raises(DataError, match=f"{FEATURES} cannot be read"):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run", features=features))


@pytest.mark.parametrize("missing", ["layer_ids", "hidden_size", "data", "target"])
def test_a_header_of_features_says_what_they_are(missing: str, places, tmp_path) -> None:
    features = tmp_path / "features"
    shutil.copytree(places["features"], features)
    header = read_header(features / "features.json", "outrider training features")
    content = {k: v for k, v in header.items() if k not in (missing, "kind")}
    write_header(features / "features.json", "outrider training features", content)
    with pytest.raises(DataError, match=r"names no layer_ids|other data|target was None"):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run", features=features))


def test_features_of_another_target_are_refused(places, tmp_path) -> None:
    loaded, data = load_model(str(places["model"])), Data(places["data"])
    loaded.name = "sibling"
    with pytest.raises(DataError, match="another target than sibling: target was model, is sib"):
        feature_source(loaded, data, (0,), places["features"])


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_exact_or_the_family_is_refused(family: str, places, tmp_path) -> None:
    toy_model(family).save_pretrained(tmp_path / family)
    toy_tokenizer(TEMPLATE).save_pretrained(tmp_path / family)
    loaded, data = load_model(str(tmp_path / family)), Data(places["data"])
    check_target(data, loaded)
    if loaded.config["model_type"] not in LAYOUTS:
        with pytest.raises(ModelError, match=f"of the family {loaded.config['model_type']}"):
            feature_reader(loaded, (0,))
        return
    end = int(data.shards[0].starts[1])
    found = feature_reader(loaded, (0,)).read(data.shards[0].token_ids[:end])
    weights = loaded.state_dict()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = found.last.float() @ head.float().T
    np.testing.assert_allclose(logits.logsumexp(-1), found.log_sums, atol=0.05)


def test_a_target_without_layout_is_refused_before_anything_is_written(places, tmp_path) -> None:
    loaded = load_model(str(places["model"]))
    loaded.config["model_type"] = "gemma3_text"
    with pytest.raises(ModelError, match="model is of the family gemma3_text"):
        Recorder(loaded, (0,))


# ---- runs


def finished(places: dict[str, Path], directory: Path, **changes: object) -> Run:
    recipe = toy_recipe(steps=2)
    recipe["drafter"] |= {k: v for k, v in changes.items() if k in DRAFTER}
    recipe |= {k: v for k, v in changes.items() if k not in DRAFTER}
    run = Run(recipe_of(recipe), inputs(places, directory, features=places["features"]))
    for _ in run.steps(Pace(), StopSignals()):
        pass
    run.finish({})
    return run


@pytest.mark.parametrize("size", [1, 7, 16, 96])
def test_any_vocabulary_is_trained_and_judged(size: int, places, tmp_path) -> None:
    """Only multiples of 16 have compiled losses."""
    run = finished(places, tmp_path / "run", draft_vocab_size=size)
    assert load_drafter(tmp_path / "run" / "drafter").drafter.config.draft_vocab_size == size
    assert run.drafter.d2t.tolist() == sorted(run.drafter.d2t.tolist())


@pytest.fixture(scope="module")
def begun(places, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has made no step yet."""
    directory = tmp_path_factory.mktemp("begun") / "run"
    chosen = inputs(places, directory, features=places["features"])
    return Run(recipe_of(toy_recipe(steps=2)), chosen)


@pytest.mark.parametrize(
    "key", ["recipe", "step", "num_tokens", "drafter", "optimizers", "pending"]
)
@pytest.mark.parametrize("value", [None, "x", -1, 99, [], {}])
def test_states_that_are_damaged(key: str, value: object, begun: Run) -> None:
    state = begun.trainer.state()
    if state[key] == value or (key, value) in (("num_tokens", 99), ("pending", {})):
        return  # harmless
    with pytest.raises(TrainingError, match=r"is none of a run, or damaged|another recipe"):
        begun.trainer.load_state(state | {key: value})


def test_steps_that_no_report_told_of_are_where_the_training_is(begun: Run, monkeypatch) -> None:
    state = begun.trainer.state()
    state["pending"] = [{"by_depth": torch.zeros(3, 3), "weight": 1.0}]
    monkeypatch.setattr(begun.trainer, "_device", torch.device("meta"))
    begun.trainer.load_state(state)
    [sums] = begun.trainer._pending
    assert sums.by_depth.device.type == "meta"
    begun.trainer._pending.clear()


@pytest.mark.parametrize("state", [torch.zeros(3), [], "x", {}, 5])
def test_states_of_something_else(state: object, begun: Run) -> None:
    torch.save(state, begun.inputs.directory / "state.pt")
    with pytest.raises(TrainingError, match="is none of a run, or damaged"):
        Run(begun.recipe, begun.inputs)


@pytest.mark.parametrize(
    "damage", [b"[1]\n", b"{}\n", b"3\n", b"\xff\xfe\n", b'{"step": "a"}\n', b"[" * 100_000]
)
def test_a_log_is_read_up_to_its_damage(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    Log(tmp_path, 2).add(step=3)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 3]


def test_a_drafter_that_could_not_be_written_is_told_of_before_training(places, tmp_path) -> None:
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "run" / "drafter" / "notes.txt").touch()
    with pytest.raises(DataError, match=r"other files than a drafter's \(notes.txt\)"):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run"))


def test_a_drafter_with_a_head_of_its_own_is_no_start(places, tmp_path) -> None:
    run = finished(places, tmp_path / "run")
    run.drafter.own_head = torch.zeros(64, 32)
    save_drafter(run.drafter, tmp_path / "own", target={}, provenance={})
    with pytest.raises(DataError, match="has own_head, expected the target's"):
        Run(run.recipe, replace(inputs(places, tmp_path / "b"), init_from=tmp_path / "own"))


def test_a_directory_has_one_command_at_a_time(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        message = r"another process is writing to .*run: wait"
        with pytest.raises(DataError, match=message), held(tmp_path / "run"):
            pass
        (tmp_path / "run" / "state.pt").touch()
    with held(tmp_path / "run"), held(tmp_path / "other"):
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["state.pt"]
    assert not (tmp_path / "other").exists()  # nothing was written
    message = r"cannot write to .*state\.pt: "
    with pytest.raises(DataError, match=message), held(tmp_path / "run" / "state.pt"):
        pass


# ---- calibration


def test_nothing_is_calibrated_on_no_drafts(places, tmp_path) -> None:
    run = finished(places, tmp_path / "run")
    hits = torch.ones(4, 3)
    judged = Judged(torch.zeros(4, dtype=torch.int64), hits, hits, 0.0)  # all of the first text
    assert calibrate(run.drafter, judged, 2) is None
    assert finished(places, tmp_path / "one", held_out=1).drafter.temperatures.tolist() == [1] * 3


def test_a_drafter_is_calibrated_on_the_texts_that_its_run_held_out(places, tmp_path) -> None:
    run = finished(places, tmp_path / "run")
    path = tmp_path / "run" / "drafter"
    loaded, model = load_drafter(path), load_model(str(places["model"]))
    data = Data(places["data"])
    again = recalibrate(loaded, path, data, model, places["features"])
    assert again.temperatures == pytest.approx(run.drafter.temperatures.tolist(), rel=0.2)
    other = Data(write_data(tmp_path / "other", num_shards=1))  # never trained on: all of it
    header = {**data.header, "id": "other"}
    write_header(tmp_path / "other" / "data.json", "outrider training data", header)
    assert recalibrate(load_drafter(path), path, Data(other.directory), model, None) != again
    seen = load_drafter(path)
    seen.config["provenance"]["earlier_data"] = ["other"]
    with pytest.raises(DataError, match=r"was trained on .*other in an earlier stage"):
        recalibrate(seen, path, Data(other.directory), model, None)
    fewer = tmp_path / "features"
    shutil.copytree(places["features"], fewer)
    (fewer / FEATURES).unlink()
    with pytest.raises(DataError, match="was trained on 16 texts of this data, now there are 6"):
        recalibrate(load_drafter(path), path, data, model, fewer)
    model.config["hidden_size"] = 64
    with pytest.raises(DataError, match="target of hidden_size 32, this one has 64"):
        recalibrate(load_drafter(path), path, data, model, None)
