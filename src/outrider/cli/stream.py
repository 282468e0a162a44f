"""One answer streamed to the terminal, and the line of numbers under it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.cli.answers import Prompt
from outrider.cli.console import Colours, SourceSplitter, TextWriter, acceptance_line, messages
from outrider.results import RequestMetrics

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams


@dataclass(slots=True)
class StreamedAnswer:
    """What came over a stream, with the times at which it came (seconds)."""

    text: str = ""
    token_sources: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    started: float = field(default_factory=perf_counter)
    first_token_time: float | None = None
    last_token_time: float = 0.0
    num_first_tokens: int = 0  # tokens of the first chunk, which the decode rate leaves out
    metrics: RequestMetrics | None = None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first chunk, None when there was only one."""
        num_tokens = len(self.token_sources) - self.num_first_tokens
        if self.first_token_time is None or num_tokens <= 0:
            return None
        return num_tokens / max(1e-9, self.last_token_time - self.first_token_time)


def new_writer(llm: "LLM", colours: Colours) -> TextWriter:
    """A writer to stdout for one answer of this model."""
    decoder = llm.tokenizer.stream(prompt=llm.tokenizer.lead)
    return TextWriter(SourceSplitter(decoder), colours)


def stream_answer(
    llm: "LLM",
    prompt: Prompt,
    params: "SamplingParams",
    colours: Colours,
    stopped: Callable[[], bool] = lambda: False,
) -> StreamedAnswer:
    """Write an answer to stdout while it comes; `stopped` ends it early."""
    answer = StreamedAnswer()
    writer = new_writer(llm, colours)
    stream = llm.stream(prompt, params)
    try:
        for chunk in stream:
            now = perf_counter()
            if answer.first_token_time is None and chunk.token_ids:
                answer.first_token_time, answer.num_first_tokens = now, len(chunk.token_ids)
            answer.last_token_time = now
            answer.text += chunk.text
            answer.token_sources += chunk.token_sources
            answer.finish_reason = chunk.finish_reason
            if chunk.result is not None:
                answer.metrics = chunk.result.metrics
            writer.write(chunk.text, chunk.token_ids, chunk.token_sources)
            if stopped():
                break
    finally:
        stream.close()  # an answer cut short gives its KV back
    sys.stdout.write("\n")
    return answer


def print_summary(answer: StreamedAnswer, colours: Colours) -> None:
    """Legend and numbers on stderr, so that piped text stays clean."""
    console = messages()
    if console.is_terminal and answer.token_sources:
        console.print(colours.legend(answer.token_sources))
    console.print(summary_line(answer), style="dim", soft_wrap=True)


def summary_line(answer: StreamedAnswer) -> str:
    """Tokens, speed, tokens per forward and acceptance in one line."""
    seconds = answer.last_token_time - answer.started
    parts = [f"{len(answer.token_sources)} tokens in {max(0.0, seconds):.2f} s"]
    if answer.decode_rate is not None:
        parts.append(f"{answer.decode_rate:.0f} tokens/s")
    if answer.first_token_time is not None:
        parts.append(f"first token {answer.first_token_time - answer.started:.2f} s")
    speculative = answer.metrics.speculative_decoding if answer.metrics else None
    if speculative is not None:
        parts.append(f"{speculative.tokens_per_target_step:.2f} tokens per forward")
        parts.append(acceptance_line(speculative))
    return " · ".join(parts)
