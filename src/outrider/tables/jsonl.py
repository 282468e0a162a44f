"""One line of a JSONL corpus, read as what there is to count in it.

    {"prompt": …, "outputs": […]}   what `outrider generate --json` writes: the outputs' token ids
    {"text": …}                     a text
    {"messages": […]}               what the assistant says, after the chat template
    {"turns": […]}                  each turn a text

The first of these keys that a line has decides; the others must still be what they should be.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.checks import shown
from outrider.errors import PromptError, TableError
from outrider.text import check_unicode
from outrider.tokenizer import Tokenizer

CONTEXT = 64  # characters of a prompt that are enough for MAX_KEY tokens, special ones apart
KNOWN_KEYS = {
    "outputs": (list, "a list of objects with 'token_ids'"),
    "text": (str, "a text"),
    "messages": (list, "a list of objects with 'role' and 'content'"),
    "turns": (list, "a list of texts"),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
MARK = re.compile("\ue000(\\d+)\ue001")  # stands for what the assistant says; of private characters


@dataclass(slots=True)
class Passage:
    """Something to count, and what came before it."""

    text: str = ""
    before: str = ""
    token_ids: Sequence[int] | None = None  # instead of the text


def is_record(line: bytes) -> bool:
    """Whether a line is a JSON object with a key that is known here."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and any(key in entry for key in KNOWN_KEYS)


def passages_of(line: str, where: str, tokenizer: Tokenizer) -> Iterator[Passage]:
    """What there is to count in a line.

    Args:
        where: file and line, for errors.

    Raises:
        TableError: it is no record, or not this tokenizer's.
    """
    try:
        for passage in _record(_parsed(line, where), where, tokenizer):
            check_unicode(passage.before, "the prompt")
            check_unicode(passage.text, "the text")
            yield passage
    except PromptError as error:
        raise TableError(f"{where}: {error}") from error


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise TableError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise TableError(f"{where}: its JSON is nested too deep to read") from error
    except ValueError as error:  # a number of thousands of digits
        raise TableError(f"{where}: cannot be read as JSON: {error}") from error
    if not isinstance(entry, dict):
        raise TableError(f"{where}: expected a JSON object, got {shown(entry, 40)}")
    return entry


def _record(entry: dict[str, Any], where: str, tokenizer: Tokenizer) -> Iterator[Passage]:
    present = [key for key in KNOWN_KEYS if entry.get(key) is not None]
    for key in present:
        kind, expected = KNOWN_KEYS[key]
        if not isinstance(entry[key], kind):
            raise TableError(f"{where}: {key!r} must be {expected}, got {shown(entry[key], 40)}")
    if not present:
        raise TableError(
            f"{where}: expected one of the keys {', '.join(map(repr, KNOWN_KEYS))}, got "
            f"{shown(sorted(entry))}"
        )
    key = present[0]
    if key == "outputs":
        for output in entry["outputs"]:
            yield _output(entry.get("prompt"), output, where, tokenizer)
    elif key == "text":
        yield Passage(entry["text"])
    elif key == "messages":
        yield from _conversation(_messages(entry["messages"], where), where, tokenizer)
    else:
        for number, turn in enumerate(entry["turns"], 1):
            if not isinstance(turn, str):
                raise TableError(f"{where}: turn {number} must be a text, got {shown(turn, 40)}")
            yield Passage(turn)


def _output(prompt: Any, output: Any, where: str, tokenizer: Tokenizer) -> Passage:
    if prompt is not None and not isinstance(prompt, str):
        raise TableError(f"{where}: 'prompt' must be a text, got {shown(prompt, 40)}")
    ids = output.get("token_ids") if isinstance(output, dict) else None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise TableError(
            f"{where}: each of 'outputs' needs 'token_ids', a list of integers, got "
            f"{shown(ids if isinstance(output, dict) else output, 40)}"
        )
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < tokenizer.vocab_size:
            raise TableError(
                f"{where}: token ids must be in [0, {tokenizer.vocab_size}), got {shown(token, 40)}"
            )
    text, mine = output.get("text"), tokenizer.decode(ids)
    # A stop string cuts the text and not always the ids, so only what both have is compared; and
    # a decoder strips the blank that ids begin with, which text behind a prompt has.
    told, own = str(text).lstrip(" "), mine.lstrip(" ")
    if isinstance(text, str) and told[: len(own)] != own[: len(told)]:
        raise TableError(
            f"{where}: the token ids are not this tokenizer's: they read {mine[:40]!r}, "
            f"the text is {text[:40]!r}"
        )
    return Passage(before=(prompt or "")[-CONTEXT:], token_ids=ids)


def _messages(given: list[Any], where: str) -> list[dict[str, Any]]:
    """The messages, if each has a known role and a text, and one is the assistant's."""
    for number, message in enumerate(given, 1):
        if not isinstance(message, dict):
            raise TableError(
                f"{where}: message {number} must be an object with 'role' and 'content', got "
                f"{shown(message, 40)}"
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise TableError(
                f"{where}: message {number} needs a 'role' of {', '.join(ROLES)}, got "
                f"{shown(role, 40)}"
            )
        if not isinstance(content, str):
            raise TableError(
                f"{where}: message {number} needs 'content' as text, got {shown(content, 40)}"
            )
    if not any(message["role"] == "assistant" for message in given):
        raise TableError(
            f"{where}: none of its {len(given)} messages is the assistant's, and only what the "
            "assistant says is counted"
        )
    return given


def _conversation(
    messages: list[dict[str, Any]], where: str, tokenizer: Tokenizer
) -> Iterator[Passage]:
    """What the assistant says, with the token that ends it.

    The template is rendered as it is and with a mark for each of these messages: the marks say
    where they are, without a rendering for each of them.
    """
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if tokenizer.chat_template is None:
        yield from (Passage(messages[i]["content"]) for i in spoken)
        return
    marked = [
        message | {"content": f"\ue000{i}\ue001"} if message["role"] == "assistant" else message
        for i, message in enumerate(messages)
    ]
    whole = tokenizer.chat(messages, add_generation_prompt=False)
    parts = MARK.split(tokenizer.chat(marked, add_generation_prompt=False))
    said = [messages[i]["content"] for i in spoken]
    if parts[1::2] != [str(i) for i in spoken]:  # a template that leaves out what was said
        yield from map(Passage, said)
        return
    first = tokenizer.chat(marked[: spoken[0] + 1], add_generation_prompt=False)
    end = MARK.split(first)[-1].rstrip()  # what the template puts behind an answer
    before, place, is_same = "", 0, True
    for text, between, after in zip(said, parts[::2], parts[2::2], strict=False):
        before = (before + between)[-CONTEXT:]
        place += len(between)
        rendered = text
        if is_same:  # until the template rewrites something: what was said counts as it is then
            versions = (t for t in (text, text.strip()) if whole.startswith(t + after, place))
            rendered = next(versions, None)
            is_same = rendered is not None
            rendered = text if rendered is None else rendered
        place += len(rendered)
        yield Passage(rendered + (end if after.startswith(end) else ""), before)
        before = (before + rendered)[-CONTEXT:]
