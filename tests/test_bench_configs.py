"""Several speculative configs in one bench: names, turns, what is said of each, what is refused."""

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from bench_cases import toy_llm, toy_workload
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench import run
from outrider.bench.configs import parse_configs
from outrider.bench.drive import Pass, drive
from outrider.bench.intervals import per_step_interval
from outrider.bench.lossless import Tally, Verdict
from outrider.bench.plots import can_plot, figure
from outrider.bench.provenance import provenance
from outrider.bench.report import write_report
from outrider.bench.run import measure
from outrider.bench.sections import acceptance, headline, sections
from outrider.bench.speed_only import ForcedSource
from outrider.bench.study import Settings, Study, bench_model
from outrider.bench.workload import encoded
from outrider.cli import bench as command
from outrider.cli.comparison import twin
from outrider.cli.main import app
from outrider.engine.times import StepTimes
from outrider.errors import ConfigError

pytestmark = pytest.mark.slow

LONG, SHORT = {"method": "lookup"}, {"method": "lookup", "num_speculative_tokens": 1}
TEXTS = ("the the the the", "abc", "the", "xyz xyz xyz")


def several(configs: dict[str, Any] | None = None, **changes: Any) -> Study:
    settings = Settings(batches=(1, 2), rounds=2, max_tokens=40, **changes)
    configs = configs or {"long": LONG, "short": SHORT}
    study = bench_model(toy_llm(), configs, toy_workload(*TEXTS), settings)
    study.provenance = provenance(2)
    return study


