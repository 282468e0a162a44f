"""Any drafts, parameters, terms, KV size, an abort at any time: the text is plain decoding's."""

import pytest
from fakes import ALPHABET, ReplaySource, drain, make_engine, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.drafting.source import Draft
from outrider.sampling_params import SamplingParams
from outrider.terms import Terms

VOCAB = len(ALPHABET.pieces)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2]),
    max_tokens=st.integers(2, 24),
    min_tokens=st.integers(0, 2),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
    stop=st.sampled_from([None, ["a", "END"], ["th"]]),
    owner=st.sampled_from(["me", "you"]),
)
TERMS = st.builds(
    Terms,
    priority=st.integers(-1, 1),
    deadline=st.sampled_from([None, 1e-6, 0.5, 60.0]),
    num_draft_tokens=st.sampled_from([None, None, 0, 2]),
)
# beginnings that several prompts have in common, up to three pages long
BEGINNING = st.sampled_from([[], [], [3] * 16, [3] * 32, [3] * 16 + [4] * 17, [5] * 48])
PROMPT = st.builds(
    list.__add__, BEGINNING, st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=30)
)
REQUESTS = st.lists(st.tuples(PROMPT, PARAMS), min_size=1, max_size=5)
# one draft per place in the text: tree or not, and for every token its parent and what it says
SCRIPT = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from(["right", "right", "wrong", "junk"])),
            max_size=8,
        ),
    ),
    min_size=1,
    max_size=5,
)


def scripted(script, rest: list[int], place: int) -> Draft:
    is_tree, nodes = script[place % len(script)]
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for index, (parent, kind) in enumerate(nodes):
        parent = parent % (index + 1) - 1 if is_tree else index - 1
        depth = depths[parent] + 1 if parent >= 0 else 0
        right = rest[depth] if depth < len(rest) else 1
        tokens.append({"right": right, "wrong": (right + 1) % VOCAB, "junk": VOCAB + 3}[kind])
        parents.append(parent)
        depths.append(depth)
    return Draft(tokens, parents=parents if is_tree else [])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    requests=REQUESTS,
    terms=st.lists(TERMS, min_size=6, max_size=6),
    script=SCRIPT,
    pages=st.integers(7, 14),
    aborted=st.integers(0, 8),
)
@pytest.mark.slow
def test_random_drafts_and_terms_change_nothing(requests, terms, script, pages, aborted):
    named = {f"r{i}": request for i, request in enumerate(requests)}
    named["victim"] = ([1, 2, 3], SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    plain = {
        name: run(make_engine(reuse_prefixes=False), {name: request})[name]
        for name, request in named.items()
    }
    known = {
        name if len(result.outputs) == 1 else f"{name}#{output.index}": output.token_ids
        for name, result in plain.items()
        for output in result.outputs
    }
    source = ReplaySource(
        known, lambda rest, context: scripted(script, rest, len(context.token_ids))
    )
    sizes = {"kv_cache_tokens": 16 * pages, "max_num_batched_tokens": 19, "max_num_seqs": 4}
    engine = make_engine([source], **sizes)
    for (name, (prompt, sampling)), served in zip(named.items(), terms, strict=False):
        engine.add_request(name, prompt, sampling, terms=served)
    found = drain(engine, abort=("victim", aborted))
    check(found, plain)
    assert set(source.released) >= set(known)
    # Once more, on the KV that is left of the first time.
    for name, (prompt, sampling) in named.items():
        engine.add_request(name, prompt, sampling)
    check(drain(engine), plain)


def check(found, plain) -> None:
    for name, result in plain.items():
        for mine, theirs in zip(found[name].outputs, result.outputs, strict=True):
            count = len(mine.token_ids)
            assert name == "victim" or count == len(theirs.token_ids)
            assert mine.token_ids == theirs.token_ids[:count]
            if mine.finish_reason != "abort":
                assert mine.text == theirs.text
                assert mine.logprobs == theirs.logprobs
                assert mine.finish_reason == theirs.finish_reason
                assert mine.stop_reason == theirs.stop_reason
