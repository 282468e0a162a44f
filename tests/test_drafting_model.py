"""The draft model's KV, sampling and refusals; and every source in the engine."""

from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
import torch
from fakes import ALPHABET, ROOT, FakeTarget, make_engine, path_hash, run
from neural_cases import KINDS, toy_drafter
from table_cases import texts, toy_table
from tokenizers.models import WordLevel

from outrider.drafting.draft_model import DraftModelSource
from outrider.drafting.lookup import LookupSource
from outrider.drafting.neural import NeuralSource
from outrider.drafting.predicted import PredictedSource
from outrider.drafting.scripted import ScriptedSource
from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.drafting.table import TableSource
from outrider.engine.verification import make_verifier
from outrider.errors import ConfigError, TokenizerMismatch
from outrider.results import RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.target.noise import noise_key
from outrider.tokenizer import Tokenizer

V = len(ALPHABET.pieces)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def context(
    tokens: list[int], params: SamplingParams = GREEDY, request_id: str = "r"
) -> DraftContext:
    return DraftContext(
        request_id, np.array(tokens, np.int32), 1, params, noise_key=noise_key(5, 0)
    )


def bound(model: FakeTarget | None = None, k: int = 4, **options) -> DraftModelSource:
    source = DraftModelSource(model or FakeTarget(V), k, **options)
    source.bind(FakeTarget(V), None, max_num_seqs=4)
    return source


def propose(source: DraftSource, ctx: DraftContext, budget: int = 8) -> Draft:
    (draft,) = source.propose([ctx], [budget])
    draft.check()
    return draft


def greedy_continuation(tokens: list[int], n: int) -> list[int]:
    """What a FakeTarget says, from a forward of its own over the whole text each time."""
    source = bound(k=1)
    text = list(tokens)
    for i in range(n):
        text += propose(source, context(text, request_id=str(i))).token_ids
        source.release(str(i))
    return text[len(tokens) :]


# ---- KV


def test_accepted_drafts_keep_their_kv_and_rejected_ones_are_overwritten() -> None:
    model = FakeTarget(V)  # asserts that every context is one unbroken path
    source = bound(model)
    text = [3, 1, 4, 1, 5]
    expected = greedy_continuation(text, 12)
    model.num_rows.clear()
    assert propose(source, context(text)).token_ids == expected[:4]
    assert model.num_rows == [5, 1, 1, 1]
    text += expected[:5]  # all accepted, and the bonus token
    assert propose(source, context(text)).token_ids == expected[5:9]
    assert model.num_rows == [5, 1, 1, 1, 2, 1, 1, 1]  # the last draft token had no KV yet
    text += [*expected[5:7], (expected[7] + 1) % V]  # two accepted, one rejected
    again = greedy_continuation(text, 4)
    model.num_rows.clear()
    assert propose(source, context(text)).token_ids == again
    assert model.num_rows == [1, 1, 1, 1]  # only the bonus token is new
    source.check_integrity()
    source.release("r")
    source.release("r")
    source.check_integrity()
    assert source._arena.num_free_pages == source._arena.num_pages


def test_a_batch_runs_together_and_short_budgets_leave_early() -> None:
    model = FakeTarget(V)
    source = bound(model)
    texts = [[1, 2, 3], [4], [5, 6]]
    drafts = source.propose([context(t, request_id=str(t)) for t in texts], [4, 1, 0])
    assert [len(draft) for draft in drafts] == [4, 1, 0]
    assert model.num_rows == [4, 1, 1, 1]
    assert drafts[0].token_ids == greedy_continuation(texts[0], 4)
    assert drafts[1].token_ids == greedy_continuation(texts[1], 1)


def test_a_long_prompt_is_taken_in_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafting.draft_model.MAX_ROWS", 16)
    model = FakeTarget(V)
    source = bound(model)
    long = [i % 7 for i in range(50)]
    a, b = source.propose([context(long, request_id="a"), context([1, 2], request_id="b")], [2, 2])
    assert max(model.num_rows) <= 16
    assert a.token_ids == greedy_continuation(long, 2)
    assert b.token_ids == greedy_continuation([1, 2], 2)


def test_the_same_text_asked_for_twice_gives_the_same_draft() -> None:
    source = bound()
    first = propose(source, context([1, 2, 3]))
    assert propose(source, context([1, 2, 3])).token_ids == first.token_ids
    shorter = propose(source, context([9]))  # the id given to another request
    assert shorter.token_ids == greedy_continuation([9], 4)


def test_drafting_stops_where_the_text_outgrows_the_model() -> None:  # B23
    source = bound(FakeTarget(V, max_model_len=8), k=4)
    assert len(propose(source, context([1] * 6))) == 3  # KV of 6 + 2 tokens
    assert len(propose(source, context([1] * 8))) == 1
    for _ in range(3):
        assert propose(source, context([1] * 9)).token_ids == []
    assert source.events == {"context": 1}
    assert source._arena.num_free_pages == source._arena.num_pages
    assert len(propose(source, context([1] * 4, request_id="other"))) == 4


