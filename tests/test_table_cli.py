"""`outrider table`, from corpora to tables and back: what it prints, writes and refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from table_cases import byte_tokenizer, texts, write_table
from typer.testing import CliRunner

from outrider.cli.main import app, main
from outrider.errors import MissingDependency
from outrider.tables.corpus import Corpus, Passage, read_passages, tokenised
from outrider.tables.format import Table
from outrider.tables.samples import continuation

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
SENTENCE = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cli.table._tokenizer", lambda model: TOKENIZER)


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
    assert len(Table(both).provenance["merged"]) == 2
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
        "list.jsonl": (b"[1]\n", "list.jsonl:1: expected a JSON object, got '[1]"),
        "keys.jsonl": (b'{"body": "a"}\n', "keys.jsonl:1: expected 'text', 'turns'"),
        "turns.jsonl": (b'{"turns": [1]}\n', "turns.jsonl:1: expected 'text'"),
        "role.jsonl": (b'{"messages": [{"content": "a"}]}\n', "each message needs 'role'"),
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
        ("--max-bytes", "15X"): "a number with K, M or G behind it, got '15X'",
        ("--memory", "1M"): "--memory must be at least",
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


# ---- corpora


def counted_texts(path: Path) -> list[tuple[str, str]]:
    """What is context and what is counted, decoded."""
    found = []
    for ids, mask in tokenised(read_passages(path, TOKENIZER), TOKENIZER):
        found.append(tuple(TOKENIZER.decode(ids[chosen], False) for chosen in (~mask, mask)))
    return found


def test_only_what_the_assistant_says_is_counted(tmp_path: Path) -> None:
    messages = [("user", "hi"), ("assistant", "hello"), ("user", "why"), ("assistant", "so")]
    record = {"messages": [{"role": role, "content": said} for role, said in messages]}
    path = jsonl(tmp_path / "a.jsonl", record)
    assert counted_texts(path) == [("stant>", "hello<eos>"), ("stant>", "so<eos>")]
    asked = {"messages": record["messages"][:1]}
    assert counted_texts(jsonl(path, asked)) == [("", "hi")]


def test_turns_texts_and_generated_outputs(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("blue")
    output = {"token_ids": [*ids, 2], "text": "blue"}
    generated = {"prompt": "<user>sky<eos>\n<assistant>", "outputs": [output, output]}
    path = jsonl(tmp_path / "a.jsonl", {"turns": ["one", "two"]}, {"text": "three"}, generated)
    assert counted_texts(path) == [
        ("", "one"), ("", "two"), ("", "three"), ("stant>", "blue<eos>"), ("stant>", "blue<eos>"),
    ]  # fmt: skip


def test_a_directory_is_read_by_suffix_and_without_what_is_excluded(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.txt", "test/d.py", "sub/e.py", "f.bin", "sub/test.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    corpus = Corpus([tmp_path], (".py",), ("test", "test.py"))
    names = [str(path.relative_to(tmp_path)) for path in corpus.files()]
    assert names == ["a.py", "b.py", "sub/e.py"]


def test_a_long_text_comes_in_pieces_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tables.corpus.PIECE", 50)
    content = "".join(f"line {i} é\n" for i in range(40)) + "é" * 333
    (tmp_path / "a.txt").write_text(content)
    pieces = list(read_passages(tmp_path / "a.txt", TOKENIZER))
    assert "".join(piece.text for piece in pieces) == content
    assert len(pieces) > 10
    assert all(isinstance(piece, Passage) and len(piece.text) <= 70 for piece in pieces)
