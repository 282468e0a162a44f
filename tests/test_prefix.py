"""KV of earlier texts saves rows and changes no token; the fake target asserts every slot read."""

import numpy as np
import pytest
import torch
from engine_cases import VOCAB, exact, params, tree_with_branch_last
from fakes import ROOT, FakeTarget, ReplaySource, drain, make_engine, path_hash, run
from neural_cases import KINDS, toy_drafter
from toy_models import toy_model

from outrider.drafting.neural import NeuralSource
from outrider.drafting.source import Draft, DraftContext, DraftSource
from outrider.native import library
from outrider.target.base import PAGE_SIZE, Target
from outrider.target.model import TransformersTarget
from outrider.target.native import NativeTarget

LONG = [1 + i * i % (VOCAB - 1) for i in range(5 * PAGE_SIZE + 3)]


def decode(engine, name, prompt, sampling=None) -> tuple[list[int], int]:
    """The output of one request, and the rows that its forwards had."""
    before = len(engine.target.num_rows)
    result = run(engine, {name: (prompt, sampling or params(max_tokens=8))})[name]
    return result.outputs[0].token_ids, sum(engine.target.num_rows[before:])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_prompt_again_computes_only_its_end(temperature):
    sampling = params(max_tokens=8, temperature=temperature, seed=3)
    engine = make_engine()
    first, rows = decode(engine, "a", LONG, sampling)
    assert rows == len(LONG) + 7
    assert decode(engine, "b", LONG, sampling) == (first, 3 + 7)


def test_a_conversation_goes_on_where_its_last_answer_ended():
    engine = make_engine()
    answer, _ = decode(engine, "a", LONG, params(max_tokens=4 * PAGE_SIZE))
    longer = [*LONG, *answer, 5, 6, 7]
    text, rows = decode(engine, "b", longer)
    known = (len(LONG) + len(answer) - 1) // PAGE_SIZE * PAGE_SIZE
    assert rows == len(longer) - known + 7
    assert text == decode(make_engine(), "b", longer)[0]


def test_a_text_that_differs_early_shares_what_comes_before():
    engine = make_engine()
    decode(engine, "a", LONG)
    other = list(LONG)
    other[2 * PAGE_SIZE + 1] = 1 + other[2 * PAGE_SIZE + 1] % (VOCAB - 1)
    text, rows = decode(engine, "b", other)
    assert rows == len(other) - 2 * PAGE_SIZE + 7
    assert text == decode(make_engine(), "b", other)[0]


def test_owners_never_share():
    engine = make_engine()
    answers = [
        decode(engine, f"{owner}{i}", LONG, params(max_tokens=8, owner=owner))
        for i in range(2)
        for owner in ("me", "you", "")
    ]
    assert [rows for _, rows in answers] == [len(LONG) + 7] * 3 + [3 + 7] * 3
    assert len({tuple(text) for text, _ in answers}) == 1


def test_nothing_is_kept_when_reuse_is_off():
    engine = make_engine(reuse_prefixes=False)
    assert [decode(engine, name, LONG)[1] for name in "ab"] == [len(LONG) + 7] * 2
    assert engine.arena.num_known_pages == 0


def test_choices_share_the_kv_of_their_prompt():
    sampling = params(n=4, temperature=1.0, seed=2, max_tokens=6)
    engine = make_engine()
    found = run(engine, {"r": (LONG, sampling)})["r"]
    assert sum(engine.target.num_rows) == len(LONG) + 3 * 3 + 4 * 5
    plain = run(make_engine(reuse_prefixes=False), {"r": (LONG, sampling)})["r"]
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in plain.outputs]
    assert len({tuple(output.token_ids) for output in found.outputs}) == 4
    assert found.metrics.num_cached_tokens == 0  # of the prompt as the user sent it
    assert run(engine, {"s": (LONG, sampling)})["s"].metrics.num_cached_tokens == 5 * PAGE_SIZE


