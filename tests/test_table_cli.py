"""`outrider table`, from corpora to tables and back: what it prints, writes and refuses."""

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from table_cases import byte_tokenizer, texts, write_table
from typer.testing import CliRunner

from outrider.cli.main import app, main
from outrider.cli.table_inputs import size_of
from outrider.errors import MissingDependency, TableError
from outrider.tables.format import Table
from outrider.tables.samples import continuation

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
SENTENCE = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own: that of the tests may hold the models of others."""
    monkeypatch.setattr("outrider.cli.table_inputs.tokenizer_of", lambda model: TOKENIZER)
    monkeypatch.setattr("outrider.cli.table_inputs._resident_bytes", lambda: 100 << 20)


def table(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["table", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> str:
    """The one sentence on stderr of a command that ends with code 2."""
    monkeypatch.setattr(sys, "argv", ["outrider", "table", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("outrider:")]
    assert len(lines) == 1
    return lines[0]


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def drafted(path: Path, text: str, count: int = 8) -> str:
    ids, _ = continuation(Table(path), TOKENIZER.encode(text), count)
    return TOKENIZER.decode(ids)


# ---- build


def test_build_inspect_merge_prune_and_coverage(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    jsonl(tmp_path / "b.jsonl", *({"text": f"{SENTENCE}{i}"} for i in range(100)))
    a, b, both, small = (tmp_path / f"{name}.table" for name in ("a", "b", "both", "small"))
    table("build", tmp_path / "a.txt", "-o", a)
    table("build", tmp_path / "b.jsonl", "-o", b, "--key-lengths", "1,3", "--min-count", 2)
    assert drafted(a, "the quick") == " brown f"
    assert drafted(b, "he quick") == " brown f"
    assert Table(b).contents.layout.key_lengths == (1, 3)

    shown = table("inspect", a, "--verify", "--after", "the la")
    assert "checked from end to end" in shown and "'zy dog." in shown
    assert TOKENIZER.fingerprint in shown
    header = json.loads(table("inspect", a, "--json"))
    assert header["provenance"]["data"] == [str(tmp_path / "a.txt")]
    assert header["provenance"]["bytes"] == len(SENTENCE) * 50
    assert set(header["provenance"]["versions"]) == {"outrider", "numpy", "tokenizers"}

    table("merge", a, b, "-o", both)
    assert Table(both).contents.layout.key_lengths == (1, 2, 3, 4, 5, 6)
    assert len(Table(both).provenance["inputs"]) == 2
    assert drafted(both, "the quick") == " brown f"
    table("prune", both, "-o", small, "--min-count", 60)
    assert Table(small).header["num_slots"] < Table(both).header["num_slots"]

    shown = table("coverage", a, "--on", tmp_path / "b.jsonl", "--limit", 500)
    assert "recommended" in shown and "6 tokens" in shown
    sizes = json.loads(table("coverage", a, "--on", tmp_path / "b.jsonl", "--json"))[str(a)]
    assert sizes[0]["hit_rate"] > 0.9 and sizes[0]["acceptance_length"] > 5


def test_the_same_corpus_gives_the_same_table(tmp_path: Path) -> None:
    for name in ("z.txt", "a.txt", "m/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SENTENCE * 5 + name)
    first, second = tmp_path / "1.table", tmp_path / "2.table"
    for path in (first, second):
        table("build", tmp_path, "-o", path, "--suffix", ".txt")
    headers = [Table(path).header for path in (first, second)]
    for header in headers:
        del header["provenance"]
    assert headers[0] == headers[1]
    assert (Table(first).contents.buckets == Table(second).contents.buckets).all()


def test_a_plot_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    table("build", tmp_path / "a.txt", "-o", tmp_path / "a.table")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install 'outrider\[bench\]'"):
        table("coverage", tmp_path / "a.table", "--on", tmp_path / "a.txt",
              "--plot", tmp_path / "p.svg")  # fmt: skip


@pytest.mark.slow
def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    table("build", tmp_path / "a.txt", "-o", tmp_path / "a.table")
    for name in ("p.svg", "p.png"):
        table("coverage", tmp_path / "a.table", "--on", tmp_path / "a.txt",
              "--plot", tmp_path / name)  # fmt: skip
        assert (tmp_path / name).stat().st_size > 5000


def test_without_a_command_the_help_is_shown() -> None:
    assert "coverage" in table()


# ---- refusals


def test_corpora_that_cannot_be_read_are_refused_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.table"
    cases = {
        "missing.txt": (None, "missing.txt does not exist"),
        "empty.txt": (b"", "holds no tokens"),
        "latin.txt": (b"one\ntwo\ncaf\xe9 au lait\n", "latin.txt:3 is not UTF-8"),
        "cut.txt": ("é".encode()[:1], "cut.txt:1 is not UTF-8"),
        "bad.jsonl": (b'{"text": "a"}\n\n{"text"\n', "bad.jsonl:3: not valid JSON at column"),
        "list.jsonl": (b"[1]\n", "list.jsonl:1: expected a JSON object, got [1]"),
        "keys.jsonl": (
            b'{"body": "a"}\n',
            "keys.jsonl:1: expected one of the keys 'outputs', 'text'",
        ),
        "turns.jsonl": (b'{"turns": [1]}\n', "turns.jsonl:1: turn 1 must be a text, got 1"),
        "role.jsonl": (
            b'{"messages": [{"content": "a"}]}\n',
            "role.jsonl:1: message 1 needs a 'role' of system, developer, user",
        ),
        "ids.jsonl": (b'{"outputs": [{"text": "a"}]}\n', "needs 'token_ids'"),
        "foreign.jsonl": (
            b'{"outputs": [{"token_ids": [5, 6], "text": "hello"}]}\n',
            "the token ids are not this tokenizer's: they read",
        ),
        "high.jsonl": (b'{"outputs": [{"token_ids": [5, 9999]}]}\n', "token ids must be in [0, "),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert message in refused(monkeypatch, capsys, "build", tmp_path / name, "-o", out)
        assert not out.exists()
    (tmp_path / "directory").mkdir()
    answer = refused(monkeypatch, capsys, "build", tmp_path / "directory", "-o", out)
    assert "no file in" in answer and ".txt" in answer


def test_wrong_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    out = tmp_path / "t.table"
    build = ("build", tmp_path / "a.txt", "-o", out)
    for options, message in {
        ("--key-lengths", "1,7"): "different numbers from 1 to 6, as 1,2,4, got '1,7'",
        ("--key-lengths", "1,1"): "got '1,1'",
        ("--max-bytes", "15X"): "--max-bytes must be a number of bytes, or one with K, M, G",
        ("--memory", "1M"): "--memory must be at least 164M (the program takes 100M, a build 64M)",
        ("--max-bytes", "1K"): "the maximum is 1024",
    }.items():
        assert message in refused(monkeypatch, capsys, *build, *options)
        assert not out.exists()
    table(*build)
    assert "nothing to prune by" in refused(monkeypatch, capsys, "prune", out, "-o", out)
    other = tmp_path / "other.table"
    write_table(other, texts(2))
    for command in (("inspect", other), ("coverage", other, "--on", tmp_path / "a.txt")):
        answer = refused(monkeypatch, capsys, *command)
        assert "the tokenizer toy" in answer and TOKENIZER.fingerprint in answer
    answer = refused(monkeypatch, capsys, "merge", out, other, "-o", tmp_path / "m.table")
    assert "only tables of one tokenizer" in answer


def test_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    (tmp_path / "out").mkdir()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    out = tmp_path / "out" / "t.table"
    answer = refused(monkeypatch, capsys, "build", tmp_path / "a.txt", "-o", out)
    assert answer.endswith(f"cannot write {out}: No space left on device")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_build_never_writes_over_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, link, empty = (tmp_path / name for name in ("a.txt", "link.txt", "empty.txt"))
    source.write_text(SENTENCE * 50)
    link.symlink_to(source)
    empty.write_text("")
    for output in (source, link):
        answer = refused(monkeypatch, capsys, "build", source, "-o", output)
        assert "is one of the inputs" in answer
    assert "is one of the inputs" in refused(
        monkeypatch, capsys, "build", source, empty, "-o", empty
    )
    assert source.read_text() == SENTENCE * 50
    table("build", tmp_path, "-o", tmp_path / "out.txt")
    first = Table(tmp_path / "out.txt").header["corpus"]
    table("build", tmp_path, "-o", tmp_path / "out.txt")  # passes over its own table
    assert Table(tmp_path / "out.txt").header["corpus"] == first
    named = refused(monkeypatch, capsys, "build", tmp_path / "out.txt", "-o", tmp_path / "t.table")
    assert "is a draft table" in named
    table("prune", tmp_path / "out.txt", "-o", tmp_path / "out.txt", "--min-count", 2)
    table("merge", *[tmp_path / "out.txt"] * 2, "-o", tmp_path / "out.txt")


def test_a_useless_output_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    table("build", tmp_path / "a.txt", "-o", tmp_path / "a.table")

    def work(*_: object) -> None:
        raise AssertionError("the output was not looked at first")

    monkeypatch.setattr("outrider.cli.table_inputs.take_in", work)
    monkeypatch.setattr("outrider.cli.table_inputs.read_stream", work)
    for output in (tmp_path, tmp_path / "none" / "t.table", tmp_path / ("n" * 300)):
        for command in (("build", tmp_path / "a.txt"), ("prune", tmp_path / "a.table",
                        "--min-count", 2), ("merge", *[tmp_path / "a.table"] * 2)):  # fmt: skip
            assert "cannot write" in refused(monkeypatch, capsys, *command, "-o", output)
    (tmp_path / "d.svg").mkdir()
    for picture, message in {
        "p": "ends in .png or .svg",
        "p.gif": "ends in .png or .svg",
        "": "ends in .png or .svg",
        "none/p.svg": "no directory",
        "d.svg": "it is a directory",
        f"{'n' * 300}.svg": "File name too long",
    }.items():
        path = tmp_path / picture if picture else ""
        command = ("coverage", tmp_path / "a.table", "--on", tmp_path / "a.txt", "--plot", path)
        assert message in refused(monkeypatch, capsys, *command)


@pytest.mark.parametrize(
    "size", ["²", "²M", "٣M", "9" * 400, "1" * 6000, "1e5", "15MB", "-1", "0", "", "M", "nan"]
)
def test_sizes_are_plain_numbers(size: str) -> None:
    with pytest.raises(TableError, match="--memory must be a number of bytes"):
        size_of("--memory", size)


def test_sizes_have_units() -> None:
    assert size_of("--memory", "4096") == 4096
    assert size_of("--memory", "1.5g") == 3 << 29
    assert size_of("--memory", "2T") == 2 << 40


def test_options_that_would_be_ignored_are_refused_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 50)
    path = tmp_path / "a.table"
    table("build", tmp_path / "a.txt", "-o", path)
    assert "give one of them" in refused(
        monkeypatch, capsys, "inspect", path, "--json", "--after", "x"
    )
    assert "one token or more" in refused(monkeypatch, capsys, "inspect", path, "--after", "")
    assert "2 or more" in refused(monkeypatch, capsys, "prune", path, "-o", path, "--min-count", 1)
    assert "its own --on" in refused(
        monkeypatch, capsys, "coverage", path, "--on", tmp_path / "a.txt", tmp_path / "a.txt"
    )
    assert json.loads(table("inspect", path, "--json", "--verify"))["verified"] is True
    table("build", tmp_path / "a.txt", "-o", path, "--key-lengths", "2,3")
    assert "no keys of one token" in table("inspect", path)


def test_the_recommended_size_is_a_command(tmp_path: Path) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(2000)]
    often = " ".join(words[:20]) + " "
    (tmp_path / "a.txt").write_text(" ".join(words) + " " + often * 50)
    (tmp_path / "b.txt").write_text(often * 3)
    table("build", tmp_path / "a.txt", "-o", tmp_path / "a.table")
    shown = table("coverage", tmp_path / "a.table", "--on", tmp_path / "b.txt")
    command = re.search(r"outrider table prune (\S+) -o SMALLER.table (--max-bytes) (\d+K)", shown)
    assert command is not None, shown
    table("prune", command[1], "-o", tmp_path / "s.table", command[2], command[3])
    small = Table(tmp_path / "s.table")
    assert small.num_bytes < Table(tmp_path / "a.table").num_bytes
    lost = small.header["left_out"]["max_bytes"]
    assert f"{lost:,} contexts of least worth" in table("inspect", tmp_path / "s.table")
    assert "answers: places" in shown and "1 token " in shown and "1 tokens" not in shown


# ---- the end of a command


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_unwinds_and_removes_what_is_temporary(tmp_path: Path, name: str) -> None:
    code = """
import sys, tempfile, time
from outrider.cli import main
def app():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("ready", flush=True)
        time.sleep(60)
main.app = app
main.main()
"""
    number = getattr(signal, name)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (128 + number, b"")
    assert list(tmp_path.iterdir()) == []
