"""The script that makes the drafters which ship: what it asks for, skips, refuses and writes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_cases import HIDDEN, toy_drafter

from outrider.checkpoints import load_drafter, save_drafter

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import build_default_drafters as script  # noqa: E402
import build_default_table  # noqa: E402
import drafter_shipping as shipping  # noqa: E402
from default_drafters import WHOLE, Stage, tiny  # noqa: E402

TARGET = {"name": "toy", "fingerprint": "f"}
MADE = {"date": "2026-01-01", "commit": "abc", "cpu": "a CPU", "cores": 2, "threads": 2}
EVALUATION = {
    "kinds": [{"category": "all", "length": {"value": 2.5, "low": 2.25, "high": 2.75}}],
    "loops": {},
    "draft_tokens": None,
    "workload": {"num_prompts": 2},
    "config": {"model": "/home/somebody/run"},
}


class Outrider:
    """Stands for `outrider train`: leaves the files that the script looks for."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.asked: list[list[str]] = []
        self.fails_at: str | None = None  # a word of the command that fails

    def __call__(self, build: script.Build, *arguments: object) -> None:
        words = list(map(str, arguments))
        self.asked.append(words)
        if self.fails_at in words:
            sys.exit("killed")
        getattr(self, f"_{words[0]}")(words)

    def _data(self, words: list[str]) -> None:
        name = _after(words, "-o")
        about = {"complete": True, "id": f"id of {name}", "provenance": _provenance(words)}
        _write(self.work / name / "data.json", about)

    def _run(self, words: list[str]) -> None:
        directory = self.work / _after(words, "-o")
        changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        settings = dict(change.split("=") for change in changes)
        stage = Stage("", words[1], WHOLE.unseen, settings)
        directory.mkdir(parents=True)
        lines = [
            {"step": 1, "num_tokens": 100},
            {"step": 1, "held_out": {"acceptance_length": 1.5}},
            {"step": 2, "num_tokens": 200},
            {"step": 2, "final": True, "held_out": {"acceptance_length": 2.0}},
        ]
        (directory / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        more = {
            "recipe": stage.whole_recipe().as_json(),
            "data": f"id of {_after(words, '--data')}",
            "num_tokens": 200,
            "calibration": None,
        }
        about = _provenance(words) | more
        save_drafter(toy_drafter("eagle3"), directory / "drafter", target=TARGET, provenance=about)

    def _calibrate(self, words: list[str]) -> None:
        path = self.work / words[1] / "drafter" / "config.json"
        config = json.loads(path.read_text())
        errors = {"ece_before": [0.1, 0.3], "ece_after": [0.01, 0.03]}
        config["provenance"]["calibration"] = {"data": f"id of {_after(words, '--data')}", **errors}
        path.write_text(json.dumps(config))

    def _eval(self, words: list[str]) -> None:
        temperature = float(_after(words, "--temperature"))
        settings = {"settings": {"temperature": temperature}}
        _write(self.work / _after(words, "-o"), EVALUATION | settings)


def _after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def _provenance(words: list[str]) -> dict[str, Any]:
    return {**MADE, "command": f"main.py train {' '.join(words)}", "versions": {"torch": "2"}}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    directory = tmp_path / "prompts"
    directory.mkdir()
    for name in ("gsm8k_train_prompts", "gsm8k_test", "humaneval", "spec_bench"):
        lines = (json.dumps({"turns": [f"problem {n}"]}) + "\n" for n in range(5600))
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """The target's."""
    embedding = torch.randn(96, HIDDEN, generator=torch.Generator().manual_seed(1))
    return {"model.embed_tokens.weight": embedding}


@pytest.fixture
def outrider(tmp_path: Path, monkeypatch, weights) -> Outrider:
    work = tmp_path / "work"
    found = Outrider(work)
    monkeypatch.setattr(script, "run_command", found)
    loaded = SimpleNamespace(state_dict=lambda: weights)
    monkeypatch.setattr(shipping, "load_model", lambda _: loaded)
    monkeypatch.setattr(shipping, "target_json", lambda _: TARGET)
    return found


def build(outrider: Outrider, prompts: Path | None, *more: object) -> None:
    given = ("--prompts", prompts) if prompts else ()
    arguments = (outrider.work, "--into", outrider.work / "shipped", *given, *more)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *map(str, arguments)])
        script.main()


