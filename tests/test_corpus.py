"""Corpora: which files are read, as what, and what is counted of them."""

import codecs
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from table_cases import byte_tokenizer, texts, write_table

from outrider.errors import TableError
from outrider.tables import corpus as corpora
from outrider.tables.corpus import STDIN, Corpus, read_passages, tokenised
from outrider.tables.jsonl import passages_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
PLAIN = byte_tokenizer()


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def counted_texts(path: Path) -> list[tuple[str, str]]:
    """What is context and what is counted, decoded."""
    found = []
    for ids, mask in tokenised(read_passages(path, TOKENIZER), TOKENIZER):
        found.append(tuple(TOKENIZER.decode(ids[chosen], False) for chosen in (~mask, mask)))
    return found


def conversation(*said: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def passages(record: Any, tokenizer: Any = TOKENIZER) -> list[tuple[str, str]]:
    found = passages_of(json.dumps(record), "a.jsonl:7", tokenizer)
    return [(passage.before, passage.text) for passage in found]


# ---- records


def test_only_what_the_assistant_says_is_counted(tmp_path: Path) -> None:
    record = conversation(("user", "hi"), ("assistant", "hello"), ("user", "why"),
                          ("assistant", "so"))  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", record)
    assert counted_texts(path) == [("stant>", "hello<eos>"), ("stant>", "so<eos>")]
    assert passages(record, PLAIN) == [("", "hello"), ("", "so")]


def test_a_template_may_trim_or_rewrite_what_was_said() -> None:
    said = conversation(("user", "hi"), ("assistant", " a </t> b\n"), ("user", "x"),
                        ("assistant", "c"))  # fmt: skip
    trims = byte_tokenizer(TEMPLATE.replace("m.content", "(m.content | trim)"))
    assert [text for _, text in passages(said, trims)] == ["a </t> b<eos>", "c<eos>"]
    rewrites = byte_tokenizer(TEMPLATE.replace("m.content", "m.content.split('</t>')[-1]"))
    assert [text for _, text in passages(said, rewrites)] == [" a </t> b\n<eos>", "c<eos>"]
    drops = byte_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}")
    assert [text for _, text in passages(said, drops)] == [" a </t> b\n", "c"]


def test_a_long_conversation_is_rendered_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [("user", "x"), ("assistant", "y")] * 300
    rendered = []
    chat = type(TOKENIZER).chat
    monkeypatch.setattr(
        type(TOKENIZER), "chat", lambda *a, **k: rendered.append(1) or chat(*a, **k)
    )
    assert len(passages(conversation(*said))) == 300
    assert len(rendered) <= 3


def test_turns_texts_and_generated_outputs(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("blue")
    output = {"token_ids": [*ids, 2], "text": "blue"}
    generated = {"prompt": "<user>sky<eos>\n<assistant>", "outputs": [output, output]}
    path = jsonl(tmp_path / "a.jsonl", {"turns": ["one", "two"]}, {"text": "three"}, generated)
    assert counted_texts(path) == [
        ("", "one"), ("", "two"), ("", "three"), ("stant>", "blue<eos>"), ("stant>", "blue<eos>"),
    ]  # fmt: skip


def test_records_that_cannot_be_counted_say_why() -> None:
    for line, message in {
        '{"text": 5}': "'text' must be a text, got 5",
        '{"text": "a", "outputs": 5}': "'outputs' must be a list of objects",
        '{"turns": "a"}': "'turns' must be a list of texts",
        json.dumps({f"key{i}": 1 for i in range(3000)}): "got ['key0', 'key1'",
        json.dumps(conversation(("user", "hi"))): "none of its 1 messages is the assistant's",
        json.dumps(conversation(("assistant", "a"), ("wizard", "b"))): "message 2 needs a 'role'",
        '{"messages": [{"role": "assistant"}]}': "message 1 needs 'content' as text, got None",
        "[" * 100_000: "nested too deep",
        '{"text": ' + "9" * 5000 + "}": "cannot be read as JSON",
        '{"text": "\\ud800"}': "is not valid Unicode text",
        '{"prompt": "\\ud800", "outputs": [{"token_ids": [3]}]}': "is not valid Unicode text",
        '{"prompt": ["a"], "outputs": [{"token_ids": [3]}]}': "'prompt' must be a text",
    }.items():
        with pytest.raises(TableError) as error:
            list(passages_of(line, "a.jsonl:7", TOKENIZER))
        assert str(error.value).startswith("a.jsonl:7: ") and message in str(error.value)
        assert len(str(error.value)) < 300
    for token in (-1, 1 << 32, 10**24, True, 1.5, None, "a", TOKENIZER.vocab_size):
        with pytest.raises(TableError, match=r"a\.jsonl:7: .*(token ids|token_ids)"):
            passages({"outputs": [{"token_ids": [3, token]}]})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["\ud800", "assistant", "\ue0000\ue001"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "token_ids", "text", "x"]), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip
keys = st.sampled_from(["text", "turns", "messages", "outputs", "prompt", "other", "\ud800"])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(record=st.dictionaries(keys, values, max_size=3) | values, plain=st.booleans())
@example(record=conversation(("assistant", "\ue0000\ue001")), plain=False)
@example(record=conversation(("user", "\ue0001\ue001"), ("assistant", "a")), plain=False)
def test_any_line_gives_passages_or_an_error_with_its_place(record: Any, plain: bool) -> None:
    try:
        line = json.dumps(record)
    except ValueError:  # too many digits to write
        return
    try:
        found = list(passages_of(line, "a.jsonl:7", PLAIN if plain else TOKENIZER))
        for ids, counted in tokenised(found, TOKENIZER):
            assert ids.dtype == np.int32 and len(ids) == len(counted)
    except TableError as error:
        assert str(error).startswith("a.jsonl:7: ")


