"""Training: the loop, resuming, features, held-out texts."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_cases import (
    SHAPES,
    quiet_torch,
    toy_recipe,
    write_all_features,
    write_data,
    write_target,
)

from outrider.checkpoints import load_drafter
from outrider.drafters.base import Guesses
from outrider.errors import ConfigError, DataError, TrainingError
from outrider.target.load import load_model
from outrider.training.batches import Place, Shares, split
from outrider.training.checkpoint import STATE, load_state, save_state
from outrider.training.dataset import Data, write_header, write_tensors
from outrider.training.evaluate import Judged, summarise
from outrider.training.features import (
    FeatureShards,
    LiveFeatures,
    feature_reader,
)
from outrider.training.hold import held
from outrider.training.log import Log, read_log
from outrider.training.plot import draw_curve
from outrider.training.recipe import read_recipe, recipe_of
from outrider.training.run import Inputs, Pace, Run
from outrider.training.world import StopSignals

__all__ = ["quiet_torch"]
PACE = Pace(report_every=2, held_out_every=3, save_seconds=1e9)
TIMES = ("seconds",)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("training")
    model, data = write_target(root / "model"), write_data(root / "data")
    features = write_all_features(root / "features", model, Data(data))
    return {"model": model, "data": data, "features": features}


def inputs(places: dict[str, Path], directory: Path, **more: Any) -> Inputs:
    read = {"features": places["features"], "model": str(places["model"])}
    return Inputs(places["data"], directory, **(read | more))


def trained(run: Run, stop_at: int | None = None, pace: Pace = PACE) -> Run:
    """Take a run to its end, or to a step where a signal comes."""
    stop = StopSignals()
    if stop_at == run.trainer.step + 1:
        stop.number = signal.SIGTERM
    for moment in run.steps(pace, stop):
        if stop_at is not None and moment.step == stop_at - 1:
            stop.number = signal.SIGTERM
    return run


def log_of(directory: Path) -> list[dict[str, Any]]:
    """The log without what a clock has put there."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_log(directory)]


# ---- the loop


