"""What the command line shows while it loads, how it wraps, and what it refuses early."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli import FakeLLM, fake, run  # noqa: F401 - a fixture is used by its name
from typer.testing import CliRunner

from outrider.cli import progress
from outrider.cli.main import _unwrapped, app
from outrider.cli.options import (
    ModelOptions,
    SamplingOptions,
    parse_speculative_config,
    text_or_file,
)
from outrider.drafting.build import split_rule
from outrider.errors import ConfigError


def start(monkeypatch: pytest.MonkeyPatch, seconds: float, quiet: bool) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.05)
    with progress.start_up(quiet):
        time.sleep(seconds)
        logging.getLogger("outrider").info("converting, once")
        logging.getLogger("outrider").warning("slow")


@pytest.mark.parametrize(
    ("seconds", "quiet", "expected"),
    [
        (0.0, False, ["outrider: converting, once", "outrider: slow"]),
        (0.3, False, [progress.HINT, "outrider: converting, once", "outrider: slow"]),
        (0.3, True, ["outrider: slow"]),
    ],
)
def test_a_start_speaks_when_it_is_slow_or_the_first(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    quiet: bool,
    expected: list[str],
) -> None:
    start(monkeypatch, seconds, quiet)
    assert capsys.readouterr().err.splitlines() == expected


@pytest.mark.parametrize("given", ["-q", None])
def test_quiet_reaches_the_loading(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    heard = []

    def load(self: ModelOptions, quiet: bool = False) -> FakeLLM:
        heard.append(quiet)
        return FakeLLM()

    monkeypatch.setattr(ModelOptions, "load", load)
    run("generate", "Hi", *([given] if given else []))
    assert heard == [given is not None]


def test_help_leaves_the_ends_of_lines_to_the_terminal() -> None:
    assert _unwrapped("a\nb\n\nc\n  d") == "a b\n\nc d"
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    lines = [line.strip() for line in result.output.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("outrider drafts"))
    assert len(lines[start]) > 60 and len(lines[start + 1]) > 60


def test_the_introduction_of_the_demo_is_one_paragraph(
    fake: FakeLLM,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("demo", "--only", "copy text", "--rounds", "1").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Each prompt"))
    assert all(60 < len(line.rstrip()) <= 80 for line in lines[start : start + 2])


def test_several_answers_have_numbers(fake: FakeLLM) -> None:  # noqa: F811
    result = run("generate", "Hi", "-n", "2")
    assert "[1/2]" in result.stderr and "[2/2]" in result.stderr
    assert result.stdout == "Hello big world!\n" * 2
    assert run("generate", "Hi", "-n", "2", "-q").stderr == ""


@pytest.mark.parametrize("command", ["generate", "compare", "chat"])
def test_logprobs_that_nobody_would_see_are_refused(command: str) -> None:
    arguments = [command, *(["Hi"] if command != "chat" else []), "--logprobs", "2"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "generate --json" in str(result.exception)
    assert SamplingOptions(logprobs=2).params(shows_logprobs=True).logprobs == 2


@pytest.mark.parametrize("value", ["0", "-1", "99999"])
def test_threads_are_checked_before_anything_is_loaded(value: str) -> None:
    result = CliRunner().invoke(app, ["generate", "Hi", "--num-threads", value])
    assert isinstance(result.exception, ConfigError)
    assert "--num-threads must be" in str(result.exception)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("@", "--speculative-config needs the name of a file after '@'"),
        ("word", """got 'word'; did you mean '{"method": "word"}'"""),
        ("my.module:Class", """did you mean '{"method": "my.module:Class"}'"""),
        ("", "must hold auto, none, @FILE, a JSON object or a list of objects, got ''"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_speculative_config(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_speculative_config(value)
    assert message in str(caught.value)


def test_a_file_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="--prediction needs the name of a file"):
        text_or_file("@", "--prediction")


def test_a_file_may_hold_any_config(tmp_path: Path) -> None:
    for text, expected in (("none\n", None), ("[]", None), ("auto", "auto"), ("{}", {})):
        (tmp_path / "config").write_text(text)
        assert parse_speculative_config(f"@{tmp_path}/config") == expected


def test_nothing_but_a_rule_means_the_default_sources() -> None:
    rule: Any = {"rejection_sample_method": "block"}
    assert split_rule(rule) == split_rule([rule]) == ("auto", "block")
    assert split_rule([]) == ([], "invariant")
