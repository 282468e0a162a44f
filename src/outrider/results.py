"""What a request gives back. Names are vLLM's; `token_sources` and the split by source are ours."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log probability of a token under the raw model, before temperature, penalties and filters."""

    logprob: float
    rank: int  # 1 = the most likely token
    decoded_token: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of one request. Ids, text and logprobs all end at the same place."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while running
    stop_reason: int | str | None = None  # the stop id or string met, None for EOS; or the error
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token
    token_sources: list[str] = field(default_factory=list)  # who drafted each token; "target"
    # What their sources gave for them, 0 to 1; None where nobody did.
    token_confidences: list[float | None] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class SourceMetrics:
    """What one source drafted for a request, and what was kept of it."""

    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    draft_tokens_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)  # never above the drafted

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)


@dataclass(slots=True)
class SpeculativeMetrics:
    """Acceptance of one request (summed over its choices); no count includes the bonus token."""

    num_target_steps: int = 0  # decode forwards the request took part in, drafts or none
    num_spec_steps: int = 0  # those that verified at least one draft token
    num_draft_tokens: int = 0  # submitted to the target
    num_accepted_draft_tokens: int = 0
    num_output_tokens: int = 0
    acceptance_histogram: dict[int, int] = field(default_factory=dict)  # accepted -> steps
    per_source: dict[str, SourceMetrics] = field(default_factory=dict)
    rejection_causes: dict[str, int] = field(default_factory=dict)  # cause -> draft tokens

    @property
    def num_rejected_draft_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_draft_tokens

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step that verified drafts, bonus included, as vLLM counts it."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def tokens_per_target_step(self) -> float:
        """Tokens emitted per decode forward: steps without drafts count too."""
        return self.num_output_tokens / max(1, self.num_target_steps)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of `time.perf_counter`, and its acceptance."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    speculative_decoding: SpeculativeMetrics | None = None  # None: plain decoding
    scheduled_time: float | None = None  # end of waiting
    num_cached_tokens: int = 0  # of the prompt, whose KV an earlier request left


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(slots=True)
class StreamChunk:
    """What one step added to one choice. Joined chunks are the `CompletionOutput`."""

    request_id: str
    index: int
    text: str  # may lag behind token_ids: inside a character, or what may become a stop string
    token_ids: list[int] = field(default_factory=list)
    token_sources: list[str] = field(default_factory=list)  # one per token
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token
    result: RequestOutput | None = None  # with the last chunk of the last choice
    token_confidences: list[float | None] = field(default_factory=list)  # one per token
