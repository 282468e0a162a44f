"""How tokens of one request are chosen. Names and defaults are vLLM's."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.checks import INT32_MAX, boolean, integer, number, shown, token_ids
from outrider.errors import SamplingError

MAX_CHOICES = 1024
MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64
# Beyond these a float32 logit under a repetition penalty may overflow.
PENALTY_RANGE = (1e-6, 1e6)

# Name -> lowest and highest; with None below, the range is open at 0. None itself is accepted
# where it is the default.
INTEGERS: dict[str, tuple[int, int | None]] = {
    "n": (1, MAX_CHOICES),
    "top_k": (-1, INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "logprobs": (0, MAX_LOGPROBS),
}
NUMBERS: dict[str, tuple[float | None, float]] = {
    "temperature": (0.0, sys.float_info.max),
    "top_p": (None, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": PENALTY_RANGE,
}
BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")
GRAMMARS = ("json", "json_object", "regex", "choice", "grammar")
OPTIONAL = ("seed", "max_tokens", "logprobs")


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters, checked on construction; token ids become lists of ints.

    Raises:
        SamplingError: a value is out of range; the message names value and range.
    """

    n: int = 1  # independent choices per prompt, at most 1024
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    presence_penalty: float = 0.0  # [-2, 2], over the output
    frequency_penalty: float = 0.0  # [-2, 2], over the output
    repetition_penalty: float = 1.0  # [1e-6, 1e6], over prompt and output
    seed: int | None = None  # of 64 bits; None: drawn by the engine
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
    structured_outputs: Mapping[str, Any] | None = None  # json, json_object, regex, choice, grammar
    owner: str = ""  # tenant tag: what this request says is drafted to no other owner
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Read the fields, which may have been set anew.

        Raises:
            SamplingError: a value that is none of its field, or fields that contradict each other.
        """
        self._check_scalars()
        self._check_stops()
        self._check_token_ids()
        self._check_grammar()

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken: temperature 0, or too small to matter."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def _check_scalars(self) -> None:
        for name, (low, high) in INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                setattr(self, name, integer(name, value, low, high, SamplingError))
        for name, (lowest, highest) in NUMBERS.items():
            value, is_open = getattr(self, name), lowest is None
            found = number(name, value, lowest or 0.0, highest, SamplingError, is_open)
            setattr(self, name, found)
        for name in BOOLEANS:
            boolean(name, getattr(self, name), SamplingError)
        if not isinstance(self.owner, str):
            raise SamplingError(f"owner must be text, got {shown(self.owner)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(
                f"min_tokens must be at most max_tokens ({shown(self.max_tokens)}), "
                f"got {shown(self.min_tokens)}"
            )

    def _check_grammar(self) -> None:
        if self.structured_outputs is None:
            return
        check_form(self.structured_outputs)
        others = ("ignore_eos", "min_tokens", "allowed_token_ids", "banned_token_ids")
        if given := [name for name in others if getattr(self, name)]:
            raise SamplingError(
                f"structured_outputs decides alone which tokens may come, got {given[0]} too"
            )

    def _check_stops(self) -> None:
        stops = (
            [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        )
        if not isinstance(stops, Sequence) or isinstance(stops, bytes | bytearray | memoryview):
            raise SamplingError(f"stop must be text or a list of texts, got {shown(stops)}")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise SamplingError(f"stop must hold non-empty strings, got {shown(stop)}")
        if len(stops) > MAX_STOP_STRINGS:
            raise SamplingError(f"stop holds {len(stops)} strings, at most {MAX_STOP_STRINGS}")
        self.stop_strings = tuple(stops)

    def _check_token_ids(self) -> None:
        for name in TOKEN_IDS:
            if getattr(self, name) is not None:
                setattr(self, name, token_ids(name, getattr(self, name), SamplingError))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise SamplingError("allowed_token_ids must hold at least one id, got an empty list")
        if self.prediction is not None and not isinstance(self.prediction, str):
            self.prediction = token_ids("prediction", self.prediction, SamplingError)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise SamplingError(
                    f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}"
                )
            self.logit_bias = {
                integer("a token id in logit_bias", token, 0, None, SamplingError): number(
                    f"logit_bias[{shown(token)}]", bias, -100.0, 100.0, SamplingError
                )
                for token, bias in self.logit_bias.items()
            }


def biases(given: Mapping[str, float], name: str = "logit_bias") -> dict[int, float]:
    """By token id what JSON, whose keys are texts, holds by its digits.

    Raises:
        SamplingError: a key is no token id, or two are the same one ("1" and "01").
    """
    found: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise SamplingError(f"{name} has the key {shown(key)}, expected token ids")
        if int(key) in found:
            raise SamplingError(f"{name} holds token id {int(key)} twice")
        found[int(key)] = bias
    return found


def check_form(given: Any) -> None:
    """Raise SamplingError unless it is what `SamplingParams.structured_outputs` takes."""
    if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in GRAMMARS:
        raise SamplingError(
            f"structured_outputs must have one of the keys {', '.join(GRAMMARS)}, "
            f"got {shown(given)}"
        )
    [(kind, value)] = given.items()
    fits = {
        "json": isinstance(value, Mapping | str),
        "json_object": value is True,
        "choice": _is_texts(value),
    }
    if not fits.get(kind, isinstance(value, str)):
        raise SamplingError(f"structured_outputs.{kind} has a wrong value: {shown(value)}")


def _is_texts(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and len(value) > 0 and all(isinstance(text, str) and text for text in value)
