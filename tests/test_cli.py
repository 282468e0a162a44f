"""The command line, on a scripted model: what it prints, where, and with which exit code."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from outrider.cli import chat as chat_command
from outrider.cli.compare import verdict
from outrider.cli.comparison import first_difference
from outrider.cli.console import Colours, SourceSplitter
from outrider.cli.main import app, main
from outrider.cli.options import ModelOptions, SamplingOptions, parse_speculative_config
from outrider.cli.prompts import gather, read_jsonl
from outrider.errors import ConfigError, ModelError, PromptError
from outrider.results import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SourceMetrics,
    SpeculativeMetrics,
    StreamChunk,
)
from outrider.sampling_params import SamplingParams

WORDS = ["<end>", "Hello", " big", " world", "!", " Bye"]
ANSWER = [1, 2, 3, 4]
SOURCES = ["target", "echo", "echo", "target"]


class FakeTokenizer:
    chat_template: str | None = "{{ messages }}"
    lead = (1,)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(WORDS[i] for i in token_ids)

    def stream(self, prompt: Any) -> Any:
        return SimpleNamespace(push=self.decode)


class FakeLLM:
    """Answers everything with the same four words; remembers what it was asked."""

    def __init__(self, answer: list[int] | None = None, plain: bool = False) -> None:
        self.token_ids = ANSWER if answer is None else answer
        self.plain = plain
        self.tokenizer = FakeTokenizer()
        self.target = SimpleNamespace(name="fake", dtype="torch.float32")
        self.asked: list[Any] = []
        self.closed = 0

    def generate(self, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        self.asked += prompts
        return [self._output(prompt, params) for prompt in prompts]

    def chat(self, conversations: list[Any], params: SamplingParams) -> list[RequestOutput]:
        self.asked += conversations
        return [self._output(messages[-1]["content"], params) for messages in conversations]

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[StreamChunk]:
        self.asked.append(prompt)
        try:
            yield StreamChunk("0", 0, "Hello", [1], ["target"])
            yield StreamChunk("0", 0, " big world", [2, 3], ["echo", "echo"])
            result = RequestOutput("0", None, [5], [], True, self._metrics())
            yield StreamChunk("0", 0, "!", [4], ["target"], "stop", result=result)
        finally:
            self.closed += 1

    def _output(self, prompt: str, params: SamplingParams) -> RequestOutput:
        choices = [
            CompletionOutput(
                index,
                self.tokenizer.decode(self.token_ids),
                list(self.token_ids),
                "stop",
                token_sources=["target"] * 4 if self.plain else list(SOURCES),
            )
            for index in range(params.n)
        ]
        return RequestOutput("0", prompt, [5], choices, True, self._metrics())

    def _metrics(self) -> RequestMetrics:
        finished = 13.0 if self.plain else 11.5
        if self.plain:
            return RequestMetrics(9.5, 10.0, finished)
        one = SourceMetrics(3, 2, [1, 1, 1], [1, 1, 0])
        speculative = SpeculativeMetrics(2, 1, 3, 2, 4, {2: 1}, {"echo": one})
        return RequestMetrics(9.5, 10.0, finished, 0, speculative)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM()
    monkeypatch.setattr(ModelOptions, "load", lambda self, quiet=False: llm)
    monkeypatch.setattr("outrider.cli.comparison.twin", lambda _: FakeLLM(plain=True))
    monkeypatch.setenv("COLUMNS", "100")
    return llm


def run(*arguments: str, stdin: str | None = None, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_generate_streams_only_the_text_to_stdout(fake: FakeLLM) -> None:
    result = run("generate", "Hi")
    assert result.stdout == "Hello big world!\n"
    assert fake.asked == [[{"role": "user", "content": "Hi"}]]
    assert "4 tokens" in result.stderr and "2.00 tokens per forward" in result.stderr
    assert "echo 2 of 3 drafts kept (67%)" in result.stderr
    assert fake.closed == 1


def test_generate_raw_and_stdin(fake: FakeLLM) -> None:
    run("generate", "-", "--raw", stdin="Once upon")
    assert fake.asked == ["Once upon"]


def test_a_model_without_chat_template_gets_the_text_as_it_is(fake: FakeLLM) -> None:
    fake.tokenizer.chat_template = None
    run("generate", "Once upon")
    assert fake.asked == ["Once upon"]


def test_generate_quiet_writes_nothing_to_stderr(fake: FakeLLM) -> None:
    assert run("generate", "Hi", "--quiet").stderr == ""


def test_generate_json_holds_ids_sources_and_acceptance(fake: FakeLLM) -> None:
    line = json.loads(run("generate", "Hi", "--json", "-n", "2").stdout)
    assert [choice["token_ids"] for choice in line["outputs"]] == [ANSWER, ANSWER]
    assert line["outputs"][0]["token_sources"] == SOURCES
    metrics = line["metrics"]
    assert metrics["seconds_to_first_token"] == 0.5
    assert metrics["decode_tokens_per_second"] == 4.0  # 2 choices of 3 tokens in 1.5 s
    assert metrics["speculative_decoding"]["mean_acceptance_length"] == 3.0


def test_generate_file_answers_turns_one_after_the_other(fake: FakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"prompt": "c"}\n')
    lines = [
        json.loads(x)
        for x in run("generate", "--file", str(path), "--json").stdout.split("\n")
        if x
    ]
    assert [(line["index"], line["turn"]) for line in lines] == [(0, 0), (0, 1), (1, 0)]
    user, answer = {"role": "user", "content": "a"}, "Hello big world!"
    assert fake.asked[:2] == [[user], [{"role": "user", "content": "c"}]]  # one batch per turn
    assert fake.asked[2] == [
        user,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "b"},
    ]


def test_compare_says_same_text_and_speedup(fake: FakeLLM) -> None:
    result = run("compare", "Hi", "--rounds", "2")
    # plain: 3 tokens in 3 s; speculative: 3 tokens in 1.5 s
    assert "✓ same text · plain 1 → 2 tokens/s · 2.00× · 2.00 tokens/forward" in result.stdout
    assert len(fake.asked) == 2


def test_compare_json(fake: FakeLLM) -> None:
    line = json.loads(run("compare", "Hi", "--json").stdout)
    assert line["same_text"] is True and line["speedup"] == 2.0
    source = line["speculative"]["metrics"]["per_source"]["echo"]
    assert source["accepted_per_position"] == [1, 1, 0]


def test_compare_shows_the_first_difference(fake: FakeLLM) -> None:
    fake.token_ids = [1, 2, 5, 4]
    line = json.loads(run("compare", "Hi", "--json").stdout)
    assert line["same_text"] is False
    assert line["first_difference"] == {
        "position": 2,
        "plain_token": " world",
        "speculative_token": " Bye",
        "context": "Hello big",
    }
    text = run("compare", "Hi").stdout
    assert "✗ the texts differ" in text and "plain ' world', speculative ' Bye'" in text


def test_first_difference_at_the_end_of_the_shorter_answer() -> None:
    found = first_difference([1, 2], [1, 2, 3], FakeTokenizer().decode)
    assert found is not None
    assert (found.position, found.plain_token, found.speculative_token) == (2, "<end>", " world")
    assert first_difference([1, 2], [1, 2], FakeTokenizer().decode) is None


@pytest.mark.parametrize("config", ["none", " None ", "null", "[]", " [ ] "])
def test_compare_without_drafts_is_refused(fake: FakeLLM, config: str) -> None:
    assert parse_speculative_config(config) is None
    result = CliRunner().invoke(app, ["compare", "Hi", "--speculative-config", config])
    assert isinstance(result.exception, ConfigError)
    assert config in str(result.exception)


def test_the_verdict_fits_80_columns() -> None:
    metrics = SpeculativeMetrics(2, 1, 3, 2, 4, {2: 1}, {})
    side = SimpleNamespace(rate=12345.0, metrics=metrics)
    for same in (True, False):
        result: Any = SimpleNamespace(same_text=same, speedup=12.345, plain=side, speculative=side)
        assert len(verdict(result)) <= 80


def test_demo_shows_every_prompt_and_the_overview(fake: FakeLLM) -> None:
    text = run("demo", "--rounds", "1").stdout
    for label in ("edit code", "rewrite JSON", "copy text", "summarise", "open chat"):
        assert text.count(label) == 2  # its heading and its row in the table
    assert text.count("2.0× faster · ✓ same text") == 5
    assert "\x1b" not in text


def test_demo_of_one_kind_saves_a_picture(fake: FakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "demo.svg"
    text = run("demo", "--only", "copy text", "--svg", str(path)).stdout
    assert "edit code" not in text
    assert path.read_text().startswith("<svg")
    with pytest.raises(PromptError, match=r"one of edit code, .*got 'poem'"):
        CliRunner().invoke(app, ["demo", "--only", "poem"], catch_exceptions=False)


def test_chat_keeps_history_and_obeys_commands(fake: FakeLLM) -> None:
    result = run(
        "chat",
        "--system",
        "Be brief.",
        stdin="one\n/stats\ntwo\n/reset\nthree\n/bad\n/quit\nfour\n",
    )
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Hello big world!"}

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    assert fake.asked == [
        [system, user("one")],
        [system, user("one"), answer, user("two")],
        [system, user("three")],
    ]
    assert "1 answers · 4 tokens" in result.stderr and "echo 50% of the tokens" in result.stderr
    assert "no such command: /bad" in result.stderr


def test_chat_goes_on_after_a_turn_that_cannot_be_answered(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake.stream

    def stream(prompt: Any, params: SamplingParams) -> Iterator[StreamChunk]:
        if prompt[-1]["content"] == "long":
            raise PromptError("the prompt has 9000 tokens, at most 8192 fit")
        return real(prompt, params)

    monkeypatch.setattr(fake, "stream", stream)
    result = run("chat", stdin="one\nlong\ntwo\n")
    assert "9000 tokens" in result.stderr and "/reset" in result.stderr
    assert [m["content"] for m in fake.asked[-1]] == ["one", "Hello big world!", "two"]


def test_chat_stops_an_answer_and_keeps_what_was_said(
    fake: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import signal

    real = fake.stream

    def stream(prompt: Any, params: SamplingParams) -> Iterator[StreamChunk]:
        for chunk in real(prompt, params):
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while the first chunk is decoded
            yield chunk

    monkeypatch.setattr(fake, "stream", stream)
    before = signal.getsignal(signal.SIGINT)
    result = run("chat", stdin="one\n")
    assert result.stdout == "Hello\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_is_not_swallowed() -> None:
    import signal

    with pytest.raises(KeyboardInterrupt), chat_command.interrupt_flag() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", "auto"),
        ("none", None),
        ('{"method": "x"}', {"method": "x"}),
        ('[{"method": "x"}]', [{"method": "x"}]),
    ],
)
def test_speculative_config(value: str, expected: object) -> None:
    assert parse_speculative_config(value) == expected


def test_speculative_config_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"method": "x"}')
    assert parse_speculative_config(f"@{path}") == {"method": "x"}
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        parse_speculative_config(f"@{tmp_path}/absent.json")


def test_malformed_json_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"line 1, column 16: Expecting.*near '\{\"method\": "):
        parse_speculative_config('{"method": "x" "y": 1}')
    with pytest.raises(ConfigError, match="object or a list of objects, got '3'"):
        parse_speculative_config("3")


def test_sampling_options_reach_the_params() -> None:
    params = SamplingOptions(
        temperature=0.5, top_k=7, stop=["x"], logit_bias='{"3": -1.5}', seed=9
    ).params(n=2)
    assert (params.temperature, params.top_k, params.n, params.seed) == (0.5, 7, 2, 9)
    assert params.stop_strings == ("x",) and params.logit_bias == {3: -1.5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not valid JSON at column 2"),
        ("[1]", ":2: expected a JSON object"),
        ('{"text": "x"}', r":2: expected 'prompt'.*got the keys \['text'\]"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must be the user's"),
        ('{"messages": [{"role": "user"}]}', "needs 'role' and 'content'"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError, match=message):
        read_jsonl(path)


def test_json_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = "a\u2028b\u2029c\x85d\x1ce"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False), '{"prompt": "two"}']
    path.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert [record.text for record in read_jsonl(path)] == [text, "two"]


@pytest.mark.parametrize(
    "line",
    [
        r'{"prompt": "\ud800"}',
        r'{"turns": ["a", "\udfff"]}',
        r'{"messages": [{"role": "user", "content": "a\ud800"}]}',
    ],
)
def test_half_characters_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(PromptError, match="a prompt is not valid Unicode text"):
        gather([], tmp_path / "p.jsonl")
    with pytest.raises(PromptError, match="expected UTF-8"):
        gather(["a\udcffb"], None)


def test_nesting_beyond_all_measure(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("[" * 100_000)
    with pytest.raises(PromptError, match=":1: "):
        read_jsonl(tmp_path / "p.jsonl")


def test_prompts_missing_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no prompt given"):
        gather([], None)
    with pytest.raises(PromptError, match="No such file"):
        gather([], tmp_path / "absent")
    with pytest.raises(PromptError, match="a prompt is empty"):
        gather(["fine", " \n"], None)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(PromptError, match="holds no prompts"):
        gather([], tmp_path / "empty")


def commands(group: Any) -> Iterator[Any]:
    """Everything that can be called in a group, as the functions that Typer calls."""
    yield from (one.callback for one in group.registered_commands)
    for below in group.registered_groups:
        yield below.typer_instance.registered_callback.callback
        yield from commands(below.typer_instance)


def test_no_option_takes_a_number_without_end() -> None:
    options = []
    for command in commands(app):
        for name, parameter in signature(command).parameters.items():
            kinds = {parameter.annotation, *get_args(parameter.annotation)}
            if not kinds.isdisjoint((float, float | None)):
                options.append(name)
                for value in (math.inf, -math.inf, math.nan):
                    option = "--" + name.replace("_", "-")
                    with pytest.raises(ConfigError, match=f"{option} must be a finite number"):
                        command(**{name: value})
    assert {"drain_seconds", "temperature", "acceptance"} & set(options) and len(options) > 10
    result = CliRunner().invoke(app, ["serve", "--drain-seconds", "inf"])
    assert isinstance(result.exception, ConfigError)


def test_splitter_keeps_sources_apart_when_text_comes_late() -> None:
    pieces = {1: "ab", 2: "", 3: "é", 4: "cd"}  # token 2 is half of the character of token 3
    decoder: Any = SimpleNamespace(push=lambda token_ids: pieces[token_ids[0]])
    splitter = SourceSplitter(decoder)
    assert splitter.split("a", [1, 2], ["target", "x"]) == [("a", "target")]
    assert splitter.split("bé", [3], ["x"]) == [("b", "target"), ("é", "x")]
    assert splitter.split("cd more", [4], ["y"]) == [("cd", "y"), (" more", "target")]


def test_colours_are_stable_and_escape_codes_are_shown() -> None:
    colours = Colours()
    text = colours.paint([("a", "one"), ("\x1b[31mb", "two"), ("c", "one"), ("d", "target")])
    assert text.plain == "a␛[31mbcd"
    styles = [str(span.style) for span in text.spans]
    assert styles[0] == styles[2] != styles[1] and styles[3] == "default"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: ModelOptions, quiet: bool = False) -> Any:
        raise ModelError("unknown model 'nope': expected a directory or a .gguf file")

    monkeypatch.setattr(ModelOptions, "load", load)


@pytest.mark.usefixtures("broken")
def test_user_errors_are_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "generate", "Hi", "--model", "nope"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "outrider: unknown model 'nope': expected a directory or a .gguf file\n"
    )
    assert captured.out == ""


def outrider(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_bad_values_end_before_anything_is_loaded() -> None:
    done = outrider("generate", "Hi", "--temperature", "-1")
    assert done.returncode == 2
    assert done.stderr.startswith("outrider: temperature must be a finite number of at least 0")
    assert done.stderr.count("\n") == 1
    assert outrider("generate", "Hi", "--temperature", "warm").returncode == 2


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from outrider.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "chat", "compare", "demo"):
        assert command in done.stdout
