"""`outrider train`, the whole path on a toy target, and what it refuses."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_cases import quiet_torch, toy_recipe, write_data, write_target
from typer.testing import CliRunner

from outrider.bench.drive import Answer, Pass
from outrider.checkpoints import load_drafter
from outrider.cli.main import app, main
from outrider.cli.train_data import temperature_shares
from outrider.drafting.scripted import ScriptedSource
from outrider.drafting.source import Draft
from outrider.engine.times import StepTimes
from outrider.errors import ConfigError, DataError
from outrider.policy.fixed import FixedLength
from outrider.policy.view import Ask, StepView
from outrider.results import CompletionOutput, RequestOutput
from outrider.target.load import load_model
from outrider.training.dataset import Data, read_header
from outrider.training.features import FeatureShards, feature_reader
from outrider.training.recipe import packaged_recipes, read_recipe
from outrider.training.rollouts import acceptance

pytestmark = pytest.mark.slow

__all__ = ["quiet_torch"]
ABOUT = {"kind", "categories", "plan", "target", "tokenizer"}
PROMPTS = [{"prompt": f"{word} {n}", "category": "ask"} for n in range(6) for word in ("say", "do")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return path


def train(*arguments: object, stdout_alone: bool = False) -> str:
    """What is shown; a slow machine is told on stderr that the model is being loaded."""
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout if stdout_alone else result.output


def refused(monkeypatch, capsys, *arguments: object) -> str:
    """The one sentence on stderr of a command that ends with code 2."""
    monkeypatch.setattr(sys, "argv", ["outrider", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("outrider:")]
    assert len(lines) == 1
    return lines[0]


def make_data(model: Path, prompts: Path, output: Path, *more: object) -> str:
    return train(
        *("data", "--model", model, "--prompts", prompts, "--max-tokens", 40, "-o", output),
        *("--shard-size", 5, "--batch", 4, "--temperature", "1", "--dtype", "float32", *more),
    )


# ---- data


def test_data_holds_the_answers_of_the_model_itself(model, prompts, tmp_path) -> None:
    shown = make_data(model, prompts, tmp_path / "data")
    data = Data(tmp_path / "data")
    assert data.categories == ["ask"] and len(data.shards) == 3 and data.num_texts >= 8
    assert f"{data.num_texts} texts (ask {data.num_texts})" in shown
    header = data.header
    assert header["complete"] and header["num_tokens"] == data.num_tokens
    assert header["plan"]["seed"] == 0 and header["target"] == "model"
    assert {"command", "date", "versions", "seed"} <= header["provenance"].keys()
    for shard in data.shards:
        assert set(shard.temperatures.tolist()) == {1.0}
        assert (np.diff(shard.starts) - shard.prompt_lengths >= 8).all()


@pytest.mark.slow
def test_data_that_was_stopped_goes_on_with_the_same_texts(model, prompts, tmp_path) -> None:
    make_data(model, prompts, tmp_path / "whole")
    make_data(model, prompts, tmp_path / "parts")
    header = tmp_path / "parts" / "data.json"  # as it is before the first shard is counted
    kept = {k: v for k, v in json.loads(header.read_text()).items() if k in ABOUT}
    header.write_text(json.dumps(kept))
    (tmp_path / "parts" / "tokens-00001.safetensors").unlink()
    (tmp_path / "parts" / "tokens-00002.safetensors").unlink()
    make_data(model, prompts, tmp_path / "parts")
    for name in ("tokens-00000", "tokens-00001", "tokens-00002"):
        a, b = (tmp_path / part / f"{name}.safetensors" for part in ("whole", "parts"))
        assert a.read_bytes() == b.read_bytes()
    a, b = (Data(tmp_path / part).header["id"] for part in ("whole", "parts"))
    assert a == b
    make_data(model, prompts, tmp_path / "other", "--seed", 1)
    assert Data(tmp_path / "other").header["id"] != a


@pytest.mark.slow
def test_self_prompts_continue_the_header_of_the_user(model, tmp_path, monkeypatch) -> None:
    starts = tmp_path / "starts.jsonl"
    starts.write_text('{"prompt": "count to", "category": "maths"}\n')
    monkeypatch.setattr("outrider.training.generate.MIN_PROMPT", 0)
    train(
        *("data", "--model", model, "--self-prompts", 40, "--beginnings", starts),
        *("-o", tmp_path / "data", "--max-tokens", 40, "--temperature", "0:1,1:1"),
        *("--dtype", "float32", "--num-threads", 1),
    )
    data = Data(tmp_path / "data")
    assert data.categories == ["maths"] and data.num_texts > 0
    from outrider.target.load import load_model

    tokenizer = load_model(str(model)).tokenizer
    assert tokenizer is not None
    shard = data.shards[0]
    for start, length in zip(shard.starts[:-1], shard.prompt_lengths, strict=True):
        prompt = tokenizer.decode(shard.token_ids[start : start + length].tolist(), False)
        assert prompt.startswith("(user)count to") and prompt.endswith("<eos>(bot)")


def test_data_refuses_what_cannot_be(model, prompts, tmp_path, monkeypatch, capsys) -> None:
    def told(*arguments: object) -> str:
        return refused(monkeypatch, capsys, "data", "--model", model, *arguments)

    output = ("-o", tmp_path / "data")
    assert "give --prompts, --self-prompts or both" in told(*output)
    assert "--temperature must be" in told(*output, "--self-prompts", 3, "--temperature", "9")
    make_data(model, prompts, tmp_path / "data")
    assert "plan.seed was 0, is 5" in told(
        *("--prompts", prompts, "--max-tokens", 40, "--seed", 5, "--shard-size", 5),
        *("--temperature", 1, *output),
    )
    bare = write_target(tmp_path / "bare", template=None)
    monkeypatch.setattr(sys, "argv", [])
    assert "has no chat template" in refused(
        monkeypatch, capsys, "data", "--model", bare, "--self-prompts", 3, "-o", tmp_path / "x"
    )


def test_features_kept_on_the_way_are_those_of_a_forward_of_their_own(
    model, prompts, tmp_path
) -> None:
    more = ("--features", tmp_path / "features", "--layers", "-1,1", "--dtype", "float32")
    make_data(model, prompts, tmp_path / "data", *more)
    data = Data(tmp_path / "data")
    kept = FeatureShards(tmp_path / "features", data, (-1, 1))
    reader = feature_reader(load_model(str(model), "float32"), (-1, 1))
    assert len(kept) == len(data.shards) == 3
    for number, shard in enumerate(data.shards):
        for text, (start, end) in enumerate(itertools.pairwise(shard.starts.tolist())):
            mine, own = kept.read(number, start, end), reader.read(shard.token_ids[start:end])
            final = end - start - 1  # the last token was never run
            one_bit: dict[str, Any] = {
                "rtol": 1e-2,
                "atol": 1e-3,
            }  # of bf16, where rounding falls on both sides
            torch.testing.assert_close(mine.layers[:final], own.layers[:final], **one_bit)
            torch.testing.assert_close(mine.last[:final], own.last[:final], **one_bit)
            answer = slice(int(shard.prompt_lengths[text]) - 1, final)
            assert torch.equal(mine.best[answer], own.best[answer])
            # Worked out from the last state as it is kept, in bf16.
            torch.testing.assert_close(
                mine.log_sums[answer], own.log_sums[answer], rtol=0, atol=2e-2
            )


def test_features_of_data_that_is_there_are_whole_or_refused(model, prompts, tmp_path) -> None:
    data, features = tmp_path / "data", tmp_path / "features"
    more = ("--features", features, "--layers", "1")
    make_data(model, prompts, data, *more)
    header = (features / "features.json").read_text()
    (features / "features.json").unlink()  # as after a kill between the first shard and its header
    make_data(model, prompts, data, *more)
    again = json.loads((features / "features.json").read_text())
    assert {**again, "provenance": 0} == {**json.loads(header), "provenance": 0}
    (features / "features-00001.safetensors").unlink()
    with pytest.raises(
        DataError, match=r"no features of .*tokens-00001.*`outrider train features`"
    ):
        make_data(model, prompts, data, *more)


def test_a_shard_of_which_nothing_is_kept_has_features_too(model, tmp_path) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 240}) + "\n")  # of a context of 256
    more = ("--features", tmp_path / "features", "--layers", "0,1")
    shown = make_data(model, prompts, tmp_path / "data", *more)
    assert " 0 texts" in shown and "1 prompts too long" in shown
    prompts.write_text(json.dumps({"prompt": "x"}) + "\n")
    assert (tmp_path / "features" / "features-00000.safetensors").exists()


def test_a_plan_that_failed_at_once_does_not_bind(model, prompts, tmp_path, monkeypatch, capsys):
    wrong = ("data", "--model", model, "--prompts", prompts, "-o", tmp_path / "data")
    shown = refused(monkeypatch, capsys, *wrong, "--max-tokens", 40, "--top-p", 0)
    assert "top_p must be in" in shown
    shown = refused(monkeypatch, capsys, *wrong, "--max-tokens", 256)
    assert "256 tokens leave no room for prompts in the context of 256" in shown
    make_data(model, prompts, tmp_path / "data")
    assert Data(tmp_path / "data").header["plan"]["max_tokens"] == 40


def test_temperatures_have_shares() -> None:
    assert temperature_shares("0.7") == ((0.7, 1.0),)
    assert temperature_shares("0:60,1:40") == ((0.0, 60.0), (1.0, 40.0))
    for wrong in ("", "hot", "0:0", "-1", "1:nan"):
        with pytest.raises(ConfigError):
            temperature_shares(wrong)


# ---- features


def test_features_tell_their_size_and_go_on(model, tmp_path, monkeypatch, capsys) -> None:
    data = write_data(tmp_path / "data", num_shards=2)
    arguments = ("features", data, "--model", model, "-o", tmp_path / "features", "--layers", "0,2")
    shown = train(*arguments)
    total = Data(data).num_tokens
    assert f"{2 * 32 * 3 + 8} bytes per token, {total:,} tokens" in shown.replace("\n", " ")
    second = tmp_path / "features" / "features-00001.safetensors"
    before = second.read_bytes()
    second.unlink()
    train(*arguments)
    assert second.read_bytes() == before
    assert read_header(tmp_path / "features" / "features.json", "outrider training features")[
        "layer_ids"
    ] == [0, 2]
    told = refused(monkeypatch, capsys, *arguments[:-1], "0,1")
    assert "holds other features" in told and "layer_ids was [0, 2], is [0, 1]" in told
    for layers, message in (("0,9", "from -1 to 2"), ("0,0", "different"), ("a", "different")):
        assert message in refused(monkeypatch, capsys, *arguments[:-1], layers)


def test_features_for_which_there_is_no_room_are_refused(
    model, tmp_path, monkeypatch, capsys
) -> None:
    data = write_data(tmp_path / "data")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    told = refused(
        *(monkeypatch, capsys, "features", data, "--model", model, "--layers", "0"),
        *("-o", tmp_path / "features"),
    )
    assert "0.00 GB free" in told and not list((tmp_path / "features").glob("*.safetensors"))


# ---- run, eval, calibrate


def test_the_whole_path(model, prompts, tmp_path) -> None:
    make_data(model, prompts, tmp_path / "data")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(toy_recipe("eagle3", steps=4)))
    run = tmp_path / "run"
    shown = train(
        *("run", recipe, "--data", tmp_path / "data", "--model", model, "-o", run),
        *("--report-every", 2, "--steps", 5, "--set", "seed=3"),
    )
    assert "step 4/5" in shown and "step 5/5" in shown and "drafter:" in shown
    assert read_header(run / "run.json", "outrider training run")["recipe"]["seed"] == 3
    trained = load_drafter(run / "drafter").drafter.state_dict()

    data = tmp_path / "data"
    shown = train("calibrate", run, "--data", data, "--model", model)
    assert "temperatures" in shown
    again = load_drafter(run / "drafter")
    calibration = again.config["provenance"]["calibration"]
    assert len(calibration["temperatures"]) == len(calibration["ece_after"]) == 3
    assert calibration["data"] == Data(tmp_path / "data").header["id"]
    assert calibration["num_texts"] == 4
    assert all((value == trained[name]).all() for name, value in again.drafter.state_dict().items()
               if name not in ("temperatures", "shifts"))  # fmt: skip

    config = run / "drafter" / "config.json"
    whole, foreign = config.read_text(), json.loads(config.read_text())
    foreign["target"] |= {"name": "sibling", "fingerprint": "f00"}
    config.write_text(json.dumps(foreign))
    for command in (("eval", run, "--workload", prompts), ("calibrate", run, "--data", data)):
        with pytest.raises(DataError, match="drafter was made for sibling with the tokenizer f00"):
            train(*command, "--model", model)
    config.write_text(whole)

    found = json.loads(
        train(
            *("eval", run / "drafter", "--model", model, "--workload", prompts, "--json"),
            *("--max-tokens", 24, "--ignore-eos", "-o", tmp_path / "eval.json"),
            stdout_alone=True,
        )
    )
    [kind] = found["kinds"]
    assert kind["category"] == "ask" and kind["num_prompts"] == 12
    assert 1 <= kind["length"]["low"] <= kind["length"]["value"] <= kind["length"]["high"] <= 4
    assert 1 <= len(kind["conditional"]) <= 3
    assert json.loads((tmp_path / "eval.json").read_text())["config"]["method"] == "eagle3"
    shown = train(
        *("eval", '{"method": "lookup"}', "--model", model, "--workload", prompts),
        *("--max-tokens", 24, "--draft-tokens", 3, "-o", tmp_path / "lookup.json"),
    )
    assert "tokens per step" in shown.replace("\n", " ")
    [kind] = json.loads((tmp_path / "lookup.json").read_text())["kinds"]
    assert 1 <= len(kind["conditional"]) <= 3  # a lookup could draft 16


def test_commands_without_their_files_say_so(model, tmp_path, monkeypatch, capsys) -> None:
    def told(*arguments: object) -> str:
        return refused(monkeypatch, capsys, *arguments)

    assert "no data.json" in told("run", "dspark", "--data", tmp_path, "-o", tmp_path / "run")
    assert "no recipe 'x'" in told("run", "x", "--data", tmp_path, "-o", tmp_path / "run")
    two = '[{"method": "lookup"}, {"method": "forced"}]'
    for given in (tmp_path / "none", "auto", "none", "dspark", "[]", two):
        assert "must be the directory of a run or a drafter, or the JSON" in told("eval", given)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").touch()
    for command in (
        ("eval", tmp_path / "begun"),
        ("calibrate", tmp_path / "begun", "--data", tmp_path),
        ("run", "dspark", "--data", tmp_path, "-o", tmp_path, "--init-from", tmp_path / "begun"),
    ):
        assert "begun is a run that has not ended, expected one with drafter/" in told(*command)
    assert "has no config.json" in told("calibrate", tmp_path, "--data", tmp_path)


@pytest.mark.parametrize("count", [0, 2, 3])
@pytest.mark.parametrize(
    "given", ['{"method": "auto"}', '{"rejection_sample_method": "block"}', '[{"method": "auto"}]']
)
def test_what_makes_no_source_or_several_is_no_drafter(
    given: str, count: int, model, prompts, monkeypatch, capsys
) -> None:
    sources = [ScriptedSource({}) for _ in range(count)]
    for number, source in enumerate(sources):
        source.name = f"source {number}"
    monkeypatch.setattr("outrider.drafting.build._default", lambda _: sources)  # what ships
    told = refused(monkeypatch, capsys, "eval", given, "--model", model, "--workload", prompts)
    assert f"DRAFTER must be one source, {'{'}" in told and f"makes {count}: [" in told


def test_packaged_recipes_are_recipes() -> None:
    names = packaged_recipes()
    assert names == ["dflash", "dspark", "eagle3", "medusa", "mtp", "pard", "peagle"]
    for name in names:
        assert read_recipe(name).drafter.algorithm == name


# ---- acceptance of rollouts


def answer(index: int, counts: list[int], ids: list[int] | None = None) -> Answer:
    """An answer that came in steps of so many tokens."""
    ids = ids or [7 * n + index for n in range(sum(counts))]
    output = RequestOutput(str(index), None, [1], [CompletionOutput(0, "", ids)])
    arrivals = [(float(step), count) for step, count in enumerate(counts)]
    return Answer(index=index, submitted=0.0, arrivals=arrivals, output=output)


def test_acceptance_counts_steps_behind_the_prompt_and_loops_apart() -> None:
    looping = [1, 2, 3, *[9] * 40]
    answers = [
        answer(0, [1, 4, 1, 2, 3]),
        answer(1, [1, 1, 1, 4]),
        answer(2, [1, 2, 4, 4, 32], looping),
    ]
    found = acceptance(Pass(answers, 2.0, StepTimes()), ["a", "a", "b"], 3)
    a, b, every = found.kinds
    assert (a.category, a.num_prompts, a.num_steps) == ("a", 2, 7)
    assert a.length.value == pytest.approx((4 + 1 + 2 + 3 + 1 + 1 + 4) / 7)
    assert a.length.low < a.length.value < a.length.high
    # of the steps 4, 1, 2 and 1, 1: two accepted a token, one of these a second and a third
    assert a.conditional == pytest.approx([2 / 5, 1 / 2, 1.0])
    assert b.num_steps == 1 and b.length.value == 2.0  # then it says 9 for ever
    assert b.conditional == []  # its only step may have been cut: nothing is known of any depth
    assert (b.length.low, b.length.high) == (2.0, 2.0)
    assert every.num_steps == 8
    assert found.loops.num_looping == 1 and found.loops.length == pytest.approx(40 / 3)


def test_depths_that_no_step_came_to_have_no_chance() -> None:
    found = acceptance(Pass([answer(0, [1, 3, 1, 2, 1])], 1.0, StepTimes()), ["a"], 16)
    # Of three whole steps two accepted a token, one a second, none a third: of a fourth none tells.
    assert found.kinds[0].conditional == pytest.approx([2 / 3, 1 / 2, 0.0])


def test_a_fixed_policy_submits_all_drafts_up_to_the_rows() -> None:
    policy = FixedLength(3)
    source = ScriptedSource({}, max_draft_tokens=8)

    def view(rooms: list[int], row_budget: int) -> StepView:
        return StepView([Ask("r", room) for room in rooms], len(rooms), row_budget)

    assert policy.budgets(source, view([9, 2, 0], 100)) == [3, 2, 0]
    assert policy.budgets(source, view([9, 9], 4)) == [2, 2]
    full = view([9, 9, 9], 5)
    drafts = [[Draft([1, 2, 3])], [], [Draft(), Draft([4, 5, 6])]]
    for ask, proposed in zip(full.asks, drafts, strict=True):
        ask.drafts = proposed
    chosen = policy.choose(full)
    assert [draft.token_ids for draft in chosen] == [[1, 2, 3], [], [4, 5]]


# ---- processes


@pytest.mark.slow
def test_data_that_is_killed_goes_on(model, prompts, tmp_path) -> None:
    make_data(model, prompts, tmp_path / "whole")
    arguments = [
        *("data", "--model", model, "--prompts", prompts, "--max-tokens", 40, "--shard-size", 5),
        *("--batch", 4, "--temperature", "1", "--dtype", "float32", "--num-threads", 1),
        *("-o", tmp_path / "data"),
    ]
    command = [sys.executable, "-m", "outrider.cli.main", "train", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (tmp_path / "data" / "tokens-00000.safetensors").exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    subprocess.run(command, check=True, capture_output=True)
    for path in sorted((tmp_path / "whole").glob("tokens-*")):
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes()
