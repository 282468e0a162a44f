"""Reads what a chat model says: thoughts, words for the user, and calls of tools.

Text comes in pieces that may divide anything; what may still become a tag is held back, so that
the joined pieces are what the whole text would have given. The tags are those of Qwen, Hermes,
DeepSeek and SmolLM: `<think>…</think>` and `<tool_call>{"name": …, "arguments": …}</tool_call>`,
the latter also with a list of calls inside.
"""

import json
from dataclasses import dataclass, field
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
REASONING_PARSERS = ("think",)


@dataclass(slots=True)
class ToolCall:
    """One call that the model makes; `arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str


@dataclass(slots=True)
class Said:
    """What one piece of text turned out to be."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ChatParser:
    """Takes the text of one choice piece by piece.

    Args:
        reads_thoughts: `<think>` at the beginning is told apart.
        reads_calls: `<tool_call>` is told apart.
        is_thinking: the prompt has already opened the thoughts.
    """

    def __init__(self, reads_thoughts: bool, reads_calls: bool, is_thinking: bool = False) -> None:
        self._reads_calls = reads_calls
        self._read = self._content
        if reads_thoughts:
            self._read = self._thoughts if is_thinking else self._beginning
        self._held = ""
        self._at_border = False  # right behind a tag, where white space means nothing
        self._space = ""  # before what may be a call
        self._said = Said()
        self._is_end = False

    def push(self, text: str) -> Said:
        """What can be told for sure now."""
        self._held += text
        before = None
        while before != (self._held, self._read):
            before = (self._held, self._read)
            self._read()
        said, self._said = self._said, Said()
        return said

    def finish(self) -> Said:
        """The rest, when the text has ended: a call without its end tag is one if it is JSON."""
        self._is_end = True
        return self.push("")

    def _beginning(self) -> None:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._read = text[len(THINK) :], self._thoughts
            self._at_border = True
        elif self._is_end or not THINK.startswith(text):
            self._read = self._content

    def _thoughts(self) -> None:
        text, is_over = self._until(END_THINK)
        self._said.reasoning += self._without_border(text)
        if is_over:
            self._read, self._at_border = self._content, True

    def _content(self) -> None:
        if not self._reads_calls:
            self._said.content += self._without_border(self._held)
            self._held = ""
            return
        text, is_call = self._until(CALL)
        if is_call:
            text = self._without_border(text)
            self._said.content += text.rstrip()
            self._space = text[len(text.rstrip()) :]
            self._read = self._calls
            return
        text = self._without_border(text)
        kept = text if self._is_end else text.rstrip()  # white space before a call means nothing
        self._held = text[len(kept) :] + self._held
        self._said.content += kept

    def _calls(self) -> None:
        text = self._held
        first = end = text.find(END_CALL)
        while end >= 0 and _is_in_string(text[:end]):  # of the arguments, so that it ends nothing
            end = text.find(END_CALL, end + 1)
        if end < 0 and not self._is_end:
            return
        calls = read_calls(text[: end if end >= 0 else len(text) - _overlap(text, END_CALL)])
        last = end if calls else first
        rest = last + len(END_CALL) if last >= 0 else len(text)
        if calls:
            self._said.calls += calls
        else:  # not what it looked like: nothing that was said is lost
            self._said.content += self._space + CALL + text[:rest]
        self._at_border = bool(calls)
        self._held, self._read = text[rest:], self._content

    def _until(self, tag: str) -> tuple[str, bool]:
        """Take the text before the tag, and the tag; else all but what may become one."""
        text, found, rest = self._held.partition(tag)
        if found:
            self._held = rest
            return text, True
        keep = 0 if self._is_end else _overlap(text, tag)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _without_border(self, text: str) -> str:
        if self._at_border:
            text = text.lstrip()
            self._at_border = not text
        return text


def read_calls(text: str) -> list[ToolCall] | None:
    """The calls between two tags; None where it is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    listed = found if isinstance(found, list) else [found]
    calls = [_read_call(one) for one in listed]
    return [call for call in calls if call] if calls and all(calls) else None


def _read_call(found: Any) -> ToolCall | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(found["name"], arguments)
    return ToolCall(found["name"], json.dumps(arguments or {}, ensure_ascii=False))


def _is_in_string(text: str) -> bool:
    """Whether the text is JSON that ends inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
