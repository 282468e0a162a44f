"""How tokens of one request are chosen. Names and defaults are vLLM's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import SamplingError

MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters, checked on construction.

    Raises:
        SamplingError: a value is out of range; the message names value and range.
    """

    n: int = 1  # independent choices per prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    presence_penalty: float = 0.0  # [-2, 2], over the output
    frequency_penalty: float = 0.0  # [-2, 2], over the output
    repetition_penalty: float = 1.0  # > 0, over prompt and output
    seed: int | None = None  # None: drawn by the engine
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the end of the context
    min_tokens: int = 0  # no end of sequence and no stop id before this many
    logprobs: int | None = None  # of the chosen token, and of this many most likely ones
    logit_bias: dict[int, float] | None = None  # added to the logits, [-100, 100]
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prediction: str | Sequence[int] | None = None  # expected output (text or ids), used as draft
    owner: str = ""  # tenant tag: what this request says is drafted to no other owner
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_ranges()
        self._check_collections()

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken: temperature 0, or too small to matter."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def _check_integers(self) -> None:
        for name, low in (("n", 1), ("top_k", -1), ("min_tokens", 0)):
            _integer(name, getattr(self, name), low)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise SamplingError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63))
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
            if self.logprobs > MAX_LOGPROBS:
                raise SamplingError(f"logprobs must be at most {MAX_LOGPROBS}, got {self.logprobs}")

    def _check_ranges(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        for token, bias in (self.logit_bias or {}).items():
            _integer("a token id in logit_bias", token, 0)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _check_collections(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise SamplingError(f"stop must hold non-empty strings, got {stop!r}")
        if len(stops) > MAX_STOP_STRINGS:
            raise SamplingError(f"stop holds {len(stops)} strings, at most {MAX_STOP_STRINGS}")
        self.stop_strings = tuple(stops)
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            for token in getattr(self, name) or ():
                _integer(f"a token id in {name}", token, 0)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise SamplingError("allowed_token_ids must hold at least one id, got an empty list")


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise SamplingError(f"{name} must be at least {low}, got {value}")


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SamplingError(f"{name} must be a number, got {value!r}")
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside or math.isinf(value):  # NaN fails every comparison
        left, right = "(" if open_low else "[", ")" if math.isinf(high) else "]"
        raise SamplingError(f"{name} must be in {left}{low}, {high}{right}, got {value}")
