"""Terms, rules and prefix reuse as users of `LLM` meet them: the text is plain text throughout."""

import json

import pytest
from engine_cases import GREEDY, VOCAB, params
from fakes import ALPHABET, FakeTarget, ReplaySource, make_engine

from outrider import LLM, ConfigError, SamplingError, Terms
from outrider.policy.cost import Surface
from outrider.target.base import PAGE_SIZE

PROMPTS = ["one of these", "and another one", "a third that is longer than both"]


def make_llm(**options) -> LLM:
    options.setdefault("speculative_config", None)
    return LLM(target=FakeTarget(VOCAB), tokenizer=ALPHABET, kv_cache_tokens=4096, **options)


def replaying(**options) -> tuple[LLM, list[str]]:
    """An LLM whose two sources know every answer, and the answers."""
    texts = make_llm().generate(PROMPTS, GREEDY)
    known = {str(i): output.outputs[0].token_ids for i, output in enumerate(texts)}
    sources = [ReplaySource(known, name=name) for name in ("lookup", "other")]
    llm = make_llm(speculative_config=sources, **options)
    return llm, [output.outputs[0].text for output in texts]


def drafted(llm: LLM) -> set[str]:
    return {name for name, split in llm.metrics.per_source.items() if split.num_draft_tokens}


def test_terms_are_one_for_all_or_one_per_prompt():
    llm, texts = replaying()
    terms = [Terms(priority=2, deadline=5.0), Terms(tag="x", sources=["other"]), Terms(sources=[])]
    outputs = llm.generate(PROMPTS, GREEDY, terms=terms)
    assert [output.outputs[0].text for output in outputs] == texts
    assert drafted(llm) >= {"other"}
    third = outputs[2].outputs[0]
    assert set(third.token_sources) == {"target"}
    assert "lookup" not in outputs[1].outputs[0].token_sources
    llm, texts = replaying()
    outputs = llm.generate(PROMPTS, GREEDY, terms=Terms(num_draft_tokens=0))
    assert [output.outputs[0].text for output in outputs] == texts
    assert drafted(llm) == set()


def test_streams_and_chats_take_terms_too():
    llm, texts = replaying()
    chunks = list(llm.stream(PROMPTS[0], GREEDY, terms=Terms(sources=["lookup"])))
    assert "".join(chunk.text for chunk in chunks) == texts[0]
    assert drafted(llm) <= {"lookup"}
    message = [{"role": "user", "content": "abc"}]
    plain = make_llm().chat(message, GREEDY)[0].outputs[0].text
    assert make_llm().chat(message, GREEDY, terms=Terms(priority=1))[0].outputs[0].text == plain


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([Terms()], "3 prompts need 3 terms, got 1"),
        ("urgent", "terms must be Terms or a list of them, got 'urgent'"),
        ([Terms(), Terms(), 3], "terms must be Terms or a list of them"),
        (Terms(sources=["nobody"]), "sources must be of lookup, other, got 'nobody'"),
    ],
)
def test_wrong_terms_are_refused_before_anything_runs(terms, message):
    llm, _ = replaying()
    with pytest.raises(SamplingError, match=message):
        llm.generate(PROMPTS, GREEDY, terms=terms)
    assert llm.target.num_forwards == 0 or not llm.engine.has_work


def test_who_is_urgent_is_answered_first():
    llm = make_llm(max_num_seqs=1)
    outputs = llm.generate(PROMPTS, GREEDY, terms=[Terms(priority=p) for p in (2, 0, 1)])
    ends = [output.metrics.finished_time for output in outputs]
    assert sorted(range(3), key=lambda i: ends[i]) == [1, 2, 0]


def test_rules_narrow_who_drafts_and_are_exchanged_while_requests_run(tmp_path):
    path = tmp_path / "policy.json"
    forbid = {"version": 1, "rules": [{"then": {"forbid": ["lookup"]}}]}
    path.write_text(json.dumps(forbid))
    llm, texts = replaying(rules=path)
    stream = llm.stream(PROMPTS[0], GREEDY)
    chunks = [next(stream) for _ in range(3)]
    assert drafted(llm) == {"other"}
    llm.rules.replace({"version": 1, "rules": [{"then": {"sources": []}}]})
    chunks += [next(stream) for _ in range(3)]
    before = llm.metrics.num_draft_tokens
    llm.rules.back()
    chunks += list(stream)
    assert "".join(chunk.text for chunk in chunks) == texts[0]
    assert llm.metrics.num_draft_tokens > before
    assert drafted(llm) == {"other"}
    assert [set(chunk.token_sources) for chunk in chunks[3:6]] == [{"target"}] * 3


def test_rules_that_are_none_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.rules\[0\]\.then\.sources\[0\]: no source is call"):
        make_llm(rules={"version": 1, "rules": [{"then": {"sources": ["lokup"]}}]})
    with pytest.raises(ConfigError, match="cannot read the policy"):
        make_llm(rules=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"\$ must be an object, got 3"):
        make_llm(rules=3)


def test_prefix_caching_can_be_turned_off():
    long = [1 + i % (VOCAB - 1) for i in range(3 * PAGE_SIZE)]
    rows = {}
    texts = set()
    for caching in (True, False):
        llm = make_llm(enable_prefix_caching=caching)
        for _ in range(2):
            [output] = llm.generate({"prompt_token_ids": long}, params(max_tokens=4))
            texts.add(output.outputs[0].text)
        rows[caching] = sum(llm.target.num_rows)
        assert output.metrics.num_cached_tokens == (2 * PAGE_SIZE if caching else 0)
    assert rows == {True: 2 * (len(long) + 3) - 2 * PAGE_SIZE, False: 2 * (len(long) + 3)}
    assert len(texts) == 1
    with pytest.raises(ConfigError, match="enable_prefix_caching must be True or False, got 1"):
        make_llm(enable_prefix_caching=1)


def test_a_long_prompt_makes_the_steps_of_others_twice_as_long_not_more():
    engine = make_engine(max_num_batched_tokens=256)
    engine.cost.use(Surface(rows=(1, 251), base=(1.0, 6.0), per_token=(0.0, 0.0)))
    engine.add_request("a", [1, 2, 3], params(max_tokens=60))
    for _ in range(5):
        engine.step()
    engine.add_request("long", [1 + i % (VOCAB - 1) for i in range(200)], params(max_tokens=4))
    before = len(engine.target.num_rows)
    for _ in range(4):
        engine.step()
    assert engine.target.num_rows[before:] == [51, 51, 51, 51]  # 1 + 50 rows * 0.02
