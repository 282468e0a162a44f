"""What a user may write into sampling parameters, and what one sentence refuses."""

import math
import sys
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ALPHABET, FakeTarget, make_engine

from outrider import LLM
from outrider.errors import SamplingError
from outrider.sampling_params import BOOLEANS, INTEGERS, NUMBERS, TOKEN_IDS, SamplingParams

HUGE = 10**400
UNPRINTABLE = 10**5000  # Python refuses to print so many digits
NO_NUMBER: list[Any] = ["5", [1], {}, (), object(), True, b"1", 1j]
NO_IDS: list[Any] = [
    *(5, 1.5, True, object(), b"ab", bytearray(b"a"), "ab", {1: 2}, {1, 2}, UNPRINTABLE),
    *([1.0], [True], ["1"], [None], [[1]], [-1], iter([1])),
    *(np.array([1.5]), np.array([[1]]), np.array(1), np.array([True]), torch.tensor([0.5])),
]


def made(**given: Any) -> SamplingParams:
    return SamplingParams(**given)


def refused(**given: Any) -> str:
    with pytest.raises(SamplingError) as error:
        made(**given)
    message = str(error.value)
    assert len(message) < 300 and "\n" not in message
    assert any(name in message for name in given)
    return message


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_what_is_no_number_is_refused(name: str) -> None:
    for value in [*NO_NUMBER, float("nan"), float("inf"), -HUGE]:
        refused(**{name: value})
    if name not in ("max_tokens", "min_tokens"):
        refused(**{name: HUGE})
        refused(**{name: UNPRINTABLE})


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_no_float_and_has_its_range(name: str) -> None:
    refused(**{name: 1.5})
    low, high = INTEGERS[name]
    assert f"[{low}, " in refused(**{name: low - 1}) or f"at least {low}" in refused(
        **{name: low - 1}
    )
    if high is not None:
        assert str(high) in refused(**{name: high + 1})
        assert getattr(made(**{name: high}), name) == high
    assert type(getattr(made(**{name: np.int64(3)}), name)) is int


def test_seeds_have_64_bits_and_penalties_stay_finite_in_float32() -> None:
    for seed in (-(2**63) - 1, 2**64):
        refused(seed=seed)
    for penalty in (0, 1e-300, 1e300):
        refused(repetition_penalty=penalty)
    assert made(temperature=np.float32(0.5)).temperature == 0.5
    assert SamplingParams(temperature=sys.float_info.max).temperature > 1e300


@pytest.mark.parametrize("name", [*TOKEN_IDS, "prediction"])
def test_ids_are_any_sequence_of_integers_and_nothing_else(name: str) -> None:
    for value in NO_IDS:
        if not (name == "prediction" and isinstance(value, str)):
            refused(**{name: value})
    arrays: list[Any] = [np.array([1, 2], np.uint8), torch.tensor([1, 2])]
    for value in [[1, 2], (1, 2), range(1, 3), [np.int32(1), 2], *arrays]:
        found = getattr(made(**{name: value}), name)
        assert found == [1, 2] and [type(token) for token in found] == [int, int]


def test_texts_booleans_and_biases() -> None:
    for stop in (5, True, object(), b"ab", {"a": 1}, {"a"}, [b"a"], [5], [""], [None], iter("a")):
        refused(stop=stop)
    assert SamplingParams(stop=("a", "b")).stop_strings == ("a", "b")
    for bias in ([1], "1", 5, True, [(1, 2)], {"1": 2}, {1: "2"}, {1: HUGE}, {-1: 1}, {True: 1}):
        refused(logit_bias=bias)
    given = MappingProxyType({np.int64(3): np.float32(2)})
    assert made(logit_bias=given).logit_bias == {3: 2.0}
    for name in BOOLEANS:
        for value in (0, 1, "no", None, []):
            refused(**{name: value})
    for owner in (None, 5, b"me"):
        refused(owner=owner)


@pytest.mark.parametrize("name", [*TOKEN_IDS, "prediction"])
def test_ids_beyond_the_vocabulary_are_refused_at_submission(name: str) -> None:
    engine = make_engine()
    for token in (engine.target.vocab_size, 10**30, UNPRINTABLE):
        with pytest.raises(SamplingError, match=f"{name} holds token id"):
            engine.add_request("r", [1], made(**{name: [1, token]}))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 0), ("n", -1), ("temperature", math.nan), ("max_tokens", "many"), ("stop", [""]),
     ("logit_bias", {1: 900}), ("structured_outputs", {"xml": "a"})],
)  # fmt: skip
def test_what_a_field_is_set_to_later_is_refused_at_submission(name: str, value: object) -> None:
    llm = LLM(target=FakeTarget(24), tokenizer=None, kv_cache_tokens=256)
    params = SamplingParams(max_tokens=3)
    setattr(params, name, value)
    with pytest.raises(SamplingError, match=name):
        llm.generate({"prompt_token_ids": [3]}, params)
    assert not llm.engine.has_work


def test_what_a_field_is_set_to_later_is_obeyed() -> None:
    llm = LLM(target=FakeTarget(len(ALPHABET.pieces)), tokenizer=ALPHABET, kv_cache_tokens=256)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    [plain] = llm.generate("the", params)[0].outputs
    params.stop = plain.text[5]
    params.n = 2
    for output in llm.generate("the", params)[0].outputs:
        assert output.text == plain.text[: plain.text.index(plain.text[5])]
