"""Where prompts come from: an argument, standard input, or a JSONL file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import PromptError
from outrider.text import check_unicode

Message = dict[str, str]


@dataclass(slots=True)
class PromptRecord:
    """One entry to answer: user turns, after the messages that come before them."""

    turns: list[str]
    before: list[Message]
    label: str = ""

    @property
    def text(self) -> str:
        """The first user turn, which is all there is of a plain prompt."""
        return self.turns[0]


def gather(arguments: list[str], file: Path | None) -> list[PromptRecord]:
    """Prompts of a command line; ``-`` stands for all of standard input.

    Raises:
        PromptError: nothing given, or the file does not hold prompts.
    """
    records = [PromptRecord([_read_stdin() if p == "-" else p], []) for p in arguments]
    if file is not None:
        records += read_jsonl(file)
    if not records:
        raise PromptError("no prompt given: pass one as argument, '-' for stdin, or --file JSONL")
    for record in records:
        # A chat template wraps even nothing into tokens, and the model makes something up.
        if not all(turn.strip() for turn in record.turns):
            raise PromptError(f"a prompt is empty: expected text, got {record.turns!r:.60}")
        for text in [*record.turns, *(message["content"] for message in record.before)]:
            check_unicode(text, "a prompt")
    return records


def read_jsonl(path: Path) -> list[PromptRecord]:
    """Records of a JSONL file; each line holds ``prompt``, ``turns`` or ``messages``."""
    try:
        # Not splitlines(): JSON strings may hold U+2028 and other line ends of Unicode.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read {path}: {reason}") from error
    records = [
        _record(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not records:
        raise PromptError(f"{path} holds no prompts")
    return records


def _record(line: str, where: str) -> PromptRecord:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: not valid JSON at column {error.colno}: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond all measure
        raise PromptError(f"{where}: cannot be read as JSON: {error}") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: expected a JSON object, got {line[:40]!r}")
    label = str(entry.get("category", ""))
    if isinstance(entry.get("prompt"), str):
        return PromptRecord([entry["prompt"]], [], label)
    if _is_list_of(entry.get("turns"), str):
        return PromptRecord(entry["turns"], [], label)
    if _is_list_of(entry.get("messages"), dict):
        return _from_messages(entry["messages"], where, label)
    raise PromptError(
        f"{where}: expected 'prompt' (text), 'turns' (list of texts) or 'messages' "
        f"(list of objects), got the keys {sorted(entry)}"
    )


def _from_messages(messages: list[Any], where: str, label: str) -> PromptRecord:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise PromptError(f"{where}: each message needs 'role' and 'content' as text")
    if messages[-1]["role"] != "user":
        raise PromptError(
            f"{where}: the last message must be the user's, got {messages[-1]['role']!r}"
        )
    return PromptRecord([messages[-1]["content"]], messages[:-1], label)


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error}") from error
