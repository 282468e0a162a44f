"""From tokens to what the user sees: text, stop conditions, logprobs, all cut at one place.

A stop string ends the output at the token that completes it, however tokens and blocks divide
it: text is matched as a stream of characters, and the tail of the text that may still become a
stop string is held back until it is decided. As in vLLM, the ids end with the token that
completed the stop string, and the text ends before the stop string.
"""

from collections.abc import Sequence
from typing import Protocol

from outrider.results import CompletionOutput, Logprob
from outrider.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character


class TextStream(Protocol):
    """Incremental detokenisation: the joined pieces are the text of the tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; never ends inside a character."""
        ...

    def finish(self) -> str:
        """What is left at the end."""
        ...


class TokenizerLike(Protocol):
    """What the engine asks of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def text_of(self, token_id: int) -> str:
        """What a token adds to a text."""
        ...

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TextStream:
        """The text of what comes behind the prompt."""
        ...


class StopStrings:
    """Finds the first stop string in a stream of text, and holds back what may become one."""

    __slots__ = ("_include", "_pending", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._pending = ""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string that was met (then all is over)."""
        if not piece:
            return "", None
        if not self._stops:
            return piece, None
        text = self._pending + piece
        met = self._first_match(text, len(self._pending)) if may_stop else None
        if met is not None:
            start, stop = met
            self._pending = ""
            return text[: start + len(stop) if self._include else start], stop
        held = self._held_back(text)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, when the output ends for another reason."""
        text, self._pending = self._pending, ""
        return text

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first, and of those the longest.

        Only matches that end in the text after `old` count: what was there before was refused
        when it came.
        """
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` that begins one of the stop strings."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class OutputBuilder:
    """The output of one choice while it grows."""

    __slots__ = (
        "_end_ids",
        "_eos_ids",
        "_min_tokens",
        "_new_text",
        "_show_end",
        "_stops",
        "_stream",
        "_text",
        "confidences",
        "finish_reason",
        "logprobs",
        "max_tokens",
        "num_tokens",
        "sources",
        "stop_reason",
    )

    def __init__(
        self,
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: Sequence[int] = (),
        stream: TextStream | None = None,
    ) -> None:
        self._eos_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._end_ids = self._eos_ids | frozenset(params.stop_token_ids or ())
        self._min_tokens = params.min_tokens
        self._show_end = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._stream = stream
        self._text: list[str] = []
        self._new_text: list[str] = []
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.sources: list[str] = []  # one per token, and so are
        self.confidences: list[float | None] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def extend(self, token_ids: Sequence[int]) -> int:
        """Take tokens up to the one that ends the output; return how many were taken."""
        assert self.finish_reason is None, "tokens after the end of an output"
        shown: list[int] = []
        taken = 0
        for token in token_ids:
            taken += 1
            self.num_tokens += 1
            is_end = token in self._end_ids and self._may_stop
            if not is_end or self._show_end:
                shown.append(token)
            if self._stops:  # which token completes a stop string is known only one by one
                self._show(shown)
                shown = []
            if is_end or self.finish_reason or self.num_tokens >= self.max_tokens:
                self._show(shown)
                self._end(token if is_end else None)
                return taken
        self._show(shown)
        return taken

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the output, showing what was held back, but for a character cut in two."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            rest = self._stream.finish().rstrip(REPLACEMENT)
            shown, stop = self._stops.push(rest, self._may_stop)
            self._new_text.append(shown)
            if stop is not None and reason == "length":
                self.finish_reason, self.stop_reason = "stop", stop
        self._new_text.append(self._stops.flush())

    def take_text(self) -> str:
        """The text shown since the last call."""
        text = "".join(self._new_text)
        self._new_text.clear()
        if text:
            self._text.append(text)
        return text

    def completion(self, index: int, token_ids: list[int]) -> CompletionOutput:
        """The result; every list in it has one entry per token."""
        lists = [token_ids, self.sources, self.confidences]
        lists += [] if self.logprobs is None else [self.logprobs]
        count = min(len(each) for each in lists)
        # Only an abort after an interrupted step can find a token half recorded.
        assert count == self.num_tokens or self.finish_reason == "abort", (count, self.num_tokens)
        token_ids = token_ids[:count]
        logprobs, cumulative = None, None
        if self.logprobs is not None:
            logprobs = self.logprobs[:count]
            pairs = zip(logprobs, token_ids, strict=True)
            cumulative = sum(entry[token].logprob for entry, token in pairs)
        return CompletionOutput(
            index=index,
            text="".join(self._text + self._new_text),
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            token_sources=self.sources[:count],
            token_confidences=self.confidences[:count],
        )

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _end(self, end_id: int | None) -> None:
        if self.finish_reason is not None:  # a stop string was met
            return
        if end_id is None:
            self.finish("length")
            return
        self.finish("stop", None if end_id in self._eos_ids else end_id)

    def _show(self, token_ids: list[int]) -> None:
        if self._stream is None or not token_ids:
            return
        shown, stop = self._stops.push(self._stream.push(token_ids), self._may_stop)
        if shown:
            self._new_text.append(shown)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