def test_configs_have_the_names_they_are_given_or_those_of_their_methods(tmp_path: Path) -> None:
    file = tmp_path / "a=b.json"
    file.write_text('{"method": "ngram", "prompt_lookup_max": 3}')
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text('{"drafter": {"algorithm": "medusa"}}')
    found = parse_configs(
        [
            "auto",
            '[{"method": "lookup"}, {"method": "table", "path": "a=b"}]',
            f"@{file}",
            f" my file =@{file}",
            'mine={"method": "lookup"}',
            json.dumps({"model": str(drafter)}),
            '{"model": "/models/small"}',
            '{"method": "fakes:ReplaySource"}',
        ]
    )
    assert list(found) == [
        *("auto", "lookup+table", "ngram", "my file", "mine", "medusa", "small", "ReplaySource")
    ]
    assert found["my file"] == found["ngram"] == {"method": "ngram", "prompt_lookup_max": 3}
    assert found["lookup+table"][1]["path"] == "a=b"
    assert list(parse_configs(['{"rejection_sample_method": "block"}'])) == ["auto"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a=auto", "a=" + json.dumps(LONG)], "got 'a' twice: give names as NAME=CONFIG"),
        ([json.dumps(LONG), json.dumps(SHORT)], "got 'lookup' twice"),
        (["a="], "'a=' has no config behind its name"),
        (["=auto"], "must be 1 to 40 printable characters"),
        (["plain=auto"], "and not 'plain', got 'plain'"),
        (["a,b=auto"], "without a comma, and not 'plain', got 'a,b'"),
        (["x" * 41 + "=auto"], "must be 1 to 40 printable characters"),
        (["a\x07=auto"], "must be 1 to 40 printable characters"),
        (["a=none"], "speculative config 'a': bench needs drafts"),
        (["auto", "none"], "bench needs drafts"),
        (["a={"], "speculative config 'a': --speculative-config is not valid JSON"),
        (["a=@/nowhere.json"], "speculative config 'a': cannot read /nowhere.json"),
        (["a=b=auto"], "speculative config 'a': --speculative-config must hold auto"),
        (["good=auto", 'bad={"method": "lookups"}'], "speculative config 'bad': unknown method"),
        (['{"method": "lookups"}'], "lookups\"}': unknown method"),
    ],
)
def test_what_is_no_config_is_refused_before_the_model_is_loaded(
    values: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(options: Any) -> LLM:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(command.ModelOptions, "load", loaded)
    monkeypatch.setattr(command, "_pin", lambda model: None)
    given = [part for value in values for part in ("--speculative-config", value)]
    error = CliRunner().invoke(app, ["bench", "--report", "none", *given]).exception
    assert isinstance(error, ConfigError) and message in str(error)


def test_a_config_that_cannot_be_built_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(*_: Any) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("outrider.bench.study.forward_cost", measured)
    configs = {"good": LONG, "other": {"method": "table"}}
    with pytest.raises(ConfigError, match="speculative config 'other': no draft table for"):
        several(configs)


def test_all_sides_take_turns_and_end_with_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toy_llm()
    order: list[str] = []
    made: list[weakref.ref[Any]] = []

    def make(name: str) -> Any:
        def made_for(batch: int) -> LLM:
            alive = [ref for ref in made if ref() is not None]
            assert len(alive) < 3, "engines of the round before are still there"
            llm = twin(plain, None if name == "p" else LONG, max_num_seqs=batch)
            names[id(llm)] = name
            made.append(weakref.ref(llm.engine))
            return llm

        return made_for

    def noted(llm: LLM, prompts: Any, *rest: Any) -> Pass:
        order.append(names[id(llm)] if prompts[0][0] >= 0 else "w")
        return drive(llm, prompts, *rest)

    names: dict[int, str] = {}
    monkeypatch.setattr(run, "drive", noted)
    gc.disable()  # or chance decides what the assertion sees
    try:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        prompts = [(0, [3, 4]), (1, [5])]
        found = measure([make(name) for name in "pab"], prompts, params, 1, 2)
    finally:
        gc.enable()
    assert "".join(order) == "wpwawb" + "bap" + "wbwawp" + "pab"
    assert [len(side) for side in found.sides] == [2, 2, 2]


def test_every_config_is_measured_against_the_same_plain_decoding() -> None:
    llm, prompts = toy_llm(), encoded(toy_llm(), toy_workload(*TEXTS), 40)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    known = {answer.index: answer.token_ids for answer in drive(llm, prompts, params, 1).answers}
    sources = {"long": ForcedSource(known, 1.0, 4, 0), "short": ForcedSource(known, 1.0, 1, 0)}
    study = several(sources, ignore_eos=True)
    study.configs = {"long": LONG, "short": SHORT}  # a source that is an object is no JSON
    found = json.loads(json.dumps(study.as_json()))
    assert found["format"] == 2 and found["configs"] == {"long": LONG, "short": SHORT}
    assert "speculative_config" not in found
    every = found["measurements"]
    assert [(one["batch"], one["config"]) for one in every] == [
        *((1, "long"), (1, "short"), (2, "long"), (2, "short"))
    ]
    for long, short in (every[:2], every[2:]):
        assert long["plain"] == short["plain"] and long["speculative"] != short["speculative"]
        assert [each["plain"] for each in long["rounds"]] == [
            each["plain"] for each in short["rounds"]
        ]
        assert len(short["sources"][0]["drafted_per_position"]) == 1
        assert len(long["sources"][0]["drafted_per_position"]) > 1
        # 39 tokens behind the first one, in steps of five and of two
        assert long["acceptance_length"] == pytest.approx(39 / 8)
        assert short["acceptance_length"] == pytest.approx(39 / 20)
    for one in every:
        requests = [r for each in one["rounds"] for r in each["speculative"]["requests"]]
        for kind in one["kinds"]:
            mine = [r["decoding"] for r in requests if r["category"] == kind["category"]]
            length = sum(d["num_tokens"] for d in mine) / sum(d["num_forwards"] for d in mine)
            assert kind["acceptance_length"] == pytest.approx(length)
            low, high = kind["acceptance_interval"]
            assert low <= length <= high
        phases = [each["speculative"]["phase_seconds"] for each in one["rounds"]]
        shares = [each["draft"] / sum(each.values()) for each in phases]
        assert one["speculative"]["draft_share"] == pytest.approx(sum(shares) / 2)
    # 4 prompts, 2 rounds, 2 batch sizes; the first plain answers are what the others are held to
    sides = found["lossless"]["sides"]
    same = {name: side["num_same"] for name, side in sides.items()}
    assert same == {"plain": 12, "long": 16, "short": 16}
    assert found["lossless"]["num_answers"] == found["lossless"]["num_same"] == 44


def test_one_config_is_shown_and_stored_as_the_speculative_side() -> None:
    study = several({"mine": LONG})
    found = study.as_json()
    assert found["speculative_config"] == LONG and found["configs"] == {"mine": LONG}
    assert list(found["lossless"]["sides"]) == ["plain", "speculative"]
    assert [one["config"] for one in found["measurements"]] == ["mine", "mine"]
    text = json.dumps([(part.title, part.words, part.details) for part in sections(study)])
    rows = [row[0] for part in sections(study) if part.table for row in part.table.rows]
    assert "mine" not in text and not any("mine" in name for name in rows)
    assert "batch 1, speculative" in rows and "batch 1" in rows and "drafts" in rows


def test_several_configs_are_told_apart_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.report.can_plot", lambda: False)
    study = several(contexts=())
    assert re.search(r"long [\d.]+× at batch 1, [\d.]+× at batch 2; short ", headline(study))
    write_report(study, tmp_path / "r.md")
    text = (tmp_path / "r.md").read_text()
    for row in ("batch 1, plain", "batch 2, short", "even, long", "odd, short", "drafts of long"):
        assert text.count(f"| {row} |") >= 1, row
    assert text.count("| batch 1, plain |") == 1
    assert "- long: 16 of 16 answers" in text and "lookup, batch 1, short" in text
    kind = study.measurements[0].kinds[0]
    assert f"| {acceptance(kind)} |" in text


@pytest.mark.slow
@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_plots_have_a_bar_for_every_side() -> None:
    study = several()
    for name in ("speedups", "kinds"):
        drawn = figure(name, study)
        assert all(f">{side}<" in drawn for side in ("plain", "long", "short")), name
    assert ">batch 2, short<" in figure("phases", study)
    assert ">lookup, long<" in figure("positions", study)


def test_the_command_takes_several_configs_and_workloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.ModelOptions, "load", lambda options: toy_llm())
    monkeypatch.setattr(command, "_pin", lambda model: None)
    arguments = ["bench", "--batch", "1", "--rounds", "1", "--max-tokens", "6", "--report", "none"]
    arguments += ["-o", str(tmp_path / "out")]
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"the {name}"}))
        arguments += ["-w", str(tmp_path / f"{name}.jsonl")]
    (tmp_path / "c.json").write_text(json.dumps(SHORT))
    arguments += ["--speculative-config", json.dumps(LONG)]
    arguments += ["--speculative-config", f"one at a time=@{tmp_path}/c.json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["configs"] == {"lookup": LONG, "one at a time": SHORT}
    assert [kind["category"] for kind in found["measurements"][1]["kinds"]] == ["first", "second"]
    told = " ".join(result.stdout.split())
    assert "plain 0 of 0, lookup 2 of 2, one at a time 2 of 2" in told
    assert "second, one at a time" in told


def test_whole_rounds_of_several_configs_are_counted_once() -> None:
    study = several()
    study.stopped = KeyboardInterrupt()
    assert study.incomplete == "INCOMPLETE (interrupted): 4 of 4 rounds were measured."


def test_the_verdict_says_whose_text_differs() -> None:
    llm, verdict = toy_llm(), Verdict()

    def part(*token_ids: int) -> Pass:
        answer: Any = type("Answer", (), {"index": 0, "token_ids": list(token_ids)})()
        return Pass([answer], 1.0, StepTimes())

    verdict.compare(llm, "plain", 1, [part(3, 4)])
    verdict.compare(llm, "good", 1, [part(3, 4)])
    verdict.compare(llm, "bad", 1, [part(3, 5), part(3, 4)])
    assert verdict.sides == {"plain": Tally(), "good": Tally(1, 1), "bad": Tally(2, 1)}
    assert [one["side"] for one in verdict.differences] == ["bad"]


def test_intervals_are_of_prompts() -> None:
    # two prompts, drawn twice: 1, 2 or 3 tokens a step with chances of 1/4, 1/2, 1/4
    assert per_step_interval([10, 30], [10, 10]) == (1.0, 3.0)
    assert per_step_interval([12], [8]) == (1.5, 1.5)
    assert per_step_interval([10, 30, 0], [10, 10, 0]) == (1.0, 3.0)
    assert per_step_interval([0, 0], [0, 0]) == (0.0, 0.0)
    # of many prompts the ends are those of the normal law: ±1.96 · 1 / √400 around 2
    low, high = per_step_interval([10, 30] * 200, [10] * 400)
    assert low == pytest.approx(2 - 0.098, abs=0.01) and high == pytest.approx(2 + 0.098, abs=0.01)