def test_requests_that_come_together_compute_their_common_beginning_once():
    engine = make_engine(max_num_batched_tokens=40)
    tails = {f"r{i}": ([*LONG, 7 + i], params(max_tokens=4)) for i in range(3)}
    found = run(engine, tails)
    assert sum(engine.target.num_rows) == len(LONG) + 1 + 2 * 4 + 3 * 3
    for name, request in tails.items():
        alone = run(make_engine(), {name: request})[name]
        assert found[name].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("make", [exact, tree_with_branch_last])
def test_speculative_text_on_a_known_prefix_is_plain_text(make):
    sampling = params(max_tokens=40, temperature=0.8, seed=1)
    plain = run(make_engine(), {"a": (LONG, sampling)})["a"].outputs[0].token_ids
    engine = make_engine([ReplaySource({"a": plain, "b": plain}, make)])
    for name in "ab":
        assert decode(engine, name, LONG, sampling)[0] == plain
    both = [*LONG, *plain]
    rest = run(make_engine(), {"c": (both, sampling)})["c"].outputs[0].token_ids
    engine.speculation.sources[0].outputs["c"] = rest
    text, rows = decode(engine, "c", both, sampling)
    assert text == rest
    assert rows < len(both) - 5 * PAGE_SIZE + 200  # drafts included; the answer was found too


def test_a_preempted_request_computes_again_only_what_is_lost():
    engine = make_engine(kv_cache_tokens=16 * PAGE_SIZE)
    requests = {
        name: ([9, i, *LONG[: 3 * PAGE_SIZE]], params(max_tokens=80)) for i, name in enumerate("ab")
    }
    found = run(engine, requests)
    preemptions = sum(result.metrics.num_preemptions for result in found.values())
    assert preemptions > 0
    prompts = sum(len(prompt) for prompt, _ in requests.values())
    assert sum(engine.target.num_rows) < prompts + 2 * 80 + preemptions * 5 * PAGE_SIZE
    for name, request in requests.items():
        alone = run(make_engine(), {name: request})[name]
        assert found[name].outputs[0].token_ids == alone.outputs[0].token_ids


def test_known_pages_give_way_before_any_request_does():
    engine = make_engine(kv_cache_tokens=16 * PAGE_SIZE)
    for i in range(4):
        decode(engine, f"old{i}", [i, *LONG[: 3 * PAGE_SIZE]])
    assert engine.arena.num_known_pages > 8
    requests = {f"r{i}": ([30 + i, *LONG], params(max_tokens=20)) for i in range(2)}
    found = run(engine, requests)
    assert [result.metrics.num_preemptions for result in found.values()] == [0, 0]


def test_engines_that_take_turns_on_one_target_find_nothing_of_the_other():
    target = FakeTarget(VOCAB)
    engines = [make_engine(target=target) for _ in range(2)]
    answers = [decode(engines[i % 2], f"r{i}", LONG) for i in range(4)]
    assert [rows for _, rows in answers] == [len(LONG) + 7] * 4
    assert len({tuple(text) for text, _ in answers}) == 1


class FeatureReader(DraftSource):
    """Asserts that it is told the features of every token whose KV is committed, in order."""

    name = "reader"
    max_draft_tokens = 4
    target: FakeTarget

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.target_layer_ids = layers
        self.held: dict[str, torch.Tensor] = {}
        self.num_checked = 0

    def bind(self, target, tokenizer, max_num_seqs) -> None:
        self.target = target

    def propose(self, contexts, budgets) -> list[Draft]:
        return [self._read(context) for context in contexts]

    def _read(self, context: DraftContext) -> Draft:
        parts = [self.held.get(context.request_id), context.features]
        held = torch.cat([part for part in parts if part is not None])
        self.held[context.request_id] = held
        path, expected = ROOT, []
        for token in context.token_ids[:-1].tolist():
            path = path_hash(path, token)
            expected.append(self.target.feature(path, self.target_layer_ids))
        assert torch.equal(held, torch.tensor(expected))
        self.num_checked += len(held)
        return Draft([int(context.token_ids[-1])] * 2)

    def release(self, request_id: str) -> None:
        self.held.pop(request_id, None)