@pytest.mark.parametrize("algorithm", sorted(SHAPES))
def test_every_algorithm_learns_and_is_saved(algorithm, places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe(algorithm, steps=12, learning_rate=0.01, packs_per_step=1))
    run = trained(Run(recipe, inputs(places, tmp_path / "run")))
    result = run.finish({"command": "test"})
    losses = [line["loss"] for line in log_of(tmp_path / "run") if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    loaded = load_drafter(result.drafter)
    assert loaded.drafter.config == run.drafter.config
    assert loaded.target["name"] == "model" and loaded.target["hidden_size"] == 32
    assert loaded.config["provenance"]["step"] == 12
    assert result.held_out is not None and result.held_out.acceptance_length >= 1
    assert set(result.held_out.by_category) <= {"chat", "code"}
    assert result.curve == tmp_path / "run" / "curve.png"


@pytest.mark.slow
def test_the_log_of_a_run_is_drawn(places, tmp_path) -> None:
    trained(Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run")))
    curve = draw_curve(tmp_path / "run")
    assert curve == tmp_path / "run" / "curve.png" and curve.stat().st_size > 1000


@pytest.mark.parametrize("stop_at", [1, 2, 3, 5])
def test_a_stopped_run_goes_on_with_the_same_bits(stop_at, places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe(optimizer="muon"))
    whole = trained(Run(recipe, inputs(places, tmp_path / "whole")))
    stopped = trained(Run(recipe, inputs(places, tmp_path / "parts")), stop_at)
    assert stopped.trainer.step == stop_at
    resumed = Run(recipe, inputs(places, tmp_path / "parts"))
    assert resumed.trainer.step == stop_at
    trained(resumed)
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    ours, theirs = resumed.drafter.state_dict(), whole.drafter.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_was_logged_after_the_last_checkpoint_comes_again_once(places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe())
    trained(Run(recipe, inputs(places, tmp_path / "whole")))
    expected = log_of(tmp_path / "whole")
    run = trained(Run(recipe, inputs(places, tmp_path / "run")), 3)
    kept = (tmp_path / "run" / STATE).read_bytes()
    trained(run, 5)  # killed here, with the state of step 3 on disk and half a line in the log
    (tmp_path / "run" / STATE).write_bytes(kept)
    (tmp_path / "run" / f".{STATE}.abcdefgh").write_bytes(b"half")
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with held(tmp_path / "run"):
        trained(Run(recipe, inputs(places, tmp_path / "run")))
    assert log_of(tmp_path / "run") == expected
    assert not list((tmp_path / "run").glob(f".{STATE}.*"))


def test_a_finished_run_is_not_trained_again(places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe(steps=2))
    trained(Run(recipe, inputs(places, tmp_path / "run"))).finish({})
    before = log_of(tmp_path / "run")
    again = Run(recipe, inputs(places, tmp_path / "run"))
    assert list(again.steps(PACE, StopSignals())) == []
    again.finish({})
    assert log_of(tmp_path / "run") == before


def test_a_loss_that_is_no_number_names_step_and_texts(places, tmp_path) -> None:
    run = Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run"))
    run.trainer.advance()
    with torch.no_grad():
        run.drafter.norm.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"the loss of step 1 is nan; its texts are shard \d"):
        run.trainer.advance()


def test_another_recipe_or_other_data_is_refused(places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe())
    Run(replace(recipe, seed=1), inputs(places, tmp_path / "run"))  # nothing to lose yet
    trained(Run(recipe, inputs(places, tmp_path / "run")), 1)
    other = replace(recipe, seed=3)
    with pytest.raises(DataError, match=r"recipe\.seed was 0, is 3"):
        Run(other, inputs(places, tmp_path / "run"))
    more = write_data(tmp_path / "more", num_shards=3)
    with pytest.raises(DataError, match="num_texts was 20, is 30"):
        Run(recipe, replace(inputs(places, tmp_path / "run", features=None), data=more))


def test_a_damaged_state_is_one_sentence(places, tmp_path) -> None:
    Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run"))
    (tmp_path / "run" / STATE).write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(DataError, match="damaged"):
        Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run"))


def test_warm_start_takes_the_parameters_of_a_drafter(places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe(steps=2))
    first = trained(Run(recipe, inputs(places, tmp_path / "a")))
    path = first.finish({}).drafter
    second = Run(recipe, inputs(places, tmp_path / "b", init_from=path))
    assert second.trainer.step == 0
    stored = load_drafter(path).drafter.state_dict()
    for name, value in second.drafter.state_dict().items():
        assert torch.equal(value, stored[name].to(value.dtype)), name
    about = load_drafter(trained(second).finish({}).drafter).config["provenance"]
    assert (about["data"], about["earlier_data"]) == ("t", ["t"])
    wrong = recipe_of(toy_recipe("dflash"))
    with pytest.raises(DataError, match="algorithm was dspark, is dflash"):
        Run(wrong, inputs(places, tmp_path / "c", init_from=path))


def test_a_drafter_that_names_more_tokens_starts_from_one_that_names_fewer(
    places, tmp_path
) -> None:
    few = toy_recipe(steps=2)
    few["drafter"]["draft_vocab_size"] = 20
    path = trained(Run(recipe_of(few), inputs(places, tmp_path / "a"))).finish({}).drafter
    more = toy_recipe(steps=2)
    more["drafter"]["draft_vocab_size"] = 31
    wide = Run(recipe_of(more), inputs(places, tmp_path / "b", init_from=path)).drafter
    old = load_drafter(path).drafter
    at = torch.isin(wide.d2t, old.d2t)
    assert len(wide.d2t) == 31 and torch.equal(wide.d2t[at], old.d2t)
    assert (wide.d2t.diff() > 0).all() and torch.equal(wide.head, wide.embedding[wide.d2t])
    name = "markov_head.markov_w2.weight"
    rows, known = wide.state_dict()[name], old.state_dict()[name]
    assert known.any() and torch.equal(rows[at], known.to(rows)) and not rows[~at].any()
    with pytest.raises(DataError, match="draft_vocab_size was 31, is 20"):
        wider = trained(Run(recipe_of(more), inputs(places, tmp_path / "c"))).finish({}).drafter
        Run(recipe_of(few), inputs(places, tmp_path / "d", init_from=wider))


# ---- inputs that cannot be used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.steps=0", "training.steps must be an integer of at least 1, got 0"),
        ("training.step=3", r"unknown keys \['step'\]"),
        ("training.precision=fp8", "training.precision must be one of"),
        ("training.learning_rate=fast", "learning_rate must be float, got 'fast'"),
        ("training.learning_rate=-1e-3", "learning_rate must be a finite number above 0"),
        ("training.optimizer=sgd", "optimizer must be one of"),
        ("drafter.algorithm=eagle9", "algorithm must be one of"),
        ("drafter.target_layer_ids=[0,7]", "target_layer_ids must be from -1 to 2, got .7."),
        ("drafter.target_layer_ids=[]", "dspark reads 1 to 64 layers of the target"),
        ("drafter.mask_token=null", "dspark needs mask_token"),
        ("drafter.mask_token=<none>", "has no token '<none>'"),
        ("drafter.copy_layers=[9]", "names layer 9, which the target lacks"),
        ("held_out=20", "expected more than the 20 of held_out"),
        ("training.shares=0.5", "shares must be an object with names as keys, got 0.5"),
        ("training.shares={chat: 0}", r"shares: chat must be in \(0.0, 1.0\], got 0"),
        ("training.shares={chat: many}", "shares: chat must be a number, got 'many'"),
        ("training.shares={chta: 0.5}", r"names \['chta'\], expected categories of the data"),
        ("steps", "a change must be KEY=VALUE"),
        ("training.steps.x=3", "names the key 'x' inside of 6, which has no keys"),
        ("=3", r"unknown keys \[''\]"),
    ],
)
def test_values_that_cannot_be_are_refused(change, message, places, tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(toy_recipe()))
    with pytest.raises((ConfigError, DataError), match=message):
        Run(read_recipe(recipe, [change]), inputs(places, tmp_path / "run", features=None))
    assert not (tmp_path / "run" / STATE).exists()


