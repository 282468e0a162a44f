"""What a trained drafter says while drafting is what it was trained to say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeTarget
from neural_cases import KINDS, toy_drafter

from outrider.drafters.base import Drafter, Texts
from outrider.drafting import neural
from outrider.drafting.neural import NeuralSource
from outrider.drafting.source import Draft, DraftContext
from outrider.errors import ConfigError
from outrider.sampling_params import SamplingParams

V = 24
GREEDY = SamplingParams(temperature=0)


class Conversation:
    """Texts with features, told to a source piece by piece as the engine does."""

    def __init__(self, drafter: Drafter, **options: Any) -> None:
        self.target = FakeTarget(V)
        self.drafter = drafter
        self.source = NeuralSource(drafter, **options)
        self.source.bind(self.target, None, max_num_seqs=4)
        self.random = np.random.default_rng(1)
        self.texts: dict[str, np.ndarray] = {}
        self.features: dict[str, torch.Tensor] = {}
        self.told: dict[str, int] = {}

    def grow(self, name: str, count: int) -> None:
        new = self.random.integers(0, V, count).astype(np.int32)
        self.texts[name] = np.concatenate([self.texts.get(name, new[:0]), new])
        width = self.drafter.config.feature_size
        rows = torch.from_numpy(self.random.normal(size=(count, width)).astype(np.float32))
        old = self.features.get(name, rows[:0])
        self.features[name] = torch.cat([old, rows])

    def context(self, name: str, params: SamplingParams = GREEDY) -> DraftContext:
        text = self.texts[name]
        features = None
        if self.drafter.config.target_layer_ids:
            features = self.features[name][self.told.get(name, 0) : len(text) - 1]
        self.told[name] = len(text) - 1
        return DraftContext(name, text, 1, params, noise_key=7, features=features)

    def propose(self, budgets: dict[str, int]) -> list[Draft]:
        contexts = [self.context(name) for name in budgets]
        drafts = self.source.propose(contexts, list(budgets.values()))
        self.source.check_integrity()
        return drafts

    def guessed(self, name: str, draft: Draft) -> tuple[list[int], torch.Tensor]:
        """Best tokens and confidence logits of the same drafter on the text and the draft."""
        text = np.concatenate([self.texts[name], np.array(draft.token_ids, np.int32)])
        width = self.drafter.config.feature_size
        features = torch.zeros(len(text), width)
        known = len(self.texts[name]) - 1
        features[:known] = self.features[name][:known]
        texts = Texts(torch.from_numpy(text).long(), [0, len(text)], features)
        config, count = self.drafter.config, len(draft.token_ids)
        self.drafter.config = replace(config, num_draft_tokens=count)  # blocks end with the draft
        with torch.no_grad():
            found = self.drafter.guess(texts, torch.tensor([known]), torch.tensor([count]))
            logits = found.logits
        self.drafter.config = config
        order = found.depths.argsort()
        logits = logits[order]
        confidence = found.confidence
        if confidence is None:
            confidence = torch.logit(logits.softmax(-1).amax(-1))
        else:
            confidence = confidence[order]
        return self.drafter.d2t[logits.argmax(-1)].tolist(), confidence


def check(talk: Conversation, names: Sequence[str], drafts: Sequence[Draft]) -> None:
    for name, draft in zip(names, drafts, strict=True):
        tokens, logits = talk.guessed(name, draft)
        assert draft.token_ids == tokens
        np.testing.assert_allclose(draft.confidence, logits.sigmoid().numpy(), atol=1e-4)


@pytest.mark.parametrize("size", [V, V // 2])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_drafter_guesses_in_training(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neural, "MAX_ROWS", 9)  # texts are taken in in portions
    talk = Conversation(toy_drafter(kind, V, size))
    talk.grow("a", 40)
    talk.grow("b", 3)
    for budgets in ({"a": 4, "b": 2}, {"b": 1}, {"a": 3, "b": 4}, {"a": 1, "b": 4}):
        drafts = talk.propose(budgets)
        assert [len(draft) for draft in drafts] == list(budgets.values())
        check(talk, list(budgets), drafts)
        for name in ("a", "b"):
            talk.grow(name, int(talk.random.integers(1, 6)))
    talk.source.release("a")
    talk.source.release("b")
    assert talk.source._arena.owners == []


@pytest.mark.parametrize("kind", KINDS)
def test_being_asked_twice_for_one_text_is_no_fault(kind: str) -> None:
    talk = Conversation(toy_drafter(kind, V))  # after a step that failed elsewhere
    talk.grow("a", 9)
    first = talk.propose({"a": 3})[0]
    again = talk.propose({"a": 3})[0]
    assert again.token_ids in ([], first.token_ids)
    talk.grow("a", 2)
    check(talk, ["a"], talk.propose({"a": 4}))


def test_temperatures_and_shifts_calibrate_confidence() -> None:
    drafter = toy_drafter("dspark", V)
    talk = Conversation(drafter)
    talk.grow("a", 8)
    [before] = talk.propose({"a": 4})
    drafter = toy_drafter("dspark", V)
    drafter.temperatures[:] = torch.tensor([1.0, 2.0, 4.0, 0.5])
    drafter.shifts[:] = torch.tensor([0.5, 0.0, -0.25, 0.125])
    talk = Conversation(drafter)
    talk.grow("a", 8)
    [after] = talk.propose({"a": 4})
    assert after.token_ids == before.token_ids
    logits = torch.logit(torch.tensor([before.confidence, after.confidence]).double())
    expected = logits[0] / drafter.temperatures + drafter.shifts
    torch.testing.assert_close(logits[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_confidences_of_any_size_are_chances(sign: float) -> None:
    """Warnings are errors here, and exp overflows from 710 on."""
    drafter = toy_drafter("dspark", V)
    with torch.no_grad():
        drafter.get_parameter("confidence_head.proj.weight").fill_(0)
        drafter.get_parameter("confidence_head.proj.bias").fill_(sign * 1e6)
    talk = Conversation(drafter)
    talk.grow("a", 8)
    [draft] = talk.propose({"a": 4})
    assert draft.confidence == pytest.approx([float(sign > 0)] * 4, abs=1e-9)


def test_a_text_beyond_the_drafter_ends_drafting_for_it_alone() -> None:
    talk = Conversation(toy_drafter("dspark", V))
    talk.grow("long", 250)
    talk.grow("short", 5)
    assert [len(d) for d in talk.propose({"long": 4, "short": 4})] == [4, 4]
    talk.grow("long", 4)
    talk.grow("short", 1)
    assert [len(d) for d in talk.propose({"long": 4, "short": 4})] == [0, 4]
    assert talk.source.events == {"context": 1}
    assert talk.source._arena.owners == ["short"]


def test_full_kv_means_no_draft_and_nothing_is_lost() -> None:
    talk = Conversation(toy_drafter("eagle3", V), kv_cache_tokens=64)
    talk.grow("a", 30)
    talk.grow("b", 40)
    assert [len(d) for d in talk.propose({"a": 4, "b": 4})] == [4, 0]
    assert talk.source.events == {"kv": 1}
    talk.source.release("a")
    talk.grow("b", 2)
    drafts = talk.propose({"b": 4})
    check(talk, ["b"], drafts)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_classical_rules_are_told_what_a_token_was_drawn_from(rule: str) -> None:
    talk = Conversation(toy_drafter("dspark", V, V // 2), rule=rule)
    talk.grow("a", 12)
    [greedy] = talk.source.propose([talk.context("a")], [4])
    assert greedy.probs is None  # a best token is no sample
    talk.grow("a", 1)
    sampled = talk.context("a", SamplingParams(temperature=1.0, top_k=5))
    [draft] = talk.source.propose([sampled], [4])
    assert draft.probs is not None and draft.probs.shape == (4, V)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(4))
    assert ((draft.probs > 0).sum(-1) <= 5).all()
    assert (draft.probs[:, 1::2] == 0).all()  # not in the drafter's vocabulary
    assert (draft.probs[range(4), draft.token_ids] > 0).all()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 8, ["hidden size of 4", "has 8"]),
        ("num_layers", 5, ["number of layers of 2", "has 5"]),
        ("vocab_size", 30, ["vocabulary of 24", "has 30"]),
    ],
)
def test_a_drafter_of_another_target_is_refused(field: str, value: int, words: list[str]) -> None:
    target = FakeTarget(V)
    setattr(target, field, value)
    source = NeuralSource(toy_drafter("dflash", V))
    with pytest.raises(ConfigError) as error:
        source.bind(target, None, 1)
    for word in [*words, "dflash", "fake"]:
        assert word in str(error.value)


def test_more_tokens_than_it_was_trained_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 4.*got 5"):
        NeuralSource(toy_drafter("dflash", V), 5)
    assert NeuralSource(toy_drafter("dflash", V), 2).max_draft_tokens == 2


def test_edits_speak_of_the_targets_ids() -> None:
    talk = Conversation(toy_drafter("eagle3", V, V // 2))
    talk.grow("a", 12)
    banned = list(range(0, V, 2))[:-1]  # all it knows but one
    params = SamplingParams(temperature=0, banned_token_ids=banned)
    [draft] = talk.source.propose([talk.context("a", params)], [4])
    assert draft.token_ids == [V - 2] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_one_token_is_no_trouble(kind: str) -> None:
    """The first token of a prompt of one has no features before its forward."""
    talk = Conversation(toy_drafter(kind, V))
    talk.grow("a", 1)
    context = talk.context("a")
    if context.features is not None:
        context = replace(context, features=None)
    [draft] = talk.source.propose([context], [3])
    assert len(draft.token_ids) == (0 if talk.source.target_layer_ids else 3)
    talk.grow("a", 1)
    [draft] = talk.propose({"a": 3})
    check(talk, ["a"], [draft])


@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_float16_target_on_a_cpu_drafters_compute_in_float32(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neural, "input_projection", lambda _, dtype: dtypes.append(dtype))
    monkeypatch.setattr(FakeTarget, "__init__", half)
    dtypes: list[torch.dtype] = []
    talk = Conversation(toy_drafter(kind, V))
    assert {parameter.dtype for parameter in talk.drafter.parameters()} == {torch.float32}
    assert dtypes == [torch.float32]


def half(self: FakeTarget, vocab_size: int, init: Any = FakeTarget.__init__) -> None:
    init(self, vocab_size)
    self.dtype = torch.float16
