"""Predicted text, scripted drafts, and building sources from a config."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.build import (
    METHODS,
    build_sources,
    check_config,
    split_rule,
)
from outrider.drafting.lookup import LookupSource
from outrider.drafting.predicted import PredictedSource
from outrider.drafting.scripted import ScriptedSource
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams

PROMPT = [900, 901]


def context(
    output: list[int], prediction: list[int] | None = None, request_id: str = "r"
) -> DraftContext:
    text = np.array(PROMPT + output, np.int32)
    predicted = None if prediction is None else np.array(prediction, np.int32)
    return DraftContext(request_id, text, len(PROMPT), SamplingParams(), prediction=predicted)


def propose(source: DraftSource, ctx: DraftContext, budget: int = 8) -> Draft:
    (draft,) = source.propose([ctx], [budget])
    draft.check()
    assert len(draft) <= budget
    return draft


def lost_tokens(output: list[int], prediction: list[int], budget: int = 8) -> list[int]:
    """Decode an output with a prediction; positions where no draft was or it was wrong."""
    source = PredictedSource(budget)
    place, lost = 0, []
    while place < len(output):
        draft = propose(source, context(output[:place], prediction), budget)
        accepted = 0
        for drafted, token in zip(draft.token_ids, output[place:], strict=False):
            if drafted != token:
                break
            accepted += 1
        if accepted < len(draft) or not len(draft):
            lost.append(place + accepted)
        new = output[place : place + accepted + 1]
        source.observe([Outcome("r", draft, accepted, new)])
        place += accepted + 1
    return [p for p in lost if p < len(output)]


# ---- predicted


def test_a_prediction_that_holds_is_drafted_from_its_start_to_its_end() -> None:
    source = PredictedSource(num_speculative_tokens=4)
    prediction = [1, 2, 3, 4, 5, 6]
    draft = propose(source, context([], prediction))
    assert draft.token_ids == [1, 2, 3, 4]
    assert draft.source == "predicted"
    assert min(draft.confidence) > 0.8
    assert propose(source, context([1, 2, 3, 4, 5], prediction)).token_ids == [6]
    assert propose(source, context([1, 2, 3, 4, 5, 6], prediction)).token_ids == []


def test_without_a_prediction_nothing_is_drafted() -> None:
    source = PredictedSource()
    assert propose(source, context([1, 2])).token_ids == []
    assert propose(source, context([1, 2], [])).token_ids == []


TEXT = list(range(100, 160))
EDITS = {
    "replaced": ([*TEXT[:20], 7, *TEXT[21:]], 2),
    "three replaced": ([*TEXT[:20], 7, 8, 9, *TEXT[23:]], 4),
    "inserted": ([*TEXT[:20], 7, 8, *TEXT[20:]], 2),
    "twelve inserted": (TEXT[:20] + list(range(1, 13)) + TEXT[20:], 12),
    "three deleted": (TEXT[:20] + TEXT[23:], 1),
    "thirty deleted": (TEXT[:20] + TEXT[50:], 2),
    "moved to the front": (TEXT[40:] + TEXT[:40], 4),
}


@pytest.mark.parametrize("name", EDITS)
def test_the_place_is_found_again_within_a_few_tokens(name: str) -> None:
    output, num_lost = EDITS[name]
    assert len(lost_tokens(output, TEXT)) == num_lost


def test_an_ambiguous_place_is_the_nearest_one_ahead() -> None:
    line = [1, 2, 3]
    prediction = [*line, 10, *line, 11, *line, 12, *line, 13]
    source = PredictedSource()
    output = [*line, 10, *line, 50, 1, 2]  # 11 was replaced
    propose(source, context(output[:7], prediction))
    assert propose(source, context(output, prediction)).token_ids[:2] == [3, 12]


def test_a_guess_says_that_it_is_one() -> None:
    source = PredictedSource()
    on_track = propose(source, context([1, 2, 3, 4], list(range(1, 30))))
    lost = propose(source, context([1, 2, 3, 4, 99], list(range(1, 30))))
    assert lost.confidence[0] < 0.5 < on_track.confidence[0]
    for _ in range(60):
        source.observe([Outcome("r", lost, 0, [7])])
    lower = propose(source, context([1, 2, 3, 4, 99], list(range(1, 30))))
    assert lower.confidence[0] < lost.confidence[0] / 2


def test_an_output_that_has_nothing_to_do_with_the_prediction_is_left_alone() -> None:
    source = PredictedSource()
    output = [7, 8] * 20
    drafted = [len(propose(source, context(output[:n], TEXT))) > 0 for n in range(40)]
    assert drafted[:17] == [True] * 17
    assert not any(drafted[17:])
    assert propose(source, context([*output, *TEXT[30:32]], TEXT)).token_ids == []
    assert propose(source, context([*output, *TEXT[30:33]], TEXT)).token_ids[:2] == TEXT[33:35]


def test_a_prediction_is_forgotten_with_its_request() -> None:
    source = PredictedSource()
    propose(source, context([1, 2], [1, 2, 3]))
    source.release("r")
    source.release("r")
    assert propose(source, context([], [7, 8])).token_ids == [7, 8]
    assert propose(source, context([1], [1, 5], "other")).token_ids == [5]


tokens = st.lists(st.integers(0, 3), max_size=30)


@given(output=tokens, prediction=tokens)
@settings(max_examples=100, deadline=None)
def test_any_prediction_for_any_output(output: list[int], prediction: list[int]) -> None:
    for place in lost_tokens(output, prediction, budget=3):
        assert place < len(output)


# ---- scripted


def test_scripts_by_position_by_request_and_by_function() -> None:
    tree = Draft([5, 6, 7], parents=[-1, -1, 0], confidence=[0.9, 0.1, 0.5])
    source = ScriptedSource({0: [1, -1, 99_999], 2: tree, ("b", 2): [3]})
    assert propose(source, context([])).token_ids == [1, -1, 99_999]
    assert propose(source, context([4])).token_ids == []
    assert propose(source, context([4, 4])).parents == [-1, -1, 0]
    cut = propose(source, context([4, 4]), budget=2)
    assert (cut.token_ids, cut.parents, cut.confidence) == ([5, 6], [-1, -1], [0.9, 0.1])
    assert propose(source, context([4, 4], request_id="b")).token_ids == [3]
    echo = ScriptedSource(lambda ctx: ctx.token_ids[-1:].tolist() * 3, name="echo")
    draft = propose(echo, context([8]))
    assert (draft.token_ids, draft.source) == ([8, 8, 8], "echo")
    assert propose(ScriptedSource(lambda ctx: None), context([8])).token_ids == []


def test_scripted_cuts_probabilities_and_remembers_what_it_was_told() -> None:
    source = ScriptedSource({0: Draft([1, 2], probs=torch.eye(2))})
    draft = propose(source, context([]), budget=1)
    assert draft.probs is not None and draft.probs.tolist() == [[1.0, 0.0]]
    outcome = Outcome("r", draft, 1, [1, 5])
    source.observe([outcome])
    source.finish(context([1, 5]))
    source.release("r")
    assert (source.outcomes, source.finished, source.released) == ([outcome], ["r"], ["r"])


# ---- config


class Custom(DraftSource):
    name = "custom"

    def __init__(self, width: int = 3) -> None:
        self.width = width


def names(config: Any) -> list[str]:
    return [source.name for source in build_sources(config)]


def test_auto_none_sources_and_lists() -> None:
    assert names("auto") == ["lookup", "predicted", "forced"]
    assert names({"method": "auto"}) == names("auto")
    assert names(None) == []
    mine = ScriptedSource({})
    assert build_sources(mine) == [mine]
    built = build_sources([{"method": "lookup"}, mine, {"method": "predicted"}])
    assert [source.name for source in built] == ["lookup", "scripted", "predicted"]
    assert built[1] is mine


def test_keys_reach_the_sources() -> None:
    (lookup,) = build_sources(
        {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4,
         "prompt_lookup_min": 2, "enforce_eager": True}
    )  # fmt: skip
    assert isinstance(lookup, LookupSource)
    assert (lookup.max_draft_tokens, lookup._seats.min_match, lookup._store) == (7, 2, None)
    (default,) = build_sources({"method": "ngram"})
    assert isinstance(default, LookupSource) and default._seats.min_match == 5
    (suffix,) = build_sources(
        {"method": "suffix", "suffix_decoding_max_cached_requests": 10,
         "suffix_decoding_min_token_prob": 0.25, "suffix_decoding_max_tree_depth": 24}
    )  # fmt: skip
    assert isinstance(suffix, LookupSource) and suffix._store is not None
    assert suffix._store.max_tokens == 5120
    assert suffix._seats.min_survival == 0.25
    (alone,) = build_sources({"method": "suffix", "suffix_decoding_max_cached_requests": 0})
    assert isinstance(alone, LookupSource) and alone._store is None
    (custom,) = build_sources({"method": f"{__name__}:Custom", "width": 5})
    assert isinstance(custom, Custom) and custom.width == 5


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"method": "lokup"}, ["unknown method 'lokup'", "did you mean 'lookup'?", "draft_model"]),
        ({"method": "lookup", "min_mach": 2}, ["'min_mach'", "'lookup'", "'min_match'?", "Known"]),
        ({"method": "ngram", "suffix_decoding_min_token_prob": 0.1}, ["'ngram'", "Known keys"]),
        ({"method": "auto", "model": "x"}, ['"auto" takes no keys', 'as ["auto", {…}]']),
        ({"method": "span"}, ["'span' is not available in this version"]),
        ({"method": "medusa"}, ["no medusa drafter ships", "'model'", "outrider train"]),
        ({"method": "deepseek_mtp"}, ["not available in this version"]),
        ({"method": "custom_class", "model": "a.B"}, ["package.module:Class"]),
        ({"method": "ngram", "quantization": "fp8"}, ["quantization='fp8'", "no meaning"]),
        ({"method": "lookup", "draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size=2"]),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, ["at least"]),
        ({"method": "ngram", "prompt_lookup_min": "4"}, ["prompt_lookup_min", "'4'"]),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 3}, ["suffix_decoding_min", "3"]),
        ({"method": "lookup", "num_speculative_tokens": 0}, ["num_speculative_tokens", "got 0"]),
        ({"method": "no.such.module:Class"}, ["no.such.module:Class", "cannot be imported"]),
        ({"method": "math:pi"}, ["'math:pi' must be a subclass", "3.14"]),
        ({"method": f"{__name__}:Custom", "wide": 5}, ["does not take ['wide']"]),
        ({"num_speculative_tokens": 3}, ["needs a method"]),
        ({}, ["needs a method"]),
        ({"method": "draft_model"}, ["needs the key", "got None"]),
        ({"method": "draft_model", "model": "x"}, ["'x' cannot be loaded"]),
        ("lookup", ['must be "auto"', "'lookup'"]),
        ([["lookup"]], ["an object or a DraftSource", "['lookup']"]),
        (3, ["an object or a list, got 3"]),
        ({"method": "lookup", "rejection_sample_method": "magic"}, ["invariant", "'magic'"]),
    ],
)
def test_a_wrong_config_is_refused_with_what_was_given_and_expected(
    config: Any, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        build_sources(config)
    for part in parts:
        assert part in str(error.value)


WRONG_VALUES: list[Any] = ["5", [1], {}, True, -1, 10**30, 10**5000, float("nan"), object()]
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


KEYS_OF = {name: [*method.keys, *method.accepted] for name, method in METHODS.items()}


@pytest.mark.parametrize("method", KEYS_OF)
def test_every_key_of_every_method_has_its_type_and_range(method: str) -> None:
    for key in KEYS_OF[method]:
        for value in [*WRONG_VALUES, DEEP]:
            if key in ("path", "model") and isinstance(value, str):
                continue
            if key == "parallel_drafting" and value is True:
                continue
            needed = {"model": "x"} if method == "draft_model" else {}
            config = {"method": method, **needed, key: value}
            for refuse in (build_sources, check_config):
                with pytest.raises(ConfigError) as error:
                    refuse(config)
                assert key in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "config", [DEEP, [DEEP], {"method": DEEP}, {"a": DEEP}, {"method": "a:b:c"}]
)
def test_a_config_of_any_shape_is_one_sentence(config: Any) -> None:
    for refuse in (build_sources, check_config):
        with pytest.raises(ConfigError):
            refuse(config)


@pytest.mark.parametrize(
    "path", ["..:x", ":x", "a.b:", "outrider:LLM", ":", "failing_module:Source"]
)
def test_a_class_that_cannot_be_imported_is_named(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for refuse in (build_sources, check_config):
        with pytest.raises(ConfigError, match=r"cannot be imported|must be a subclass"):
            refuse({"method": path})


def test_the_accept_rule_is_split_off() -> None:
    assert split_rule("auto") == ("auto", "invariant")
    assert split_rule(None) == (None, "invariant")
    config = {"method": "lookup", "rejection_sample_method": "standard"}
    assert split_rule(config) == ({"method": "lookup"}, "rejection")
    assert names(config) == ["lookup"]
    assert split_rule({"rejection_sample_method": "block"}) == ("auto", "block")
    mine = ScriptedSource({})
    parts = [
        {"method": "lookup"},
        mine,
        {"method": "predicted", "rejection_sample_method": "block"},
    ]
    assert split_rule(parts) == ([{"method": "lookup"}, mine, {"method": "predicted"}], "block")
    two = [{"rejection_sample_method": rule} for rule in ("block", "invariant")]
    with pytest.raises(ConfigError, match="one for all sources"):
        split_rule(two)