def test_one_command_makes_a_drafter_of_several_stages(outrider, prompts, capsys) -> None:
    build(outrider, prompts, "--only", "dspark")
    kinds = [words[0] for words in outrider.asked]
    assert kinds == ["data"] * 3 + ["run"] * 3 + ["calibrate"] + ["eval"] * 6
    first, fresh, unseen = outrider.asked[:3]
    assert _after(first, "--features") == "features" and _after(first, "--seed") == "1"
    assert _after(fresh, "--prompts") == "math2.jsonl" and "--features" not in unseen
    asked = [
        json.loads(line)["turns"][0]
        for name in ("math", "math2", "math_cal")
        for line in (outrider.work / f"{name}.jsonl").read_text().splitlines()
    ]
    problems = [text.removesuffix(script.REQUEST) for text in asked]
    assert len(set(problems)) == len(problems) == 4600 + 800 + 150  # no problem is in two
    assert [text.endswith(script.REQUEST) for text in asked[:5]] == [True, True, True, False, True]
    one, two, three = outrider.asked[3:6]
    assert "--init-from" not in one and _after(two, "--init-from") == "runs/dspark/drafter"
    assert "training.shares={math: 0.4}" in two and "training.steps=4000" in two
    assert _after(three, "--init-from") == "runs/dspark2/drafter"
    assert _after(three, "--data") == "data2" and _after(three, "--features") == "features2"
    assert outrider.asked[6] == ["calibrate", "runs/dspark3", "--data", "data_cal"]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{outrider.work}/shipped/smollm2")


def test_what_ships_says_how_it_was_made_and_how_good_it_is(outrider, prompts) -> None:
    build(outrider, prompts, "--only", "dspark")
    directory = outrider.work / "shipped" / "smollm2-135m-dspark"
    shipped = load_drafter(directory)
    ours, theirs = shipped.drafter.state_dict(), toy_drafter("eagle3").state_dict()
    assert shipped.target == TARGET
    assert all(torch.equal(ours[name], theirs[name].to(ours[name].dtype)) for name in ours)
    about = shipped.config["provenance"]
    assert about["data"] == "id of data2"  # the last stage's, as `train calibrate` reads it
    assert about["texts"].keys() == {"data", "data2", "data_cal"}
    assert about["texts"]["data"]["cpu"] == "a CPU" and about["texts"]["data"]["complete"]
    stages = about["stages"]
    assert [stage["run"] for stage in stages] == ["dspark", "dspark2", "dspark3"]
    assert stages[1]["command"].startswith("outrider train run dspark --data data --features")
    assert stages[1]["recipe"]["training"]["shares"] == {"math": 0.4}
    tokens = [(point["run"], point["num_tokens"]) for point in about["curve"]]
    assert tokens == [
        *(("dspark", 100), ("dspark", 200), ("dspark2", 300), ("dspark2", 400)),
        *(("dspark3", 500), ("dspark3", 600)),
    ]
    assert about["calibration"]["ece_before"] == [0.1, 0.3]
    assert len(about["evaluation"]) == 6
    assert about["evaluation"]["humaneval-1"]["settings"] == {"temperature": 1.0}
    assert "somebody" not in (directory / "config.json").read_text()
    rows = (outrider.work / "shipped" / "DRAFTERS.md").read_text().splitlines()
    assert rows[-1].startswith("| `smollm2-135m-dspark` | 0.")
    assert "gsm8k_test 2.50 (2.25–2.75) · humaneval" in rows[-1]
    assert rows[-1].endswith("| 20.0%, 2.0% |")


@pytest.mark.parametrize("fails_at", ["data", "data_cal", "runs/dspark2", "calibrate", "humaneval"])
def test_what_is_done_is_not_done_again(fails_at, outrider, prompts) -> None:
    words = {"humaneval": "runs/dspark3/judged/humaneval-0.json"}
    outrider.fails_at = words.get(fails_at, fails_at)
    with pytest.raises(SystemExit, match="killed"):
        build(outrider, prompts, "--only", "dspark")
    before, outrider.fails_at = outrider.asked[:], None
    build(outrider, prompts, "--only", "dspark")
    assert before[-1] == outrider.asked[len(before)]
    assert len(outrider.asked) == 14  # all of them once, and the one that failed
    build(outrider, None, "--only", "dspark")  # nothing is asked of the prompts any more
    assert len(outrider.asked) == 14


