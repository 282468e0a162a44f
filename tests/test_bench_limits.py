"""The bench and what goes wrong: refused before measuring, or kept when it comes later."""

import hashlib
import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from bench_cases import toy_llm, toy_workload
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM
from outrider.bench import plots, run
from outrider.bench.plots import can_plot, svg, why_no_plots
from outrider.bench.provenance import provenance, write_whole
from outrider.bench.report import as_html, json_text
from outrider.bench.sections import Section, Table, plain_text, sections
from outrider.bench.speed_only import random_prompts
from outrider.bench.study import Settings, Study, bench_model
from outrider.bench.terminal import show, show_table
from outrider.bench.workload import read_workload
from outrider.cli import bench as command
from outrider.cli.bench_options import MOST_REQUESTS, ReportOptions
from outrider.cli.main import app
from outrider.errors import ConfigError, PromptError

pytestmark = pytest.mark.slow

drawn = pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried, no model may be loaded."""

    def loaded(*_: Any, **__: Any) -> LLM:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(command.ModelOptions, "load", loaded)
    monkeypatch.setattr("outrider.bench.speed_only.random_target", loaded)
    monkeypatch.setattr(command, "_pin", lambda model: None)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is the toy."""
    monkeypatch.setattr(command.ModelOptions, "load", lambda options: toy_llm())
    monkeypatch.setattr(command, "_pin", lambda model: None)