def test_sources_get_the_features_of_tokens_that_no_forward_ran_over():
    readers = [FeatureReader((0,)), FeatureReader((1, 0))]
    readers[1].name = "other"
    engine = make_engine(readers, kv_cache_tokens=16 * PAGE_SIZE)
    sampling = params(max_tokens=60, temperature=0.9, seed=4)
    requests = {name: ([3, *LONG[: 3 * PAGE_SIZE], i], sampling) for i, name in enumerate("abcde")}
    found = run(engine, requests)
    assert sum(result.metrics.num_preemptions for result in found.values()) > 0
    again = run(engine, {f"{name}2": request for name, request in requests.items()})
    assert all(reader.num_checked > 1000 for reader in readers)
    for name in requests:
        assert again[f"{name}2"].outputs[0].token_ids == found[name].outputs[0].token_ids
        assert again[f"{name}2"].metrics.num_cached_tokens >= 3 * PAGE_SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_say_on_a_known_prefix_what_they_say_without_it(kind):
    source = NeuralSource(toy_drafter(kind, VOCAB))
    engine = make_engine([source], target=FakeTarget(VOCAB))
    sampling = params(max_tokens=24, temperature=0.9, seed=4)
    seen = []
    for name in "abc":
        result = run(engine, {name: (LONG, sampling)})[name]
        speculative = result.metrics.speculative_decoding
        seen.append((result.outputs[0].token_ids, speculative))
        assert result.metrics.num_cached_tokens == (0 if name == "a" else 5 * PAGE_SIZE)
        source.check_integrity()
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1].num_draft_tokens > 20


def real_target(kind: str) -> Target:
    if kind == "transformers":  # with sliding windows shorter than the text
        return TransformersTarget(toy_model("gemma3", head_dim=16), 256, deterministic=True)
    model = toy_model("llama", head_dim=16, num_hidden_layers=3)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    return NativeTarget(model.config, model.state_dict(), dtype, 256, "toy")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "transformers"])
@pytest.mark.skipif(library() is None, reason="no compiler, no compiled kernels")
def test_logits_on_a_known_prefix_have_the_same_bits(kind):
    texts = {
        name: ([3 + i * 7 % 90 for i in range(60)] + [5 + j] * 9, params(max_tokens=24, logprobs=3))
        for j, name in enumerate("abc")
    }
    found = []
    for reuse in (True, False):
        target = real_target(kind)
        options = {"eos_token_ids": (), "tokenizer": None, "max_num_batched_tokens": 33}
        engine = make_engine(target=target, reuse_prefixes=reuse, **options)
        answers = [run(engine, {name: text})[name] for name, text in texts.items()]
        answers += run(engine, texts).values()
        assert (answers[-1].metrics.num_cached_tokens > 0) == reuse
        found.append([(a.outputs[0].token_ids, a.outputs[0].logprobs) for a in answers])
    assert found[0] == found[1]


def test_an_aborted_prompt_leaves_behind_what_it_computed():
    engine = make_engine(max_num_batched_tokens=20)
    engine.add_request("a", LONG, params(max_tokens=8))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    drain(engine)
    text, rows = decode(engine, "b", LONG)
    assert rows == len(LONG) - 3 * PAGE_SIZE + 7
    assert text == decode(make_engine(), "b", LONG)[0]


def test_slots_follow_the_pages():
    from outrider.engine.features import slots_of

    pages = np.array([7, 2, 9], np.int32)
    assert slots_of(pages, 15, 18).tolist() == [7 * 16 + 15, 2 * 16, 2 * 16 + 1]
