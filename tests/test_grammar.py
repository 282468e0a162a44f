"""Output that follows a grammar: plain decoding's text under any drafts, and never a breach."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import SCRIPTS
from fakes import FakeTarget, ReplaySource, SubmitAll
from toy_models import toy_tokenizer

import outrider.grammar
from outrider import LLM, Draft, SamplingError, SamplingParams
from outrider.drafting.forced import ForcedSource
from outrider.grammar import Grammars
from outrider.target.load import load_model
from outrider.tokenizer import Tokenizer

pytest.importorskip("llguidance")

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{0,6}$"},  # the toy knows no whole é
        "age": {"type": "integer", "maximum": 999, "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": {"json": SCHEMA},
    "text": {"json": json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})},
    "regex": {"regex": "[a-c]{2,9}(one|two)[0-9]"},
    "choice": {"choice": ["yes", "no", 'per"haps']},
    "lark": {"grammar": 'start: "the" /[xyz]{1,4}/ ";"'},
}
DOCUMENTS = [  # with blanks at other places, and strings where others have objects
    '{"u": "This is", "v": {"c1": [1, 2.5, {"d": null}], "e": "f g"}}',
    '{"u":{"c":"This","d":{"a":[true,"x y"]}},"w":"end"}',
    '{ "name" : "John", "address" : { "street" : "Main 12", "zip" : 12345 } }',
    '{"tags": ["a", "b c"], "n": -1e5, "o": {}, "p": {"q": {"r": "s"}}}',
]
PEOPLE = {
    "type": "object",
    "properties": {"u": {"type": ["string", "object"]}, "name": {"type": "string"}},
    "additionalProperties": True,
}
TOKENIZER = Tokenizer.from_transformers(toy_tokenizer())


def make_llm(*sources) -> LLM:
    return LLM(
        target=FakeTarget(96), tokenizer=TOKENIZER, eos_token_ids=EOS, kv_cache_tokens=4096,
        speculative_config=list(sources) or None, policy=SubmitAll() if sources else None,
    )  # fmt: skip


def params(grammar: dict, **changes) -> SamplingParams:
    values = {"temperature": 0.8, "seed": 3, "max_tokens": 120} | changes
    return SamplingParams(structured_outputs=grammar, **values)


def fits(name: str, text: str) -> bool:
    if name == "regex":
        return re.fullmatch("[a-c]{2,9}(one|two)[0-9]", text) is not None
    if name == "choice":
        return text in GRAMMARS["choice"]["choice"]
    if name == "lark":
        return re.fullmatch("the[xyz]{1,4};", text) is not None
    found = json.loads(text)
    if name == "text":
        return len(found) <= 3 and all(isinstance(one, bool) for one in found)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 6
        and 0 <= found["age"] <= 999
        and set(found["tags"]) <= {"red", "blue"}
    )


@pytest.mark.parametrize("name", GRAMMARS)
def test_plain_text_follows_the_grammar_to_its_end(name):
    wanted = [params(GRAMMARS[name], seed=seed) for seed in range(6)]
    wanted.append(params(GRAMMARS[name], temperature=0))
    outputs = [one.outputs[0] for one in make_llm().generate(["the end"] * 7, wanted)]
    assert all(one.finish_reason == "stop" and one.token_ids[-1] == EOS for one in outputs)
    assert all(fits(name, one.text) for one in outputs), [one.text for one in outputs]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_drafts_never_change_a_text_with_a_grammar(script):  # X1: its end lies inside drafts
    for name, grammar in GRAMMARS.items():
        for changes in ({}, {"temperature": 0.0}, {"frequency_penalty": 1.0, "n": 2}):
            wanted = params(grammar, **changes)
            [plain] = make_llm().generate("the end", wanted)
            n = len(plain.outputs)
            known = {
                "0" if n == 1 else f"0#{one.index}": [*one.token_ids, 5, EOS, 7, EOS]
                for one in plain.outputs
            }
            llm = make_llm(ReplaySource(known, script))
            [found] = llm.generate("the end", wanted)
            for mine, theirs in zip(found.outputs, plain.outputs, strict=True):
                assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text), name
                assert mine.finish_reason == theirs.finish_reason


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_a_grammar_forces_is_drafted_for_nothing(name):
    for changes in ({}, {"temperature": 0.0}):
        [plain] = make_llm().generate("the end", params(GRAMMARS[name], **changes))
        [found] = make_llm(ForcedSource()).generate("the end", params(GRAMMARS[name], **changes))
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
        assert found.outputs[0].finish_reason == plain.outputs[0].finish_reason
        told = found.metrics.speculative_decoding
        assert told is not None
        if name == "schema":  # keys and their quotes
            assert told.num_accepted_draft_tokens >= 8


def test_a_mask_is_that_of_a_row_s_own_ancestors():
    state = Grammars(TOKENIZER, 96, [EOS]).follow({"regex": "ab|cd|a5"})
    a, b, c, d, five, x = (TOKENIZER.token_id(one) for one in "abcd5x")
    assert None not in (a, b, c, d, five, x)
    logits = np.zeros((7, 96), np.float32)
    #        a  c  b (after a)  d (after c)  x (after a)  anything (after x)
    state.mask_rows(logits, np.array([], np.int32), [a, c, b, d, x, a], [-1, -1, 0, 1, 0, 4])
    allowed = [set(np.flatnonzero(row == 0).tolist()) for row in logits]
    assert allowed[0] == {a, c}
    assert allowed[1] == {b, five}
    assert allowed[2] == {d}
    assert allowed[3] == allowed[4] == {EOS}
    assert len(allowed[5]) == len(allowed[6]) == 96  # no output gets there
    again = np.zeros((2, 96), np.float32)
    state.mask_rows(again, np.array([c], np.int32), [d], [])
    assert [set(np.flatnonzero(row == 0).tolist()) for row in again] == [{d}, {EOS}]


@pytest.mark.model
@pytest.mark.parametrize("grammar", [{"json_object": True}, {"json": PEOPLE}], ids=["any", "one"])
def test_a_mask_does_not_know_where_drafts_have_been(grammar):
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [EOS])
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in DOCUMENTS]
    draw = np.random.default_rng(0)
    num_behind_drafts = 0

    def masks(state, output_ids, draft_ids, parents):
        logits = np.zeros((1 + len(draft_ids), tokenizer.vocab_size), np.float32)
        state.mask_rows(logits, np.array(output_ids, np.int32), draft_ids, parents)
        assert state.lost is None
        return np.isneginf(logits)

    for text in [*texts] * 3:
        state = grammars.follow(grammar)
        for end in range(len(text)):
            if draw.random() < 0.5:
                continue  # accepted with the token before
            output_ids = text[:end]
            other = texts[draw.integers(len(texts))]
            known = [i for i, one in enumerate(other) if text[max(0, end - 1)] == one] or [0]
            other = other[draw.choice(known) + 1 :]
            chains = [text[end : end + draw.integers(4)], other[: draw.integers(5)]]
            if draw.random() < 0.3:
                chains.reverse()
            paths = [chain[: 1 + i] for chain in chains for i in range(len(chain))]
            parents = [at - 1 if len(path) > 1 else -1 for at, path in enumerate(paths)]
            draft_ids = [path[-1] for path in paths]
            lawful = grammars.follow(grammar).lawful(np.array(output_ids), draft_ids, parents)
            if draw.random() < 0.5:
                assert state.lawful(np.array(output_ids), draft_ids, parents) == lawful
            found = masks(state, output_ids, draft_ids, parents)
            for row in (0, *(1 + index for index in lawful)):
                path = paths[row - 1] if row else []
                [alone] = masks(grammars.follow(grammar), [*output_ids, *path], [], [])
                assert np.array_equal(found[row], alone), tokenizer.decode([*output_ids, *path])
                num_behind_drafts += row > 0
    assert num_behind_drafts > 100


def test_a_text_goes_on_after_preemption_where_its_grammar_was():
    wanted = [params(GRAMMARS["schema"], seed=seed) for seed in range(6)]
    alone = [make_llm().generate("the end", one)[0].outputs[0].text for one in wanted]
    llm = LLM(
        target=FakeTarget(96), tokenizer=TOKENIZER, eos_token_ids=EOS, kv_cache_tokens=128,
        speculative_config=None,
    )  # fmt: skip
    together = llm.generate(["the end"] * 6, wanted)
    assert [one.outputs[0].text for one in together] == alone
    assert sum(one.metrics.num_preemptions for one in together) > 0


HALF = {"grammar": 'start: /[a-c]{6}/ "é"'}  # the toy has its first byte, and no second one
MANY = {"grammar": 'start: "b" many\nmany: "a" many'}  # beyond what llguidance keeps in mind


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_an_output_that_cannot_go_on_ends_with_an_error_where_plain_decoding_does(script):
    for changes in ({}, {"temperature": 0.0}, {"n": 2, "logprobs": 2}):
        wanted = params(HALF, **changes)
        plain, other = make_llm().generate(["the end", "so"], [wanted, params(GRAMMARS["regex"])])
        n = len(plain.outputs)
        known = {
            "0" if n == 1 else f"0#{one.index}": [*one.token_ids, 5, EOS, 7, EOS]
            for one in plain.outputs
        }
        llm = make_llm(ReplaySource(known, script))
        found, besides = llm.generate(["the end", "so"], [wanted, params(GRAMMARS["regex"])])
        for mine, theirs in zip(found.outputs, plain.outputs, strict=True):
            assert theirs.finish_reason == "error" and len(theirs.token_ids) == 7
            assert theirs.stop_reason == (
                "structured_outputs cannot be followed any further: no token of the model fits"
            )
            assert mine == replace(
                theirs, token_sources=mine.token_sources, token_confidences=mine.token_confidences
            )
        assert besides.outputs[0].token_ids == other.outputs[0].token_ids
        assert besides.outputs[0].finish_reason == "stop"
        assert not llm.engine.has_work
        llm.engine.check_integrity()


@pytest.mark.parametrize("grammar", [HALF, MANY], ids=["half", "many"])
def test_an_output_that_cannot_go_on_comes_out_the_same_again(grammar):
    llm = make_llm()
    first, again = (llm.generate("the end", params(grammar))[0].outputs[0] for _ in range(2))
    assert first.finish_reason == "error" and first == again


def test_what_copies_of_a_grammar_spent_is_given_to_an_output_anew(monkeypatch):
    # By calls: a new grammar's own, then one a row.
    spent = iter([False, False, False, True, False, False, False, True, False, False])

    def next_tokens(matcher, vocab_size):
        return None if next(spent, False) else original(matcher, vocab_size)

    original = outrider.grammar.next_tokens
    [plain] = make_llm().generate("the end", params(GRAMMARS["schema"]))
    monkeypatch.setattr("outrider.grammar.next_tokens", next_tokens)
    [found] = make_llm().generate("the end", params(GRAMMARS["schema"]))
    assert next(spent, None) is None
    assert found.outputs == plain.outputs
    spent = iter([False] * 9 + [True] * 9)  # nor can it be compiled any more
    [found] = make_llm().generate("the end", params(GRAMMARS["schema"]))
    assert found.outputs[0].finish_reason == "error"
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids[:8]


@pytest.mark.parametrize(
    "given",
    [
        *({}, 5, "json", {"json": 5}, {"json": SCHEMA, "regex": "a"}, {"xml": "a"}),
        *({"json_object": False}, {"choice": []}, {"choice": [5]}, {"choice": "ab"}, {"regex": 7}),
    ],
)
def test_what_is_no_grammar_is_refused(given):
    with pytest.raises(SamplingError, match="structured_outputs"):
        SamplingParams(structured_outputs=given)


@pytest.mark.parametrize(
    "given",
    [
        *({"json": "{"}, {"json": {"type": "nonsense"}}, {"json": {"$ref": "#/nowhere"}}),
        *({"regex": "("}, {"grammar": "start: nope"}, {"json": "[]"}),
        *({"json": {"$ref": "#"}}, {"choice": ["日"]}),
    ],
)
def test_what_cannot_be_followed_is_refused_before_any_work(given):
    llm = make_llm()
    with pytest.raises(SamplingError, match="structured_outputs"):
        llm.generate("the", SamplingParams(structured_outputs=given))
    assert not llm.engine.has_work


def test_a_grammar_goes_together_with_no_other_rule_of_tokens():
    for changes in (
        {"ignore_eos": True}, {"min_tokens": 2}, {"allowed_token_ids": [1]},
        {"banned_token_ids": [1]},
    ):  # fmt: skip
        with pytest.raises(SamplingError, match=next(iter(changes))):
            SamplingParams(structured_outputs={"json_object": True}, max_tokens=9, **changes)
    without = LLM(target=FakeTarget(96), tokenizer=None, kv_cache_tokens=512)
    with pytest.raises(SamplingError, match="tokenizer"):
        without.generate({"prompt_token_ids": [3]}, params({"json_object": True}))


def test_drafts_that_break_the_grammar_are_never_kept():
    [plain] = make_llm().generate("the end", params(GRAMMARS["regex"]))
    known = {"0": plain.outputs[0].token_ids}
    forbidden = TOKENIZER.token_id("Z")
    llm = make_llm(ReplaySource(known, lambda rest, _: Draft([*rest[:1], forbidden, *rest[1:3]])))
    [found] = llm.generate("the end", params(GRAMMARS["regex"]))
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert forbidden not in found.outputs[0].token_ids
    told = found.metrics.speculative_decoding
    assert told is not None and told.num_draft_tokens == told.num_accepted_draft_tokens > 0
    assert set(told.rejection_causes) <= {"grammar", "length"}  # no row was spent on them
    assert told.rejection_causes["grammar"] >= 2 * (len(plain.outputs[0].token_ids) // 2 - 1)


def test_the_lawful_part_of_a_tree():
    state = Grammars(TOKENIZER, 96, [EOS]).follow({"regex": "ab|cd|a5"})
    a, b, c, d, five, x = (TOKENIZER.token_id(one) for one in "abcd5x")
    nothing = np.array([], np.int32)
    # 0 a, 1 x, 2 b after a, 3 d after a, 4 c, 5 the end after c, 6 the end after ab, 7 b after x
    tree = [a, x, b, d, c, EOS, EOS, b], [-1, -1, 0, 0, -1, 4, 2, 1]
    assert state.lawful(nothing, *tree) == [0, 2, 4, 6]
    assert state.lawful(nothing, [a, five, EOS, a], []) == [0, 1, 2]
    assert state.lawful(np.array([a], np.int32), [b, EOS], []) == [0, 1]
    assert state.lawful(np.array([a, x], np.int32), [b], []) == [0]  # left: nothing is known


@pytest.mark.model
@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["<|im_start|>x"]}, ["<|im_start|>x"]),
        ({"choice": ["yes<|im_end|>no", "<|endoftext|>"]}, ["yes<|im_end|>no", "<|endoftext|>"]),
        ({"regex": r"<\|im_end\|>ok"}, ["<|im_end|>ok"]),
        ({"json": {"enum": ["a<|im_end|>b"]}}, ['"a<|im_end|>b"']),
    ],
)
def test_names_of_special_tokens_are_text_like_any_other(form, texts):
    plain, fast = (
        LLM(speculative_config=config).generate(
            "Say hello.", SamplingParams(temperature=0, max_tokens=40, structured_outputs=form)
        )[0]
        for config in (None, "auto")
    )
    assert plain.outputs[0].text in texts and plain.outputs[0].finish_reason == "stop"
    assert fast.outputs[0].token_ids == plain.outputs[0].token_ids
