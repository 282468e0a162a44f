"""Faults that users reported of other systems, as small cases on ours.

The drafts are chosen so that the fault would show. What is not here has its test beside the part
that would have it: verification, sampling, sources, server.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from engine_cases import VOCAB, all_wrong, assert_same, exact, half_right, ids_of, params, prompts
from fakes import ALPHABET, FakeTarget, ReplaySource, make_engine, run
from neural_cases import toy_drafter
from serving_cases import CHAT, COMPLETIONS, GREEDY, USER, asked, make_llm, serving, streamed

from outrider import Draft, SamplingParams, ScriptedSource
from outrider.drafting.draft_model import DraftModelSource
from outrider.drafting.lookup import LookupSource
from outrider.drafting.methods import METHODS
from outrider.drafting.neural import NeuralSource
from outrider.engine.verification import make_verifier
from outrider.errors import UserError

PROMPT = [20, 21]
LETTERS = list(range(1, 27))
RULES = pytest.mark.parametrize("rule", ["invariant", "rejection", "block"])


class Saying(FakeTarget):
    """Wants to say these tokens after a prompt of two, over and over."""

    def __init__(self, says: Sequence[int], strength: float = 60.0) -> None:
        super().__init__(VOCAB)
        self.says, self.strength = says, strength

    def forward(self, batch):
        output = super().forward(batch)
        for row, place in enumerate(batch.positions[batch.logits_rows].tolist()):
            output.logits[row, self.says[(place - 1) % len(self.says)]] = self.strength
        return output


def decoded(sampling: SamplingParams, target: FakeTarget, source=None, rule: str = "invariant"):
    """(result, engine) of one request after PROMPT."""
    sources = [] if source is None else [source]
    engine = make_engine(sources, target, verifier=make_verifier(rule, (0,)))
    return run(engine, {"r": (PROMPT, sampling)})["r"], engine


def drafting(outputs: list[int], length: int) -> ReplaySource:
    return ReplaySource({"r": outputs}, lambda rest, context: Draft(rest[:length]))


# ---- where an output ends


@RULES
@pytest.mark.parametrize("place", range(9))
def test_nothing_follows_an_end_of_sequence_that_was_drafted(rule, place):  # B01
    """Before, at every place of and behind a block of six, all of which is right."""
    text = [*LETTERS[:place], 0, *LETTERS[place:]]
    wanted = params(ignore_eos=False, logprobs=1)
    result, engine = decoded(wanted, Saying(text), drafting(text, 6), rule)
    output = result.outputs[0]
    assert output.token_ids == text[: place + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == ALPHABET.decode(LETTERS[:place])
    assert len(output.logprobs) == place + 1
    assert engine.metrics.num_output_tokens == place + 1


@pytest.mark.parametrize("min_match", [1, 3])
def test_lookup_where_no_end_of_sequence_is_configured(min_match):  # B02
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]}
    wanted = SamplingParams(temperature=0, max_tokens=15)
    made = {"target": Saying([5, 6, 0, 8, 9]), "tokenizer": None, "eos_token_ids": None}
    [plain] = make_llm(**made, speculative_config=None).generate(prompt, wanted)
    [found] = make_llm(LookupSource(3, min_match), **made).generate(prompt, wanted)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert len(found.outputs[0].token_ids) == 15 and 0 in found.outputs[0].token_ids
    assert found.outputs[0].finish_reason == "length"
    assert found.metrics.speculative_decoding.num_accepted_draft_tokens > 0


@RULES
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
def test_exactly_max_tokens_of_drafts_of_three(rule, max_tokens):  # B03
    wanted = params(max_tokens=max_tokens, logprobs=0)
    result, _ = decoded(wanted, Saying(LETTERS), drafting(LETTERS, 3), rule)
    assert result.outputs[0].token_ids == LETTERS[:max_tokens]
    assert len(result.outputs[0].logprobs) == max_tokens
    assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("most", [1, 2, 8, 9, 10, 17])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_as_many_tokens_are_delivered_as_are_charged(path, most):  # B04
    text = "the cat" if path == COMPLETIONS else "user, the cat\n"
    [plain] = make_llm(speculative_config=None).generate(text, SamplingParams(**GREEDY))
    known = dict.fromkeys("01", plain.outputs[0].token_ids)
    body = {"prompt": "the cat", "logprobs": 1} if path == COMPLETIONS else {"messages": USER}
    body |= {} if path == COMPLETIONS else {"logprobs": True}
    body |= {**GREEDY, "max_tokens": most, "return_token_ids": True}
    with serving(make_llm(ReplaySource(known, exact))) as client:
        whole = asked(client, path, **body)
        *chunks, last = streamed(client, path, **body, stream_options={"include_usage": True})
    for choices, usage in (
        (whole["choices"], whole["usage"]),
        ([chunk["choices"][0] for chunk in chunks], last["usage"]),
    ):
        ids = [i for choice in choices for i in choice.get("token_ids") or []]
        name = "tokens" if path == COMPLETIONS else "content"
        told = [choice["logprobs"][name] for choice in choices if choice.get("logprobs")]
        assert ids == plain.outputs[0].token_ids[:most]
        assert sum(map(len, told)) == usage["completion_tokens"] == most
        assert choices[-1]["finish_reason"] == "length"


@RULES
def test_stop_strings_at_every_place_of_a_block(rule):  # B05, B06
    """Inside blocks of four, over their borders, and with all that follows accepted too."""
    source = ReplaySource({}, lambda rest, context: Draft(rest[:4]))
    wanted = {}
    for start in range(12):
        for length in (1, 2, 3):
            stop = ALPHABET.decode(LETTERS[start : start + length])
            name = f"{start} {length}"
            wanted[name] = (PROMPT, params(stop=["zz", stop], logprobs=1))
            source.outputs[name] = LETTERS
    engine = make_engine(
        [source], Saying(LETTERS), verifier=make_verifier(rule, (0,)), max_num_seqs=64
    )
    for name, result in run(engine, wanted).items():  # where streams are held against this
        output = result.outputs[0]
        start, length = map(int, name.split())
        assert output.text == ALPHABET.decode(LETTERS[:start])
        assert output.token_ids == LETTERS[: start + length]
        assert len(output.logprobs) == len(output.token_sources) == start + length
        assert (output.finish_reason, output.stop_reason) == ("stop", wanted[name][1].stop[1])


def test_a_stop_string_half_of_which_lookup_drafts(path=COMPLETIONS):  # B08
    says = [7, 8, 9, 10, 7, 8, 11] * 6 + [12, 13, 14]  # lookup says 11 7, the target 11 12
    body = {"prompt": PROMPT, **GREEDY, "max_tokens": 70, "stop": "kl", "logprobs": 2}
    body |= {"return_token_ids": True, "return_token_sources": True}
    with serving(make_llm(LookupSource(9), target=Saying(says))) as client:
        parts = {
            "drafts": asked(client, path, **body)["choices"],
            "plain": asked(client, path, **body, speculative=False)["choices"],
            "stream": [chunk["choices"][0] for chunk in streamed(client, path, **body)],
        }
    found = {name: _joined(choices) for name, choices in parts.items()}
    assert found["drafts"] == found["plain"] == found["stream"]
    text, reason, *lists = found["stream"]
    assert (text, reason) == (ALPHABET.decode(says[:41]), "stop")
    assert lists[0] == says[:43] and {len(each) for each in lists} == {43}
    assert parts["drafts"][0]["token_sources"].count("lookup") > 20


def _joined(choices: list[dict]) -> list:
    """Text, end, ids, tokens and likeliest tokens of a completion in parts."""
    told = [choice["logprobs"] for choice in choices]
    return [
        "".join(choice["text"] for choice in choices),
        choices[-1]["finish_reason"],
        [i for choice in choices for i in choice["token_ids"]],
        *([t for one in told for t in one[name]] for name in ("tokens", "top_logprobs")),
    ]


@RULES
@pytest.mark.parametrize("min_tokens", [4, 5, 6, 9])
def test_an_end_drafted_before_min_tokens_is_no_end(rule, min_tokens):  # B10
    """The target wants to end after five tokens; whoever counts steps ends too late."""
    target = Saying([*LETTERS[:5], 0, *LETTERS[5:]])
    wanted = params(ignore_eos=False, min_tokens=min_tokens)
    plain, _ = decoded(wanted, target)
    assert (plain.outputs[0].token_ids == [*LETTERS[:5], 0]) == (min_tokens <= 5)
    if min_tokens > 5:
        assert 0 not in plain.outputs[0].token_ids[:min_tokens]
    ends = ScriptedSource(lambda context: Draft([*LETTERS[:5], 0, 0][len(context.token_ids) - 2 :]))
    for source in (drafting(plain.outputs[0].token_ids, 8), ends):
        found, _ = decoded(wanted, target, source, rule)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids


# ---- what each row of a block is judged by


@RULES
@pytest.mark.parametrize(
    "changes",
    [{"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 1.15}],
)
def test_penalties_count_the_drafts_before_a_row(rule, changes):  # B11
    """Drafts repeat the token that the target likes best; with the second it says nothing else."""
    target = Saying([20], strength=8.0)
    free, _ = decoded(params(), target)
    plain, _ = decoded(params(**changes), target)
    assert plain.outputs[0].token_ids != free.outputs[0].token_ids
    source = ScriptedSource(lambda context: Draft([20] * 7))
    found, engine = decoded(params(**changes), target, source, rule)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert engine.metrics.num_draft_tokens > 30


@RULES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_holds_for_drafted_corrected_and_bonus_tokens(rule, temperature):  # B12
    target = Saying([7], strength=30.0)
    source = ScriptedSource(lambda context: Draft([7, 7, 7]))
    sampling = params(logit_bias={7: -100.0}, temperature=temperature, seed=1)
    found, engine = decoded(sampling, target, source, rule)
    assert 7 not in found.outputs[0].token_ids
    assert engine.metrics.num_accepted_draft_tokens == 0
    only = params(logit_bias={5: 100.0, 7: -100.0}, temperature=temperature, seed=1)
    for drafts in ([5, 7, 5], [5, 5]):  # cut short by what is barred; all right, up to the bonus
        source = ScriptedSource(lambda context, drafts=drafts: Draft(drafts))
        found, _ = decoded(only, target, source, rule)
        assert found.outputs[0].token_ids == [5] * 40
    high = params(min_p=0.95, temperature=max(temperature, 0.5), seed=2)
    found, _ = decoded(high, target, ScriptedSource(lambda context: Draft([5, 6])), rule)
    assert found.outputs[0].token_ids == [7] * 40


@RULES
@pytest.mark.parametrize("make", [exact, half_right, all_wrong])
def test_temperature_0_is_greedy_whatever_else_is_given(rule, make):  # B14, B20
    """Logprobs of accepted, corrected and bonus tokens among them."""
    bare = run(make_engine(), prompts(2, params(logprobs=2)))
    for changes in ({"top_p": 0.3, "top_k": 5}, {"top_p": 1e-6, "min_p": 1.0}, {"top_k": -1}):
        wanted = prompts(2, params(logprobs=2, **changes))
        source = ReplaySource(ids_of(bare), make)
        engine = make_engine([source], verifier=make_verifier(rule, (0,)))
        assert_same(run(engine, wanted), bare)
        counts = engine.metrics
        assert 0 <= counts.num_accepted_draft_tokens <= counts.num_draft_tokens
        assert (counts.num_accepted_draft_tokens == 0) == (make is all_wrong)
    values = [v.logprob for entry in bare["r0"].outputs[0].logprobs for v in entry.values()]
    assert all(-50 < value < 0 for value in values)


def test_a_temperature_that_is_not_given_is_one():  # B15
    with serving(make_llm(speculative_config=None)) as client:

        def texts(**body: Any) -> set[str]:
            body |= {"prompt": "the cat", "max_tokens": 12, "ignore_eos": True}
            answers = [asked(client, COMPLETIONS, **body, seed=seed) for seed in range(4)]
            return {answer["choices"][0]["text"] for answer in answers}

        assert len(texts(top_k=50)) == 4
        assert texts(top_k=50) == texts(top_k=50, temperature=1) == texts(temperature=None)
        [greedy] = texts(temperature=0)
        assert texts(temperature=1e-6) == {greedy}


# ---- seeds, batches, choices


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_every_rule_a_text_is_that_of_its_seed_alone(rule):  # B18, B19
    """Where the text depends on drafts: whoever else is in the batch has no say in it."""
    shapes = [{"top_k": 5}, {"top_k": 5, "seed": 2}, {"top_p": 0.9}, {"frequency_penalty": 0.5}]
    wanted = {
        f"{index}": (PROMPT, params(**{"temperature": 1.0, "seed": 1, **shape}))
        for index, shape in enumerate(shapes)
    }

    def texts(requests: dict) -> dict[str, list[int]]:
        source = DraftModelSource(FakeTarget(VOCAB, sharpness=2.5), 4, rule=rule)
        engine = make_engine([source], verifier=make_verifier(rule, (0,)))
        found = ids_of(run(engine, requests))
        rates.append(engine.metrics.draft_acceptance_rate)
        return found

    rates: list[float] = []
    together = texts(wanted)
    assert 0 < rates[0] < 1
    assert together == texts(wanted)
    for name, request in wanted.items():
        assert texts({name: request})[name] == together[name]
    assert len({tuple(text) for text in together.values()}) == 4


def test_counts_of_choices_add_up():  # B21
    wanted = {"r": (PROMPT, params(n=3, temperature=1.0, seed=4))}
    known = ids_of(run(make_engine(), wanted))
    # the second choice is drafted wrongly, the third one not at all
    known["r#1"], lengths = known["r#1"], {"r#0": exact, "r#1": all_wrong}

    def make(rest: list[int], context: Any) -> Draft:
        return lengths.get(context.request_id, lambda *_: Draft())(rest, context)

    result = run(make_engine([ReplaySource(known, make)]), wanted)["r"]
    told = result.metrics.speculative_decoding
    by_choice = [output.token_sources.count("replay") for output in result.outputs]
    assert by_choice[0] > 30 and by_choice[1:] == [0, 0]
    assert told.num_accepted_draft_tokens == told.per_source["replay"].num_accepted_draft_tokens
    assert told.num_accepted_draft_tokens == sum(by_choice)
    assert told.num_draft_tokens == told.num_accepted_draft_tokens + sum(
        told.rejection_causes.values()
    ) - told.rejection_causes.get("length", 0)
    assert told.num_output_tokens == sum(len(output.token_ids) for output in result.outputs)


# ---- drafters


def test_a_drafter_of_16_tokens_for_a_target_of_64():  # B25
    """Tokens that the drafter does not know come as in plain decoding."""
    target = FakeTarget(64)
    options = {"target": target, "tokenizer": None, "eos_token_ids": ()}
    wanted = {f"{seed}": (PROMPT, params(temperature=1.0, seed=seed)) for seed in range(6)}
    plain = ids_of(run(make_engine(**options), wanted))
    engine = make_engine([NeuralSource(toy_drafter("dspark", 64, 16))], **options)
    found = run(engine, wanted)
    assert ids_of(found) == plain
    drafted = [
        token
        for result in found.values()
        for token, source in zip(
            result.outputs[0].token_ids, result.outputs[0].token_sources, strict=True
        )
        if source != "target"
    ]
    assert drafted and all(token % 4 == 0 for token in drafted)
    assert len({token for text in plain.values() for token in text if token % 4}) > 30


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].loads])
def test_a_drafter_that_cannot_be_loaded_ends_the_start(method, tmp_path):  # X9
    path = tmp_path / "drafter"
    config = {"method": method, "model": str(path)}
    with pytest.raises(UserError, match=str(path)):
        make_llm(speculative_config=config)
    path.mkdir()
    (path / "config.json").write_text("{}")
    with pytest.raises(UserError):
        make_llm(speculative_config=["auto", config])