def test_full_kv_means_no_draft() -> None:
    source = bound(kv_cache_tokens=32)
    assert len(propose(source, context([1] * 20, request_id="a"))) == 4
    assert propose(source, context([1] * 20, request_id="b")).token_ids == []
    assert source.events == {"kv": 1}
    source.release("a")
    assert len(propose(source, context([1] * 20, request_id="b"))) == 4
    source.check_integrity()


# ---- choosing


def test_confidence_is_the_models_probability_until_more_is_known() -> None:
    source = bound(k=1)
    draft = propose(source, context([1, 2, 3]))
    assert 0 < draft.confidence[0] < 1
    before = draft.confidence[0]
    for _ in range(200):
        source.observe([Outcome("r", draft, 1, [*draft.token_ids, 0])])
    assert before < propose(source, context([1, 2, 3])).confidence[0] > 0.9
    source.observe([Outcome("unknown", draft, 1, [1, 2])])


def test_a_drafter_equal_to_the_target_is_always_right_when_sampling() -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, max_tokens=30, ignore_eos=True, presence_penalty=0.5
    )
    plain = run(make_engine(), {"r": ([3, 4], params)})["r"]
    source = DraftModelSource(FakeTarget(V), 4)
    fast = run(make_engine([source]), {"r": ([3, 4], params)})["r"]
    assert fast.outputs[0].token_ids == plain.outputs[0].token_ids
    metrics = fast.metrics.speculative_decoding
    assert metrics is not None
    assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens >= 20


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_classical_rules_are_told_the_distribution(rule: str) -> None:
    params = SamplingParams(temperature=1.0, top_k=5, seed=1)
    source = bound(rule=rule, k=3)
    draft = propose(source, context([1, 2], params))
    assert draft.probs is not None and draft.probs.shape == (3, V)
    assert draft.probs.sum(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert (draft.probs > 0).sum(dim=1).tolist() == [5, 5, 5]
    assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.token_ids))
    assert propose(source, context([1, 2], GREEDY, "greedy")).probs is None
    verifier = make_verifier(rule, (0,))
    engine = make_engine([DraftModelSource(FakeTarget(V), 3, rule=rule)], verifier=verifier)
    metrics = run(engine, {"r": ([3, 4], params)})["r"].metrics.speculative_decoding
    assert metrics is not None  # equal distributions reject nothing
    assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens > 0


# ---- refusals


def word_tokenizer(words: list[str]) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(words)}
    return Tokenizer(tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=words[0])), {})


def test_another_tokenizer_is_refused_naming_the_first_token() -> None:  # X5
    source = DraftModelSource(FakeTarget(4), tokenizer=word_tokenizer(["a", "b", "x", "d"]))
    with pytest.raises(TokenizerMismatch, match="token 2 is 'x', expected 'c'"):
        source.bind(FakeTarget(4), word_tokenizer(["a", "b", "c", "d"]), 4)
    with pytest.raises(TokenizerMismatch, match="token 3 is 'd', expected None"):
        DraftModelSource(FakeTarget(4), tokenizer=word_tokenizer(["a", "b", "c", "d"])).bind(
            FakeTarget(4), word_tokenizer(["a", "b", "c"]), 4
        )
    with pytest.raises(TokenizerMismatch, match="vocabulary of 5 tokens, fake one of 6"):
        DraftModelSource(FakeTarget(5)).bind(FakeTarget(6), None, 4)


def test_vocabularies_that_differ_in_padding_only() -> None:
    words = ["a", "b", "c", "d"]
    source = DraftModelSource(FakeTarget(6), 4, tokenizer=word_tokenizer(words))
    source.bind(FakeTarget(5), word_tokenizer(words), 4)
    draft = propose(source, context([1, 2]))
    assert max(draft.token_ids) < 5
    smaller = DraftModelSource(FakeTarget(4), 2, tokenizer=word_tokenizer(words), rule="rejection")
    smaller.bind(FakeTarget(6), word_tokenizer(words), 4)
    drawn = propose(smaller, context([1, 2], SamplingParams(temperature=1.0)))
    assert drawn.probs is not None and drawn.probs.shape == (2, 6)
    assert propose(smaller, context([1, 5], request_id="b")).token_ids == []  # no id 5 there
    assert smaller.events == {"vocabulary": 1}


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens .* got 0"):
        DraftModelSource(FakeTarget(V), 0)
    with pytest.raises(ConfigError, match=r"kv_cache_tokens .* at least 16, got 3"):
        DraftModelSource(FakeTarget(V), kv_cache_tokens=3)


# ---- every source in the engine


