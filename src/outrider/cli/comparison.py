"""Plain against speculative decoding of the same prompts by one target."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from outrider.cli.answers import Prompt, answer, decode_rate, speculative_json
from outrider.cli.console import SourceSplitter, Span
from outrider.results import RequestOutput, SpeculativeMetrics
from outrider.target.base import PAGE_SIZE

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams

CONTEXT_CHARACTERS = 60  # shown of the common text before a difference


@dataclass(slots=True)
class Difference:
    """Where two answers part: the token index, both tokens, and the text they share before."""

    position: int
    plain_token: str
    speculative_token: str
    context: str


@dataclass(slots=True)
class Side:
    """All rounds of one way of decoding a prompt."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs[0].outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].outputs[0].token_ids

    @property
    def token_sources(self) -> list[str]:
        return self.outputs[0].outputs[0].token_sources

    @property
    def rates(self) -> list[float]:
        """Decoded tokens per second of each round; without the answers too short to time."""
        return [rate for output in self.outputs if (rate := decode_rate(output)) is not None]

    @property
    def rate(self) -> float | None:
        """Median over the rounds."""
        return median(self.rates) if self.rates else None

    @property
    def metrics(self) -> SpeculativeMetrics | None:
        return self.outputs[0].metrics.speculative_decoding


@dataclass(slots=True)
class Comparison:
    """One prompt decoded both ways."""

    label: str
    prompt: str
    plain: Side = field(default_factory=Side)
    speculative: Side = field(default_factory=Side)
    difference: Difference | None = None
    spans: list[Span] = field(default_factory=list)  # the speculative text, by source

    @property
    def same_text(self) -> bool:
        return self.difference is None

    @property
    def speedup(self) -> float | None:
        if self.plain.rate is None or self.speculative.rate is None:
            return None
        return self.speculative.rate / self.plain.rate

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values of everything the terminal shows."""
        metrics = self.speculative.metrics
        return {
            "label": self.label,
            "prompt": self.prompt,
            "same_text": self.same_text,
            "first_difference": None if self.difference is None else asdict(self.difference),
            "speedup": self.speedup,
            "num_output_tokens": len(self.plain.token_ids),
            "plain": {"tokens_per_second": self.plain.rate, "rounds": self.plain.rates},
            "speculative": {
                "tokens_per_second": self.speculative.rate,
                "rounds": self.speculative.rates,
                "metrics": None if metrics is None else speculative_json(metrics),
            },
            "text": self.speculative.text,
        }


def twin(
    llm: "LLM", speculative_config: Any = None, max_num_seqs: int | None = None, **options: Any
) -> "LLM":
    """The same weights and KV room with other sources, or none; `options` are more of `LLM`.

    The two share their KV memory: only one of them may hold requests at a time.
    """
    from outrider.llm import LLM

    return LLM(
        target=llm.target,
        tokenizer=llm.tokenizer,
        eos_token_ids=llm.eos_token_ids,
        speculative_config=speculative_config,
        max_model_len=llm.engine.max_model_len,
        max_num_seqs=max_num_seqs or llm.engine.scheduler.max_requests,
        kv_cache_tokens=llm.engine.arena.num_pages * PAGE_SIZE,
        **options,
    )


def compare_prompt(
    plain: "LLM",
    speculative: "LLM",
    prompt: Prompt,
    params: "SamplingParams",
    rounds: int,
    label: str = "",
    done: Callable[[], None] = lambda: None,
) -> Comparison:
    """Decode one prompt both ways, taking turns, so that a slow minute of the machine hits both.

    `done` is called after each answer. Every answer of every round is compared: a text that
    changes from round to round counts as different.
    """
    result = Comparison(label, prompt if isinstance(prompt, str) else prompt[-1]["content"])
    sides = [(plain, result.plain), (speculative, result.speculative)]
    for number in range(rounds):
        # A source that learns from finished outputs must not meet its own answer again.
        asked = replace(params, owner=f"round {number}")
        for llm, side in sides if number % 2 == 0 else sides[::-1]:
            side.outputs += answer(llm, [prompt], asked)
            done()
    reference = result.plain.token_ids
    for output in (*result.plain.outputs, *result.speculative.outputs):
        choice = output.outputs[0].token_ids
        if choice != reference and result.difference is None:
            result.difference = first_difference(reference, choice, speculative.tokenizer.decode)
    shown = result.speculative
    before = shown.outputs[0].prompt_token_ids
    splitter = SourceSplitter(speculative.tokenizer.stream(prompt=before))
    result.spans = splitter.split(shown.text, shown.token_ids, shown.token_sources)
    return result


def first_difference(
    plain: Sequence[int], speculative: Sequence[int], decode: Callable[[list[int]], str]
) -> Difference | None:
    """The first place where two lists of tokens differ; a missing token is shown as the end."""
    if list(plain) == list(speculative):
        return None
    position = next(
        (i for i, pair in enumerate(zip(plain, speculative, strict=False)) if pair[0] != pair[1]),
        min(len(plain), len(speculative)),
    )

    def token(ids: Sequence[int]) -> str:
        return decode([ids[position]]) if position < len(ids) else "<end>"

    shared = decode(list(plain[:position]))[-CONTEXT_CHARACTERS:]
    return Difference(position, token(plain), token(speculative), shared)