def test_recipes_come_from_names_yaml_and_python(tmp_path) -> None:
    python = tmp_path / "mine.py"
    python.write_text(
        "from outrider.training.recipe import DrafterShape, Recipe\n"
        "recipe = Recipe(DrafterShape('medusa', target_layer_ids=(2,)), seed=4)\n"
    )
    assert read_recipe(python, ["training.steps=7"]).training.steps == 7
    assert read_recipe(python).seed == 4
    text = tmp_path / "mine.yaml"
    text.write_text("drafter: {algorithm: pard}\ntraining: {learning_rate: 3e-4}")
    assert read_recipe(text).training.learning_rate == 3e-4
    with pytest.raises(ConfigError, match="no recipe 'dsparkle': expected one of dflash"):
        read_recipe("dsparkle")
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="cannot be run: ZeroDivisionError"):
        read_recipe(tmp_path / "bad.py")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "bad.yaml")


def test_texts_of_a_category_with_a_share_take_turns() -> None:
    places = [Place(0, i, 0, 9, 2, True, category=i % 2) for i in range(40)]
    shares = Shares(places, {1: 0.25}, seed=3)
    epochs = [[place.index for place in shares.of(epoch)] for epoch in range(4)]
    assert [len(epoch) for epoch in epochs] == [25] * 4
    counts = Counter(index for epoch in epochs for index in epoch)
    assert counts == {i: 1 if i % 2 else 4 for i in range(40)}