def bench(tmp_path: Path, *arguments: str, stdin: str | None = None) -> Any:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "the the the", "category": "x"}\n{"prompt": "abc"}\n' * 2)
    where = [] if stdin else ["-w", str(workload)]
    options = ["--batch", "1", "--rounds", "3", "--max-tokens", "6", "--report", "none"]
    options += ["-o", str(tmp_path / "out"), *where, *arguments]
    return CliRunner().invoke(app, ["bench", *options], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,1"], "--batch must have every number once, got '1,1'"),
        (["--batch", "1000"], f"--batch must be numbers of at most {MOST_REQUESTS}, got '1000'"),
        (["--context-lengths", "9,8,9"], "--context-lengths must have every number once"),
        (["--temperature", "nan"], "temperature must be a finite number, got nan"),
        (["--max-num-seqs", "3"], "--max-num-seqs does not go with bench: expected --batch"),
        (["--acceptance", "0.5"], "--acceptance does not go without --speed-only"),
        (["--draft-tokens", "3"], "--draft-tokens does not go without --speed-only"),
        (
            ["--max-model-len", "1024", "--max-tokens", "8", "--context-lengths", "512,1020"],
            "--context-lengths 1020 and --max-tokens 8 together must leave room in the context: "
            "it has 1024 tokens, and 1028 would be needed",
        ),
        (["--max-model-len", "64", "--max-tokens", "64"], "--max-tokens 64 must leave room"),
        (["--limit", "1", "peers"], "--limit belongs to `bench`, not to `bench peers`"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_options_that_make_no_sense_together(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, ConfigError | PromptError | ValueError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    "option",
    [
        "--workload w",
        "--context-lengths 9",
        "--model m",
        "--speculative-config none",
        "--category c",
        "--limit 1",
        "--tokenizer t",
        "--max-model-len 9",
        "--kv-cache-tokens 9",
        "--no-deterministic",
        "--device cpu",
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_random_weights_take_nothing_of_a_real_model(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--speed-only", "135m", *option.split()])
    name = option.split()[0].replace("--no-", "--")
    assert f"{name} does not go with --speed-only" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "1.5"], "--acceptance must be numbers of at most 1.0, got '1.5'"),
        (["--acceptance", "nan"], "--acceptance must be positive numbers, got 'nan'"),
        (["--acceptance", "-1"], "--acceptance must be positive numbers, got '-1'"),
        (["--acceptance", "0.5,0.50"], "--acceptance must have every number once"),
        (["--input-tokens", "4096"], "--input-tokens 4096 and --max-tokens 128 together"),
        (["--max-tokens", "1000000000"], "--max-tokens 1000000000 together must leave room"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_random_weights_are_made_for_what_can_be_measured(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    options = ["--speed-only", "135m", "-o", str(tmp_path / "o"), "--report", "none", *arguments]
    assert message in str(CliRunner().invoke(app, ["bench", *options]).exception)


def test_a_seed_below_zero_is_a_seed() -> None:
    assert random_prompts(90, 1, 5, -1) == random_prompts(90, 1, 5, 2**64 - 1)
    assert random_prompts(90, 1, 5, -1) != random_prompts(90, 1, 5, 1)


def test_lengths_are_held_against_the_context_of_the_model() -> None:
    settings = Settings(batches=(1,), rounds=1, max_tokens=8, contexts=(505,))
    with pytest.raises(PromptError, match="--context-lengths 505 and --max-tokens 8 together"):
        bench_model(toy_llm(), {"auto": "auto"}, toy_workload("a"), settings)
    with pytest.raises(PromptError, match="--max-tokens 512 must leave room"):
        bench_model(toy_llm(), {"auto": "auto"}, toy_workload("a"), Settings(max_tokens=512))


@pytest.mark.parametrize(
    ("output", "report", "message"),
    [
        ("", "html", "must name the files"),
        (".", "none", "must name the files"),
        ("..", "none", "must name the files"),
        ("there", "none", "must name the files"),
        ("blocked", "none", "blocked.json: it is a directory"),
        ("x.csv", "html", "or end in .json or .html"),
        ("x.html", "markdown", "or end in .json or .md"),
        ("x.md", "none", "or end in .json for"),
        ("file/x", "none", "file is no directory"),
        ("file/deep/x", "none", "file is no directory"),
        ("n" * 300, "none", "File name too long"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(
    output: str, report: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "blocked.json").mkdir()
    with pytest.raises(ConfigError, match=message):
        ReportOptions(Path(output), report).check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked.json", "file", "there"]


def test_names_of_outputs(tmp_path: Path) -> None:
    for given, name in (("a.json", "a"), ("SmolLM2-0.6B", "SmolLM2-0.6B"), ("deep/b", "b")):
        options = ReportOptions(tmp_path / given, "none")
        options.check()
        assert options.files == [options.output.with_name(f"{name}.json")]
        assert not list(options.output.parent.glob(".*"))


@pytest.mark.usefixtures("toy")
def test_a_full_disk_leaves_the_results_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise ConfigError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("outrider.bench.provenance.write_whole", full)
    result = bench(tmp_path)
    assert "batch 1" in result.stdout and "2 repeated prompts left out" in result.stdout
    assert "No space left on device; the results are shown above" in str(result.exception)


def stop_at(count: int, stop: BaseException) -> Callable[..., Any]:
    """`drive` that is stopped at its call of this number."""
    calls: list[int] = []
    drive = run.drive

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            raise stop
        return drive(*arguments)

    return counted


# Two warm-ups and two prompts on two sides: six calls a round.
@pytest.mark.parametrize(
    ("stop", "code", "why"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, "interrupted"),
        (MemoryError("no room"), 1, "MemoryError: no room"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_whole_rounds_outlive_what_ends_a_bench(
    stop: BaseException, code: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "drive", stop_at(16, stop))
    result = bench(tmp_path)
    assert result.exit_code == code
    assert f"INCOMPLETE ({why}): 2 of 3 rounds were measured." in " ".join(result.stdout.split())
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["complete"] is False and why in found["incomplete"]
    assert len(found["measurements"][0]["rounds"]) == 2


@pytest.mark.usefixtures("toy")
def test_less_than_a_round_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "drive", stop_at(5, KeyboardInterrupt()))
    result = bench(tmp_path)
    assert result.exit_code == 130 and not (tmp_path / "out.json").exists()
    assert "interrupted: nothing was measured" in result.stderr


def test_a_pipe_is_read_once_and_hashed(tmp_path: Path) -> None:
    data = b'{"prompt": "one"}\n'
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    try:
        workload = read_workload([Path(f"/dev/fd/{reading}")])
    finally:
        os.close(reading)
    assert [prompt.category for prompt in workload.prompts] == ["workload"]
    digest = hashlib.sha256(data).hexdigest()
    assert workload.origin == [{"file": "a pipe", "sha256": digest}]


def test_a_name_beyond_measure_is_a_sentence() -> None:
    with pytest.raises(PromptError, match=r"cannot read n+: File name too long"):
        read_workload([Path("n" * 300)])


@pytest.mark.usefixtures("toy")
def test_standard_input_is_a_workload(tmp_path: Path) -> None:
    result = bench(tmp_path, "-w", "-", stdin='{"prompt": "abc"}\n')
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())["workload"]
    assert found["categories"] == {"workload": 1}
    assert found["origin"][0]["file"] == "standard input"
    bad = bench(tmp_path, "-w", "-", stdin="{\n")
    assert "standard input:1: not valid JSON" in str(bad.exception)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"prompt": ""}', "a prompt is empty"),
        (r'{"turns": ["a", " "]}', "a prompt is empty"),
        (r'{"prompt": "\ud800"}', "a prompt is not valid Unicode text"),
        (r'{"prompt": 5}', "'prompt' must be text, got 5"),
        (r'{"prompt": "a", "turns": ["b"]}', "expected one of 'prompt', 'turns' and 'messages'"),
        (r'{"messages": [], "prompt": "a"}', "expected one of 'prompt', 'turns' and"),
        (r'{"turns": "a"}', "'turns' must be a list of texts, at least one, got 'a'"),
        (r'{"turns": [1]}', "'turns' must be a list of texts, at least one, got [1]"),
        (r'{"messages": []}', "'messages' must be a list of objects, at least one, got []"),
        (r'{"messages": [{"role": "boss", "content": "a"}]}', "a role must be one of system,"),
        (r'{"prompt": "a", "category": null}', "'category' must be printable text, got None"),
        (r'{"prompt": "a", "category": ["b"]}', "'category' must be printable text, got ['b']"),
        (r'{"prompt": "a", "category": "\ud800"}', "'category' must be printable text"),
        (r'{"prompt": "a", "category": "b\u0000"}', "'category' must be printable text"),
        ("\xff", "expected UTF-8, got the byte 0xff"),
    ],
)
def test_every_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode("latin-1"))
    with pytest.raises(PromptError) as caught:
        read_workload([path])
    assert f"{path}:3: {message}" in str(caught.value)


def small_study(rounds: int = 2) -> Study:
    settings = Settings(batches=(1, 2), rounds=rounds, max_tokens=40)
    study = bench_model(
        toy_llm(), {"auto": "auto"}, toy_workload("the the the", "abc", "the"), settings
    )
    study.provenance = provenance(2)
    return study


def test_every_figure_can_be_computed_from_the_file() -> None:
    found = json.loads(json_text(small_study()))
    answers = {one["prompt"]: one["token_ids"] for one in found["answers"]}
    for one in found["measurements"]:
        assert len(one["rounds"]) == 2
        sides: dict[str, list[Any]] = {
            name: [each[name] for each in one["rounds"]] for name in ("plain", "speculative")
        }
        for name, rounds in sides.items():
            speeds = [sum(r["num_tokens"] for r in e["requests"]) / e["seconds"] for e in rounds]
            assert one[name]["tokens_per_second"]["values"] == pytest.approx(speeds)
            phases = [1e3 * each["phase_seconds"]["verify"] / each["num_steps"] for each in rounds]
            assert one[name]["milliseconds_per_step"]["verify"] == pytest.approx(median(phases))
            for request in (request for each in rounds for request in each["requests"]):
                parts = request["decoding"], request["loop"]
                decoded = sum(part["num_tokens"] for part in parts)
                assert request["num_first_tokens"] + decoded == request["num_tokens"]
                assert request["num_tokens"] == len(answers[request["prompt"]])
        requests = [request for each in sides["speculative"] for request in each["requests"]]
        tokens = sum(request["decoding"]["num_tokens"] for request in requests)
        forwards = sum(request["decoding"]["num_forwards"] for request in requests)
        assert one["acceptance_length"] == pytest.approx(tokens / forwards)
        drafted = {source["name"]: source["num_draft_tokens"] for source in one["sources"]}
        counted: dict[str, int] = {}
        for request in requests:
            for name, source in request["sources"].items():
                counted[name] = counted.get(name, 0) + source["num_draft_tokens"]
        assert drafted == counted and sum(counted.values()) > 0


def test_lists_of_numbers_are_on_one_line() -> None:
    study = small_study(1)
    study.label = "[\n1,\n 2]"
    assert json.loads(json_text(study)) == json.loads(json.dumps(study.as_json()))
    assert len(json_text(study).splitlines()) < 1500


@pytest.mark.slow
def test_one_round_has_no_median_and_few_drafts_no_share() -> None:
    study = small_study(1)
    source = study.measurements[0].sources[0]
    source.drafted_per_position, source.accepted_per_position = [40, 19, 0], [20, 19, 0]
    parts = {part.title: part for part in sections(study)}
    assert "Figures of one round." in parts["How much faster"].words
    drafted = parts["What was drafted"].table
    assert drafted is not None and drafted.rows[0][3:6] == ["50%", "(100%)", "–"]
    study = small_study(2)
    assert "Medians over 2 rounds with the lowest and highest" in sections(study)[0].words


def test_half_characters_are_written_as_escapes(tmp_path: Path) -> None:
    text = json.dumps({"command": "a\udcff"}, ensure_ascii=False)
    write_whole(tmp_path / "a.json", text)
    assert json.loads((tmp_path / "a.json").read_text()) == {"command": "a\udcff"}


@drawn
@pytest.mark.slow
def test_names_are_drawn_as_they_are() -> None:
    def draw(axes: Any) -> None:
        axes.barh([0, 1], [1, 2])
        axes.set_yticks([0, 1], ["a $x_{ b$", "c\x00\\frac<&"])

    text = svg(draw, 3, 2)
    assert "a $x_{ b$" in text and "c?\\frac&lt;&amp;" in text


def test_a_plot_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise ValueError("no ink")

    monkeypatch.setattr("outrider.bench.report.can_plot", lambda: True)
    part = Section("Speed", "words\x01", Table(["a"], [["1"]]), "speed")
    page = as_html("t", "about", "", "headline", [part], fail)
    assert "could not be drawn (ValueError: no ink)" in page and "<td>1</td>" in page
    assert "words?" in page


def test_a_matplotlib_that_is_broken_is_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("wrong numpy")

    fake = SimpleNamespace(import_module=broken, util=SimpleNamespace(find_spec=lambda _: 1))
    monkeypatch.setattr(plots, "importlib", fake)
    assert why_no_plots.__wrapped__() == (
        "matplotlib cannot be imported (RuntimeError: wrong numpy)"
    )


def test_markdown_shows_names_as_they_are() -> None:
    assert plain_text(Table([""], [["a|b <i>"]]))[-1] == r"| a\|b \<i> |"


def shown(width: int, print_on: Callable[[Console], None]) -> str:
    file = StringIO()
    print_on(Console(file=file, width=width))
    return file.getvalue()


def test_the_terminal_cuts_no_figure() -> None:
    study = small_study()
    study.workload["notes"].append("only 3 of 9 prompts are of at most 5 tokens")
    study.provenance["load_average"] = [3.0, 1.0, 1.0]
    wide = shown(80, lambda console: show(console, study))
    assert "speed-up" in wide and "only 3 of 9" in wide and "the machine was busy" in wide
    table = Table(["", "plain tok/s", "kept"], [["batch 1", "123456", "100%"]])
    assert "123456  100%" in shown(80, lambda console: show_table(console, table))
    assert shown(16, lambda console: show_table(console, table)).split("\n")[1:] == [
        "batch 1",
        "  plain tok/s: ",
        "123456",
        "  kept: 100%",
        "",
    ]


def test_a_reader_who_has_enough_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, command._while_read(stream):
        stream.write("x" * 100_000)
    with pytest.raises(SystemExit, match="143"), command._while_read(StringIO()):
        raise SystemExit(143)