# ---- what a file is


def test_a_long_text_comes_in_pieces_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "PIECE", 50)
    content = "".join(f"line {i} é\n" for i in range(40)) + "é" * 333 + " word" * 60
    (tmp_path / "a.txt").write_text(content)
    jsonl(tmp_path / "a.jsonl", {"text": content})
    pieces = list(read_passages(tmp_path / "a.txt", TOKENIZER))
    assert "".join(piece.text for piece in pieces) == content
    assert len(pieces) > 10 and all(len(piece.text) <= 50 for piece in pieces)
    assert [piece.before for piece in pieces[1:]] == [piece.text[-64:] for piece in pieces[:-1]]
    assert list(read_passages(tmp_path / "a.jsonl", TOKENIZER)) == pieces


def test_a_line_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MAX_LINE", 30)
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": "a" * 40})
    with pytest.raises(TableError, match=r"a\.jsonl:2: expected a JSON object in each line"):
        list(read_passages(path, TOKENIZER))


def test_jsonl_is_known_by_its_name_or_its_first_line(tmp_path: Path) -> None:
    line = json.dumps({"text": "abc"}).encode() + b"\n"
    mark = codecs.BOM_UTF8
    for name, content, expected in [
        ("a.jsonl", line, "abc"),
        ("A.JSONL", mark + line, "abc"),
        ("a.json", b"\n" + line, "abc"),
        ("a.txt", mark + line, "abc"),
        ("b.txt", mark + b"abc", "abc"),
        ("c.txt", b'{"other": 1}\n', '{"other": 1}\n'),
        ("b.json", b'{\n "text": "abc"}\n', '{\n "text": "abc"}\n'),
    ]:
        (tmp_path / name).write_bytes(content)
        assert [p.text for p in read_passages(tmp_path / name, TOKENIZER)] == [expected], name
    with pytest.raises(TableError, match=r"d\.JSONL:1: expected one of the keys"):
        (tmp_path / "d.JSONL").write_text('{"other": 1}\n')
        list(read_passages(tmp_path / "d.JSONL", TOKENIZER))


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b'\n {"text": "abc"}\n{"text": "d"}', ["abc", "d"]), (b"plain {}\n", ["plain {}\n"]),
     (b"", []), (b" \n ", [])],
)  # fmt: skip
def test_standard_input(
    content: bytes, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))  # type: ignore[arg-type]
    assert Corpus(["-"]).files() == [STDIN]
    assert [p.text for p in read_passages(STDIN, TOKENIZER)] == expected


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 300_000 + "\n" + "b")
    seen: list[int] = []
    list(read_passages(tmp_path / "a.txt", TOKENIZER, seen.append))
    assert sum(seen) == 600_002 and len(seen) > 2


# ---- which files


def test_a_directory_is_read_by_suffix_and_without_what_is_excluded(tmp_path: Path) -> None:
    for name in ("b.py", "a.PY", "c.txt", "test/d.py", "sub/e.py", "f.bin", "sub/test.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    notes: list[str] = []

    def names(*excluded: str) -> list[str]:
        files = Corpus([tmp_path], (".py",), excluded).files(notes.append)
        return [str(path.relative_to(tmp_path)) for path in files]

    assert names("test", "test.py") == ["a.PY", "b.py", "sub/e.py"]
    assert names("tes*", "sub/e.*") == ["a.PY", "b.py"]
    assert notes == []
    names("nothing*", "test")
    assert notes == ["nothing is left out by --exclude nothing*: no name is like it"]
    Corpus([tmp_path / "b.py"], excluded=("test",)).files(notes.append)
    assert "choose from directories" in notes[1]


def test_each_file_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    notes: list[str] = []
    assert len(Corpus([tmp_path, tmp_path / "a.txt"]).files(notes.append)) == 1
    assert len(notes) == 1 and "and 1 more: each file is read once" in notes[0]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.txt"))
    for name, message in {
        "pipe.txt": "is a FIFO: expected a file",
        "zero.jsonl": "is a device: expected a file",
        "s.txt": "is a socket: expected a file",
        "gone.txt": "nowhere, which does not exist",
        "loop.txt": "Too many levels of symbolic links",
        "n" * 300: "File name too long",
        "none": "none does not exist",
    }.items():
        with pytest.raises(TableError, match=message):
            Corpus([tmp_path / name]).files()
    with pytest.raises(TableError, match="got ''"):
        Corpus([""]).files()
    notes: list[str] = []
    with pytest.raises(TableError, match="no file in"):
        Corpus([tmp_path]).files(notes.append)
    assert len(notes) == 5
    write_table(tmp_path / "t.txt", texts(2))
    (tmp_path / "ok.txt").write_text("x")
    assert Corpus([tmp_path]).files(notes.append) == [tmp_path / "ok.txt"]
    assert "t.txt is a draft table" in notes[-1] + notes[-2] + notes[-3]


def test_a_directory_with_nothing_is_an_error_beside_one_with_files(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "full" / "a.txt").write_text("x")
    with pytest.raises(TableError, match=r"no file in .*none"):
        Corpus([tmp_path / "full", tmp_path / "none"]).files()


def test_directories_that_cannot_be_read_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    notes: list[str] = []
    refused = str(tmp_path / "sub")
    assert Corpus([tmp_path]).files(notes.append) == [tmp_path / "a.txt"]
    assert notes == [f"left out: cannot read {tmp_path / 'sub'}: Permission denied"]
    refused = str(tmp_path)
    with pytest.raises(TableError, match="Permission denied"):
        Corpus([tmp_path]).files()