def test_data_of_another_tokenizer_and_ids_beyond_the_vocabulary(places, tmp_path) -> None:
    recipe = recipe_of(toy_recipe())
    with pytest.raises(DataError, match=r"is no outrider training data: it has no data\.json"):
        Run(recipe, replace(inputs(places, tmp_path / "run"), data=tmp_path))
    data = write_data(tmp_path / "data")
    header = {"id": "x", "categories": ["chat", "code"], "tokenizer": "feedbeef"}
    write_header(data / "data.json", "outrider training data", header)
    with pytest.raises(DataError, match="token ids of the tokenizer feedbeef"):
        Run(recipe, replace(inputs(places, tmp_path / "run"), data=data))


# ---- features


@pytest.mark.parametrize("algorithm", ["dspark", "mtp", "pard"])
def test_losses_are_the_same_with_features_on_disk_and_on_the_way(
    algorithm, places, tmp_path
) -> None:
    recipe = recipe_of(toy_recipe(algorithm, steps=3))
    trained(Run(recipe, inputs(places, tmp_path / "live", features=None)))
    trained(Run(recipe, inputs(places, tmp_path / "disk")))
    assert log_of(tmp_path / "live") == log_of(tmp_path / "disk")


def test_features_are_the_targets_own_outputs(places) -> None:
    loaded = load_model(str(places["model"]), "float32")
    data = Data(places["data"])
    live = LiveFeatures(feature_reader(loaded, (2, -1)), data)
    end = int(data.shards[0].starts[1])
    found = live.read(0, 0, end)
    ids = torch.from_numpy(data.shards[0].token_ids[:end]).long()
    with torch.no_grad():
        model = load_model(str(places["model"]), "float32").hf_model()
        whole = model(ids[None], output_hidden_states=True)
    close = {"rtol": 1e-2, "atol": 1e-2}  # bf16 on our side
    embedding = loaded.state_dict()["model.embed_tokens.weight"][ids]
    torch.testing.assert_close(found.layers[:, 32:].float(), embedding, **close)
    torch.testing.assert_close(found.last.float(), whole.hidden_states[-1][0], **close)
    torch.testing.assert_close(found.log_sums, whole.logits[0].logsumexp(-1))
    assert torch.equal(found.best.long(), whole.logits[0].argmax(-1))


def test_layers_that_are_absent_and_other_data_are_refused(places, tmp_path) -> None:
    data, features = Data(places["data"]), places["features"]
    with pytest.raises(DataError, match=r"holds the layers \[0, 1, 2\], and \[-1\] are asked"):
        FeatureShards(features, data, (0, -1))
    data.header["id"] = "another"
    with pytest.raises(DataError, match="was made from other data"):
        FeatureShards(features, data, (0,))
    with pytest.raises(DataError, match=r"it has no features\.json"):
        FeatureShards(tmp_path, data, (0,))


def test_a_shard_that_cannot_be_written_leaves_nothing(tmp_path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "a.safetensors" / "b").touch()
    with pytest.raises(DataError, match="cannot write"):
        write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


# ---- checkpoints and log


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path, capfd) -> None:
    save_state(tmp_path, {"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(DataError, match="cannot write"):
            save_state(tmp_path, {"step": 2, "x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capfd.readouterr() == ("", "")
    assert load_state(tmp_path) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


def test_a_log_goes_on_from_its_step(tmp_path) -> None:
    log = Log(tmp_path, 0)
    for step in range(1, 5):
        log.add(step=step)
    Log(tmp_path, 2).add(step=9)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 9]


# ---- held-out texts


def test_acceptance_lengths_are_products_down_a_draft() -> None:
    hits = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0.5, 0.5, 1]])
    judged = Judged(torch.tensor([0, 1, 1]), hits, torch.zeros(3, 3), 0.0)
    places = [Place(0, i, 0, 9, 1, True, i) for i in range(2)]
    found = summarise(judged, places, ["a", "b", "c"])
    assert found.by_category == {"a": 3.0, "b": (1 + 2.0) / 2}
    assert found.acceptance_length == pytest.approx((3 + 1 + 2.0) / 3)
    assert found.conditional == pytest.approx([1.5 / 3, 1.25 / 1.5, 0.25 / 1.25])