def test_parts_and_stages_are_picked(outrider, prompts) -> None:
    build(outrider, prompts, "--only", "mtp", "--only", "dspark", "--stages", 1, "--part", "data")
    assert [_after(words, "-o") for words in outrider.asked] == ["data", "data_cal"]
    build(outrider, None, "--only", "dspark", "--stages", 1, "--part", "train")
    assert _after(outrider.asked[-1], "-o") == "runs/dspark" and len(outrider.asked) == 3
    with pytest.raises(SystemExit, match=r"train: \['mtp'\], calibrated: False, .*gsm8k_test-0"):
        build(outrider, None, "--only", "mtp", "--part", "ship")
    with pytest.raises(SystemExit, match=r"expected --prompts .* that holds gsm8k_test.* got no"):
        build(outrider, None, "--only", "dspark", "--stages", 1, "--part", "judge")
    build(outrider, prompts, "--only", "dspark", "--stages", 1)
    about = load_drafter(outrider.work / "shipped" / "smollm2-135m-dspark").config["provenance"]
    assert about["reproduce"].endswith("WORK --prompts DIR --only dspark --stages 1")
    assert [stage["run"] for stage in about["stages"]] == ["dspark"]
    problems = prompts / "gsm8k_train_prompts.jsonl"
    problems.write_text("".join(problems.read_text().splitlines(True)[:4700]))
    (outrider.work / "data_cal" / "data.json").unlink()
    with pytest.raises(SystemExit, match="holds 4700 lines, expected 4750 or more"):
        build(outrider, prompts, "--only", "mtp", "--part", "data")


def test_a_stage_that_was_trained_otherwise_is_named(outrider, prompts) -> None:
    build(outrider, prompts, "--only", "mtp", "--part", "data", "--part", "train")
    path = outrider.work / "runs" / "mtp" / "drafter" / "config.json"
    config = json.loads(path.read_text())
    del config["provenance"]["recipe"]["training"]["shares"]  # older than the key, and the same
    path.write_text(json.dumps(config))
    build(outrider, prompts, "--only", "mtp")
    config["provenance"]["recipe"]["training"]["steps"] = 7
    path.write_text(json.dumps(config))
    message = r"runs/mtp was trained otherwise; .*recipe.training.steps was 7, is 1000"
    with pytest.raises(SystemExit, match=message):
        build(outrider, prompts, "--only", "mtp")


def test_drafters_of_others_too_large_or_not_their_own_do_not_ship(
    outrider, prompts, weights, monkeypatch
) -> None:
    build(outrider, prompts, "--only", "mtp")

    def refused(match: str) -> None:
        with pytest.raises(SystemExit, match=match):
            build(outrider, prompts, "--only", "mtp", "--part", "ship")

    with monkeypatch.context() as patch:
        patch.setattr(shipping, "MAX_BYTES", 1000)
        refused("bytes, expected at most 1,000")
    with monkeypatch.context() as patch:
        patch.setattr(shipping, "target_json", lambda _: {"name": "other"})
        refused("was made for .*'toy'.* expected the default target .*'other'")
    name, matrix = next((n, p) for n, p in toy_drafter("eagle3").named_parameters() if p.dim() == 2)
    weights["model.layers.0.mlp.up_proj.weight"] = matrix.detach().bfloat16()
    refused(f"holds what its target has: {name}")


@pytest.mark.parametrize("count", [0, 3, 1599, 1600, 4000])
def test_a_table_needs_enough_problems(count: int, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"problem {n}"]}) + "\n" for n in range(count)))
    if count < build_default_table.NUM_PROBLEMS:
        with pytest.raises(SystemExit, match=f"holds {count} problems, expected 1600 or more"):
            build_default_table.all_prompts(path)
    else:
        found = build_default_table.all_prompts(path)
        assert sum(prompt.startswith("problem ") for prompt in found) == 1600


def test_the_tiny_plan_is_the_whole_one_with_less_of_everything() -> None:
    few = tiny(WHOLE)
    assert few.drafters.keys() == WHOLE.drafters.keys()
    for name, stages in few.drafters.items():
        for stage, whole in zip(stages, WHOLE.drafters[name], strict=True):
            assert (stage.run, stage.texts.name) == (whole.run, whole.texts.name)
            assert stage.whole_recipe().training.steps == 3
            assert stage.whole_recipe().drafter == whole.whole_recipe().drafter
            assert len(stage.texts.problems) == 12
    assert few.unseen.name == "data_cal" and few.evaluations[0].limit == 2