SOURCES: dict[str, Callable[[], list[DraftSource]]] = {
    "lookup": lambda: [LookupSource(shared_tokens=500)],
    "predicted": lambda: [PredictedSource()],
    "draft model": lambda: [DraftModelSource(FakeTarget(V, sharpness=2.5), 3)],
    "short draft model": lambda: [DraftModelSource(FakeTarget(V, max_model_len=30), 3)],
    "scripted chain": lambda: [ScriptedSource(lambda c: [1, 2, -1, V + 5])],
    "scripted tree": lambda: [
        ScriptedSource(lambda c: Draft([1, 2, 3, -1, 5, 6], parents=[-1, -1, 0, 0, 1, 4]))
    ],
    "table": lambda: [TableSource(toy_table(texts(vocab_size=V), V), branches=1)],
    "table tree": lambda: [TableSource(toy_table(texts(vocab_size=V), V), 9, branches=3)],
    "lookup and table": lambda: [LookupSource(), TableSource(toy_table(texts(vocab_size=V), V))],
    "all": lambda: [LookupSource(), PredictedSource(), DraftModelSource(FakeTarget(V), 2)],
    **{kind: lambda kind=kind: [NeuralSource(toy_drafter(kind, V, V // 2))] for kind in KINDS},
    "trained and lookup": lambda: [LookupSource(), NeuralSource(toy_drafter("dspark", V))],
}
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=30),
    SamplingParams(temperature=1.0, seed=4, max_tokens=25, repetition_penalty=1.2, min_tokens=9),
    SamplingParams(temperature=0.4, seed=5, max_tokens=40, n=2),
    SamplingParams(temperature=0.9, seed=6, max_tokens=30, stop=["e", "qu"]),  # B09
]


def decode(sources: list[DraftSource], kv_cache_tokens: int) -> dict[str, RequestOutput]:
    engine = make_engine(sources, kv_cache_tokens=kv_cache_tokens, planner=None)
    for i, params in enumerate(PARAMS):
        prompt = [5, 6, 7, 8, 5, 6, 7, 9, 10 + i] * (i + 1)
        engine.add_request(f"r{i}", prompt, params, prediction=[6, 7, 8, 9] * 8)
    return run(engine, {})


@pytest.fixture(scope="module")
def plain() -> dict[str, RequestOutput]:
    """Plain decoding of the same requests."""
    found = decode([], 2048)
    assert found["r4"].outputs[0].stop_reason in ("e", "qu")
    return found


@pytest.mark.parametrize("kv_cache_tokens", [2048, 80])  # the second preempts most of them
@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_plain_text_and_its_memory_back(
    name: str, kv_cache_tokens: int, plain: dict[str, RequestOutput]
) -> None:
    sources = SOURCES[name]()
    fast = decode(sources, kv_cache_tokens)
    for request_id, result in plain.items():
        for choice, expected in zip(fast[request_id].outputs, result.outputs, strict=True):
            assert choice.token_ids == expected.token_ids
            assert choice.finish_reason == expected.finish_reason
    preempted = sum(result.metrics.num_preemptions for result in fast.values())
    assert not preempted or kv_cache_tokens == 80
    assert preempted or kv_cache_tokens == 2048 or "model" in name or name == "all"
    for source in sources:
        if isinstance(source, DraftModelSource | NeuralSource):
            source.check_integrity()
            assert source._arena.owners == []
        assert getattr(source, "_requests", {}) == {}


def first_two(target: FakeTarget, prompt: list[int]) -> np.ndarray:
    """Exact distribution of the first two tokens at temperature 1, float64 [V, V]."""

    def softmax(path: int) -> np.ndarray:
        weights = np.exp(target.logits_of(path).astype(np.float64))
        return weights / weights.sum()

    path = ROOT
    for token in prompt:
        path = path_hash(path, token)
    first = softmax(path)
    return np.stack([first[t] * softmax(path_hash(path, t)) for t in range(len(first))])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["invariant", "rejection", "block"])
@pytest.mark.parametrize("name", ["lookup", "draft model", "table", *KINDS])
def test_the_distribution_is_the_targets(name: str, rule: str) -> None:
    target, prompt = FakeTarget(5, sharpness=0.8), [1, 2, 3, 1, 4, 2, 1]
    source: DraftSource = LookupSource(num_speculative_tokens=3, min_survival=0)
    if name == "draft model":
        source = DraftModelSource(FakeTarget(5, sharpness=0.4), 3, rule=rule)
    if name == "table":
        branches = 1 if rule == "block" else 3
        source = TableSource(toy_table(texts(vocab_size=5), 5), 6, branches, min_survival=0)
    if name in KINDS:  # it knows three of the five tokens
        drafter = toy_drafter(name, 5, 3, num_draft_tokens=3)
        drafter.d2t = torch.tensor([0, 2, 3])
        source = NeuralSource(drafter, rule=rule)
    engine = make_engine(
        [source], target, tokenizer=None, eos_token_ids=(), verifier=make_verifier(rule, ())
    )
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=3, n=800)
    seen = np.zeros((5, 5))
    result = run(engine, {"r": (prompt, params)}, max_steps=20_000)["r"]
    for output in result.outputs:
        seen[output.token_ids[0], output.token_ids[1]] += 1
    expected = 800 * first_two(target, prompt)
    assert expected.min() > 5
    assert ((seen - expected) ** 2 / expected).sum() < 51.2  # chi-square, 24 degrees, 0.1 %
    metrics = result.metrics.speculative_decoding
    assert metrics is not None
    assert 0 < metrics.num_accepted_draft_tokens < metrics.num_draft_tokens
