"""What the terminal shows: text coloured by who drafted it, and the numbers under it."""

import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from outrider.results import SpeculativeMetrics

if TYPE_CHECKING:
    from outrider.tokenizer import TextStream

TARGET = "target"  # who a token came from when nobody drafted it
# Given to sources in the order they are first met; readable on dark and light terminals.
PALETTE = ("green", "cyan", "magenta", "yellow", "blue", "red")
Span = tuple[str, str]  # text, source


def output(record: bool = False) -> Console:
    """Console on stdout; no escape codes when it is no terminal or NO_COLOR is set.

    With `record` what is printed can be exported, in colour wherever it was shown.
    """
    return _console(stderr=False, record=record)


def messages() -> Console:
    """Console on stderr, for progress, numbers and errors."""
    return _console(stderr=True)


def _console(stderr: bool, record: bool = False) -> Console:
    return Console(
        stderr=stderr,
        record=record,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
    )


@dataclass(slots=True)
class Colours:
    """One colour per source, the same all through a run."""

    known: dict[str, str] = field(default_factory=dict)

    def style(self, source: str) -> str:
        if source == TARGET:
            return "default"
        return self.known.setdefault(source, PALETTE[len(self.known) % len(PALETTE)])

    def paint(self, spans: Sequence[Span]) -> Text:
        """The spans as one text, each in the colour of its source."""
        text = Text()
        for piece, source in spans:
            text.append(printable(piece), self.style(source))
        return text

    def legend(self, sources: Sequence[str]) -> Text:
        """Tokens by source, most first: ``■ target 41  ■ other 120``."""
        text = Text()
        text.append("tokens from  ", "dim")
        names = sorted(set(sources), key=lambda name: (-sources.count(name), name))
        for name in names:
            text.append("■ ", self.style(name))
            text.append(f"{name} {sources.count(name)}   ")
        return text


def printable(text: str) -> str:
    """The text without escape codes that a model might write into the terminal."""
    return text.replace("\x1b", "␛")


@dataclass(slots=True)
class SourceSplitter:
    """Cuts streamed text at token borders, to know which source each piece is from.

    Text may come later than its tokens (half a character, half a stop string); the decoder
    tells what each token adds to the text, in the same order.
    """

    decoder: "TextStream"
    _pending: deque[tuple[int, str]] = field(default_factory=deque)  # characters left, source

    def split(self, text: str, token_ids: Sequence[int], sources: Sequence[str]) -> list[Span]:
        """The spans of ``text``, which ends one or more of the tokens given so far."""
        for token_id, source in zip(token_ids, sources, strict=True):
            piece = self.decoder.push([token_id])
            if piece:
                self._pending.append((len(piece), source))
        spans: list[Span] = []
        while text:
            length, source = self._pending.popleft() if self._pending else (len(text), TARGET)
            piece, text = text[:length], text[length:]
            if length > len(piece):
                self._pending.appendleft((length - len(piece), source))
            if spans and spans[-1][1] == source:
                piece, source = spans.pop()[0] + piece, source
            spans.append((piece, source))
        return spans


class TextWriter:
    """Writes an answer to stdout as it comes, in colour where stdout shows colours."""

    def __init__(self, splitter: SourceSplitter, colours: Colours) -> None:
        self._console = output()
        self._splitter = splitter
        self._colours = colours
        self.coloured = self._console.is_terminal and self._console.color_system is not None

    def write(self, text: str, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        if not self.coloured:
            sys.stdout.write(printable(text) if self._console.is_terminal else text)
            sys.stdout.flush()
            return
        spans = self._splitter.split(text, token_ids, sources)
        self._console.print(self._colours.paint(spans), end="", soft_wrap=True)


def acceptance_line(metrics: SpeculativeMetrics) -> str:
    """``name kept 121 of 150 drafts (81 %)`` for each source that drafted."""
    parts = [
        f"{name} {one.num_accepted_draft_tokens} of {one.num_draft_tokens} drafts kept "
        f"({one.draft_acceptance_rate:.0%})"
        for name, one in sorted(metrics.per_source.items())
        if one.num_draft_tokens
    ]
    return " · ".join(parts) or "nothing was drafted"