@pytest.mark.slow
def test_a_perfect_drafter_is_accepted_whole(places, tmp_path, monkeypatch) -> None:
    run = Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run"))
    at = {int(token): index for index, token in enumerate(run.drafter.d2t)}

    def guess(texts, anchors, lengths):
        chain = torch.arange(len(anchors)).repeat_interleave(lengths)
        depth = torch.arange(int(lengths[0])).repeat(len(anchors))
        logits = torch.zeros(len(chain), len(at))
        for row, token in enumerate(texts.token_ids[anchors[chain] + 1 + depth].tolist()):
            logits[row, at.get(token, 0)] = 30.0
        return Guesses(anchors[chain], depth, [(logits, torch.eye(len(at)))])

    monkeypatch.setattr(run.drafter, "guess", guess)
    held_out, judged = run._judged()
    assert held_out is not None and judged is not None
    names = torch.tensor([p.is_greedy for p in run._held])[judged.places]
    known = judged.hits[names]
    assert known.mean() > 0.5  # what is not in the drafter's vocabulary cannot be said
    assert set(known.unique().tolist()) <= {0.0, 1.0}


def test_held_out_texts_are_never_trained_on(places, tmp_path) -> None:
    run = Run(recipe_of(toy_recipe()), inputs(places, tmp_path / "run"))
    held = {(place.shard, place.index) for place in run._held}
    seen = set()
    for step in range(30):
        for pack in run.trainer._batches.step(step):
            seen |= {(place.shard, place.index) for place in pack.places}
    assert len(held) == 4 and not held & seen and len(seen) == 16
    a, b = split([*range(9)], 4, 1), split([*range(9)], 4, 2)  # type: ignore[list-item]
    assert a != b and sorted(np.concatenate(a).tolist()) == [*range(9)]


# ---- processes


def command(places: dict[str, Path], recipe: Path, output: Path, *more: object) -> list[str]:
    parts = ["train", "run", recipe, "--data", places["data"], "--model", places["model"]]
    parts += ["-o", output, "--num-threads", 1, "--report-every", 1, "--save-minutes", 0, *more]
    return ["-m", "outrider.cli.main", *map(str, parts)]


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(toy_recipe(steps=40)))
    return path


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_comes_to_the_same_end(
    places, recipe_file, tmp_path
) -> None:
    whole = command(places, recipe_file, tmp_path / "whole")
    subprocess.run([sys.executable, *whole], check=True, capture_output=True)
    log = tmp_path / "run" / "log.jsonl"
    for lines in (3, 11, 26):
        process = subprocess.Popen(
            [sys.executable, *command(places, recipe_file, tmp_path / "run")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not log.exists() or len(log.read_text().splitlines()) < lines:
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        process.wait()
    last = command(places, recipe_file, tmp_path / "run")
    subprocess.run([sys.executable, *last], check=True, capture_output=True)
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")
    a, b = (load_drafter(tmp_path / name / "drafter").drafter for name in ("run", "whole"))
    assert all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


@pytest.mark.slow
def test_sigterm_saves_and_says_so(places, recipe_file, tmp_path) -> None:
    arguments = command(places, recipe_file, tmp_path / "run", "--steps", 5000)
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    state = load_state(tmp_path / "run")
    assert state is not None and f"stopped at step {state['step']} and saved" in told


@pytest.mark.slow
def test_two_processes_lose_what_one_loses(places, recipe_file, tmp_path) -> None:
    one = command(places, recipe_file, tmp_path / "one", "--steps", 5)
    subprocess.run([sys.executable, *one], check=True, capture_output=True)
    two = command(places, recipe_file, tmp_path / "two", "--steps", 5)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([sys.executable, *start, *two], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    a, b = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for ours, theirs in zip(a[:5], b[:5], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert theirs["agreement"] == pytest.approx(ours["agreement"], abs=1e-6)
        assert theirs["num_guesses"] == ours["num_guesses"]
    assert done.stderr.count("stopped") == 0 and done.stdout.count("drafter:") == 1
