"""From what the engine says to the bodies of OpenAI's API, whole or in chunks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import uuid4

from outrider.results import CompletionOutput, Logprob, RequestOutput, StreamChunk
from outrider.serving.errors import quoted, to_event
from outrider.serving.parsers import ChatParser, Said, ToolCall
from outrider.serving.protocol import Call, ChatCall, CompletionCall

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes the same
MARK = "\0"  # stands for text that comes later
REPLACEMENT = "\ufffd"

Asked = TypeVar("Asked", bound=Call)


@dataclass(slots=True)
class Answer(Generic[Asked]):
    """The answer to one call; subclasses know the shapes of their endpoint."""

    call: Asked
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    # By choice, an event that is nothing but text, before and behind the text. Hundreds are sent a
    # second, on CPUs that the engine wants: made anew, each would take five times as long.
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    whole_object = ""
    chunk_object = ""

    def whole(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        n = self.call.num_choices
        choices = [
            self._choice(prompt * n + output.index, output)
            for prompt, result in enumerate(results)
            for output in result.outputs
        ]
        return self._envelope(self.whole_object, choices)

    def events(self, index: int, chunk: StreamChunk) -> bytes:
        """The events that one step of one choice becomes."""
        frame = self._frames.get(index)
        if frame is not None and chunk.finish_reason is None:
            return frame[0] + quoted(chunk.text) + frame[1] if chunk.text else b""
        events = b"".join([to_event(body) for body in self.chunk(index, chunk)])
        if self.says_only_text:  # behind the first event, which may say more
            [body] = self.chunk(index, StreamChunk("", index, MARK))
            before, _, behind = to_event(body).rpartition(quoted(MARK))
            self._frames[index] = (before, behind)
        return events

    def chunk(self, index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        """The bodies of these events."""
        choices = self._pieces(index, chunk)
        bodies = [self._envelope(self.chunk_object, [choice]) for choice in choices]
        if self.shows_usage:
            for body in bodies:
                body["usage"] = None
        return bodies

    def last(self, more: dict[str, Any]) -> dict[str, Any]:
        """The event behind the last choice, with usage and metrics in it."""
        return self._envelope(self.chunk_object, []) | more

    @property
    def shows_usage(self) -> bool:
        options = self.call.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def has_last(self) -> bool:
        """Whether anything is to be told behind the last choice."""
        return self.shows_usage or bool(self.call.include_metrics)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _pieces(self, index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        raise NotImplementedError

    @property
    def says_only_text(self) -> bool:
        """Whether an event between the first and the last is the text of its tokens as it is."""
        raise NotImplementedError

    @property
    def _has_extras(self) -> bool:
        return bool(self.call.return_token_ids or self.call.return_token_sources)

    def _extras(self, part: CompletionOutput | StreamChunk) -> dict[str, Any]:
        """What else was asked for, one entry per token."""
        extras: dict[str, Any] = {}
        if self.call.return_token_ids:
            extras["token_ids"] = part.token_ids
        if self.call.return_token_sources:
            extras["token_sources"] = part.token_sources
            given = part.token_confidences
            extras["token_confidences"] = [None if c is None else round(c, 4) for c in given]
        return extras


@dataclass(slots=True)
class CompletionAnswer(Answer[CompletionCall]):
    """For `/v1/completions`."""

    echoes: list[str] = field(default_factory=list)  # the prompts, if they are to be repeated
    _offsets: dict[int, int] = field(default_factory=dict)  # choice -> characters of its tokens
    _begun: set[int] = field(default_factory=set)

    whole_object = chunk_object = "text_completion"

    @property
    def says_only_text(self) -> bool:
        return self.call.logprobs is None and not self._has_extras

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return self._shape(index, output, output.text)

    def _pieces(self, index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        is_new = index not in self._begun
        is_shown = chunk.text or chunk.finish_reason or (is_new and self.echoes)
        if self.says_only_text and not is_shown:
            return []
        return [self._shape(index, chunk, chunk.text)]

    def _shape(self, index: int, part: CompletionOutput | StreamChunk, text: str) -> dict[str, Any]:
        if self.echoes and index not in self._begun:
            text = self.echoes[index // self.call.num_choices] + text
        self._begun.add(index)
        logprobs = None
        if self.call.logprobs is not None:
            logprobs = self._logprobs(index, part.logprobs or [], self.call.logprobs)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        } | self._extras(part)

    def _logprobs(
        self, index: int, entries: Sequence[dict[int, Logprob]], num_top: int
    ) -> dict[str, Any]:
        chosen = [next(iter(entry.values())) for entry in entries]
        offsets = []
        offset = self._offsets.get(index, 0)
        for one in chosen:
            offsets.append(offset)
            offset += len(one.decoded_token)
        self._offsets[index] = offset
        return {
            "tokens": [one.decoded_token for one in chosen],
            "token_logprobs": [_finite(one.logprob) for one in chosen],
            "top_logprobs": [
                {one.decoded_token: _finite(one.logprob) for one in entry.values()}
                for entry in entries
            ]
            if num_top
            else None,
            "text_offset": offsets,
        }


@dataclass(slots=True)
class ChatAnswer(Answer[ChatCall]):
    """For `/v1/chat/completions`."""

    reads_thoughts: bool = False
    is_thinking: bool = False  # the prompt ends inside the thoughts
    _parsers: dict[int, ChatParser] = field(default_factory=dict)  # of choices that have begun
    _num_calls: dict[int, int] = field(default_factory=dict)

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @property
    def says_only_text(self) -> bool:
        is_read = self.reads_thoughts or self.call.calls_tools or self.call.logprobs
        return not (is_read or self._has_extras)

    def _parser(self) -> ChatParser:
        return ChatParser(self.reads_thoughts, self.call.calls_tools, self.is_thinking)

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        parser = self._parser()
        parts = [parser.push(output.text), parser.finish()]
        calls = [call for part in parts for call in part.calls]
        content = "".join(part.content for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reads_thoughts:
            message["reasoning_content"] = "".join(part.reasoning for part in parts) or None
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": _reason(output.finish_reason, bool(calls)),
            "stop_reason": output.stop_reason,
        } | self._extras(output)

    def _pieces(self, index: int, chunk: StreamChunk) -> list[dict[str, Any]]:
        parser = self._parsers.get(index)
        beginning: list[dict[str, Any]] = []
        if parser is None:
            parser = self._parsers[index] = self._parser()
            beginning = [_piece(index, {"role": "assistant", "content": ""})]
        said = [parser.push(chunk.text)]
        if chunk.finish_reason is not None:
            said.append(parser.finish())
        deltas = [delta for part in said for delta in self._deltas(index, part)]
        more = self._extras(chunk)
        if logprobs := self._logprobs(chunk.logprobs):
            more["logprobs"] = logprobs
        if chunk.finish_reason is not None:
            more["finish_reason"] = _reason(chunk.finish_reason, index in self._num_calls)
            more["stop_reason"] = chunk.stop_reason
        pieces = [_piece(index, delta) for delta in deltas or ([{}] if more else [])]
        if pieces:
            pieces[-1] |= more
        return beginning + pieces

    def _deltas(self, index: int, said: Said) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if said.reasoning:
            deltas.append({"reasoning_content": said.reasoning})
        if said.content:
            deltas.append({"content": said.content})
        for call in said.calls:
            number = self._num_calls.get(index, 0)
            self._num_calls[index] = number + 1
            deltas.append({"tool_calls": [{"index": number} | _call(call)]})
        return deltas

    def _logprobs(self, entries: Sequence[dict[int, Logprob]] | None) -> dict[str, Any] | None:
        if not self.call.logprobs or entries is None:
            return None
        num_top = self.call.top_logprobs or 0
        return {"content": [_token_logprobs(entry, num_top) for entry in entries]}


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex}"


def _piece(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call"), "type": "function", "function": function}


def _token_logprobs(entry: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    listed = list(entry.values())
    top = sorted(listed, key=lambda one: one.rank)[:num_top]
    return _logprob(listed[0]) | {"top_logprobs": [_logprob(one) for one in top]}


def _logprob(found: Logprob) -> dict[str, Any]:
    text = found.decoded_token
    is_part = REPLACEMENT in text  # of a character: its own bytes are not known here
    data = None if is_part else list(text.encode())
    return {"token": text, "logprob": _finite(found.logprob), "bytes": data}


def _finite(value: float) -> float:
    return max(value, LOWEST_LOGPROB)
