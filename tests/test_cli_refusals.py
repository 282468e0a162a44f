"""What the command line refuses before it works, and what it says when it is interrupted."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_cli import FakeLLM, fake  # noqa: F401 - a fixture is used by its name
from typer.testing import CliRunner

from outrider.cli.bench_options import MOST_REQUESTS
from outrider.cli.interrupts import already_told
from outrider.cli.main import app, main
from outrider.cli.options import ModelOptions, SamplingOptions, parse_speculative_config
from outrider.cli.prompts import read_jsonl
from outrider.errors import ConfigError, PromptError, SamplingError
from outrider.policy.rule_document import read_json
from outrider.target.load import DTYPES

LONG = "9" * 5000  # more digits than Python reads as an integer


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded is a fault: what is refused is to be refused sooner."""

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(ModelOptions, "load", load)


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[Any, str]:
    """The exit code of the whole program, and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err


# ---- JSON


@pytest.mark.parametrize(
    "options",
    [
        ("--speculative-config", f'{{"method": "lookup", "num_speculative_tokens": {LONG}}}'),
        ("--speculative-config", f"[{LONG}]"),
        ("--logit-bias", f'{{"1": {LONG}}}'),
        ("--logit-bias", f'{{"1": -{LONG}}}'),
        ("--logit-bias", f'{{"{LONG}": 1}}'),
    ],
)
@pytest.mark.usefixtures("fake")
def test_an_integer_without_end_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, str]
) -> None:
    code, said = ended(monkeypatch, capsys, "compare", "Hi", *options)
    assert code == 2 and said.startswith(f"outrider: {options[0]}") and said.count("\n") == 1
    assert "set_int_max_str_digits" not in said and len(said) < 300


def test_an_integer_without_end_in_a_prompt_file_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": {LONG}}}\n')
    with pytest.raises(PromptError, match=r":2: holds an integer of more than \d+ digits$"):
        read_jsonl(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"b": 1, "a": {"a": 1}, "c": 2, "a": 3}', '[{"a": 1, "a": 2}]']
)
def test_a_key_that_is_given_twice_is_named_wherever_json_is_read(
    text: str, tmp_path: Path
) -> None:
    told = "holds the key 'a' twice in one object"
    (tmp_path / "given").write_text(text)
    for value in (text, f"@{tmp_path}/given"):
        with pytest.raises(ConfigError, match=told):
            parse_speculative_config(value)
    with pytest.raises(ConfigError, match=f"--logit-bias {told}"):
        SamplingOptions(logit_bias=text).params()
    with pytest.raises(PromptError, match=f"given:1: {told}"):
        read_jsonl(tmp_path / "given")
    with pytest.raises(ConfigError, match=f"the policy {told}"):
        read_json(text)


def test_objects_beside_each_other_may_have_the_same_keys() -> None:
    given = [{"method": "lookup"}, {"method": "forced"}]
    assert parse_speculative_config(json.dumps(given)) == given


@pytest.mark.parametrize("again", ["01", "001"])
def test_a_token_id_that_is_given_twice_in_other_words_is_refused(again: str) -> None:
    with pytest.raises(SamplingError, match="--logit-bias holds token id 1 twice"):
        SamplingOptions(logit_bias=json.dumps({"1": 2, again: 3})).params()


def test_what_is_no_token_id_is_shown() -> None:
    for key in ("one", "1_0", "٣", "-1", " 1", ""):
        told = f"--logit-bias has the key {key!r}, expected token ids"
        with pytest.raises(SamplingError, match=told):
            SamplingOptions(logit_bias=json.dumps({key: 2})).params()


# ---- names


def test_a_tokenizer_that_is_missing_is_told_from_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in (["generate", "Hi"], ["train", "data", "--self-prompts", "1", "-o", "x"]):
        for name in ("./nope", "nope.gguf", ""):
            result = CliRunner().invoke(app, [*command, "--tokenizer", name])
            assert result.exit_code and str(result.exception).startswith("--tokenizer: ")


@pytest.mark.parametrize(
    ("given", "near"), [("dsparc", "dspark"), ("dsprak", "dspark"), ("eagel3", "eagle3")]
)
def test_a_recipe_that_is_nearly_right_is_named(given: str, near: str, tmp_path: Path) -> None:
    command = ["train", "run", given, "--data", str(tmp_path), "-o", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert f"no recipe '{given}'" in str(result.exception)
    assert str(result.exception).endswith(f"; did you mean '{near}'?")


def test_a_recipe_that_is_there_gets_no_hint(tmp_path: Path) -> None:
    output = ["--data", str(tmp_path), "-o", str(tmp_path / "run")]
    for given in (["dspark", "--set", "nothing=1"], ["zzz"]):
        result = CliRunner().invoke(app, ["train", "run", *given, *output])
        assert isinstance(result.exception, ConfigError)
        assert "did you mean 'dspark'" not in str(result.exception)


@pytest.mark.parametrize("given", ['{"method":"lookup"', '[{"method"]', '{"a": 1, "a": 2}'])
def test_a_drafter_that_is_no_json_is_called_what_help_calls_it(given: str) -> None:
    result = CliRunner().invoke(app, ["train", "eval", given])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("DRAFTER ")


@pytest.mark.parametrize(
    "command",
    [
        ["table", "build", "corpus.txt", "-o"],
        ["table", "prune", "a.table", "--min-count", "2", "-o"],
        ["train", "data", "--self-prompts", "1", "-o"],
        ["train", "data", "--self-prompts", "1", "-o", "x", "--features"],
        ["train", "run", "dspark", "--data", "x", "-o"],
        ["bench", "-o"],
    ],
)
def test_an_empty_name_does_not_mean_the_current_directory(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, ""])
    assert result.exit_code == 2 and "the name is empty" in result.stderr
    assert not list(tmp_path.iterdir())


def test_help_names_every_dtype() -> None:
    help_of = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    [line] = [line for line in help_of.splitlines() if "--dtype" in line]
    for name in {str(kind).removeprefix("torch.") for kind in DTYPES.values()} | {"auto"}:
        assert name in line


# ---- estimate


def test_nothing_is_estimated_beyond_the_context_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def curve(tokens: int) -> list[float]:
        assert tokens <= 256
        return [1.0] * 64

    engine = SimpleNamespace(cost=SimpleNamespace(curve=curve))
    llm = SimpleNamespace(target=SimpleNamespace(max_model_len=256), engine=engine)
    monkeypatch.setattr("outrider.llm.LLM", lambda *_, **__: llm)
    command = ["estimate", "--acceptance", "0.5", "--context-length"]
    assert CliRunner().invoke(app, [*command, "256"]).exit_code == 0
    for beyond in ("257", "999999999"):
        result = CliRunner().invoke(app, [*command, beyond])
        told = f"--context-length must be in [1, 256] for this model, got {beyond}"
        assert str(result.exception) == told


@pytest.mark.parametrize("batch", [0, MOST_REQUESTS + 1, 100_000])
def test_nothing_is_estimated_for_a_batch_that_bench_refuses(batch: int) -> None:
    command = ["estimate", "--acceptance", "0.5", "--batch", str(batch)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "--batch" in result.stderr


# ---- serve


@pytest.mark.usefixtures("unloaded")
def test_a_trace_that_cannot_be_written_is_known_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, reason in {
        "nodir/x.json": "No such file or directory",
        "file/x.json": "Not a directory",
        "": "Is a directory",
        "n" * 300: "File name too long",
    }.items():
        path = tmp_path / name
        code, said = ended(monkeypatch, capsys, "serve", "--trace", path)
        assert (code, said) == (2, f"outrider: cannot write the trace {path}: {reason}\n")


def test_a_trace_is_not_touched_before_it_is_begun(tmp_path: Path) -> None:
    from outrider.serving.trace import check_trace

    check_trace(tmp_path / "new.json")
    (tmp_path / "old.json").write_text("[]")
    check_trace(tmp_path / "old.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "[]"


@pytest.mark.parametrize("host", ["999.9.9.9", "a..b", "x" * 300])
def test_a_host_that_is_none_is_refused_with_the_reason(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serving_cases import make_llm

    monkeypatch.setattr(ModelOptions, "load", lambda _: make_llm())
    result = CliRunner().invoke(app, ["serve", "--host", host, "--port", "8123"])
    assert isinstance(result.exception, ConfigError)
    told, reason = str(result.exception).split(":8123: ")  # resolvers have their own words
    assert told == f"cannot serve on {host}" and reason and reason != "the log says why"


# ---- Ctrl-C


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "command", [["generate", "Hi"], ["generate", "Hi", "--json"], ["compare", "Hi"], ["demo"]]
)
def test_ctrl_c_is_told_on_one_line(
    command: list[str],
    fake: FakeLLM,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("stream", "chat", "generate"):
        monkeypatch.setattr(fake, name, interrupted)
    monkeypatch.setattr("outrider.cli.comparison.twin", lambda _: fake)
    assert ended(monkeypatch, capsys, *command) == (130, "outrider: interrupted\n")


def test_ctrl_c_while_a_model_is_loaded_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelOptions, "load", interrupted)
    assert ended(monkeypatch, capsys, "generate", "Hi") == (130, "outrider: interrupted\n")


def test_work_that_can_go_on_says_so_when_it_is_interrupted(
    fake: FakeLLM,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ModelOptions, "load", lambda self, quiet=False, also=(): fake)
    monkeypatch.setattr("outrider.training.generate.generate", interrupted)
    command = ("train", "data", "--self-prompts", 1, "-o", tmp_path / "data")
    told = "outrider: interrupted; the same command goes on where it stopped\n"
    assert ended(monkeypatch, capsys, *command) == (130, told)


def test_a_command_that_has_told_of_ctrl_c_is_not_followed_by_another_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.cli.bench._real_model", interrupted)
    command = ("bench", "-o", tmp_path / "out", "--report", "none")
    assert ended(monkeypatch, capsys, *command) == (130, "interrupted: nothing was measured\n")


def test_only_ctrl_c_loses_its_words() -> None:
    end = already_told(KeyboardInterrupt())
    assert isinstance(end, SystemExit) and end.code == 130
    for other in (SystemExit(143), ConfigError("x")):
        assert already_told(other) is other
