"""Accept rules on small vocabularies, most of them against exact enumeration.

For the enumeration every test of a uniform number is replaced by both of its answers, each with
its probability, and every draw by the distribution it draws from: no sampling error is left.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.sampling_params import SamplingParams
from outrider.target import verify
from outrider.target.noise import draft_noise_key, noise_key
from outrider.target.sampling import RowGroup, choose_tokens, draw_drafts, target_probs
from outrider.target.verify import Verdict, accept_block, accept_matching, accept_rejection

Model = Callable[[tuple[int, ...]], np.ndarray]  # tokens so far -> distribution of the next
Rule = Callable[[Sequence[int], torch.Tensor, torch.Tensor | None, int, int], Verdict]


def rejection(
    draft: Sequence[int], p: torch.Tensor, q: torch.Tensor | None, key: int, position: int
) -> Verdict:
    return accept_rejection(draft, [], p, q, key, position)


def random_model(size: int, seed: int, support: int | None = None) -> Model:
    """A fixed random distribution per context, zero outside the first `support` ids."""

    def model(context: tuple[int, ...]) -> np.ndarray:
        probs = np.random.default_rng([seed, *context]).dirichlet(np.full(size, 0.7))
        if support is not None:
            probs[support:] = 0.0
        return (probs / probs.sum()).astype(np.float32).astype(np.float64)

    return model


@dataclass
class Coin:
    """Stands for a uniform number: `coin < test` is answered by script, and priced."""

    answers: Iterator[bool]
    price: list[float]

    def __lt__(self, test: float) -> bool:
        assert -1e-9 <= test <= 1.0 + 1e-9 or test > 1.0, test
        test = min(1.0, max(0.0, test))
        answer = next(self.answers)
        self.price.append(test if answer else 1.0 - test)
        return answer


def outcomes(
    call: Callable[[], Verdict], most_tests: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, list[int], np.ndarray]]:
    """Every way a verification can go: (probability, accepted, distribution of the bonus)."""
    seen = set()
    for script in itertools.product([True, False], repeat=most_tests):
        price: list[float] = []
        drawn: list[np.ndarray] = []
        used = 0

        def answers(script: tuple[bool, ...] = script) -> Iterator[bool]:
            nonlocal used
            for answer in script:
                used += 1
                yield answer

        coin = Coin(answers(), price)

        def draw(weights: np.ndarray, _key: int, drawn: list[np.ndarray] = drawn) -> int:
            drawn.append(weights / weights.sum())
            return 0

        with monkeypatch.context() as patch:
            patch.setattr(verify, "uniform", lambda *_args, coin=coin: coin)
            patch.setattr(verify, "_draw", draw)
            verdict = call()
        if script[:used] not in seen:
            seen.add(script[:used])
            yield float(np.prod(price)), verdict.accepted, drawn[0]


def probs_of(model: Model, contexts: list[tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor(np.stack([model(context) for context in contexts]), dtype=torch.float32)


def sequence_probs(model: Model, size: int, length: int) -> dict[tuple[int, ...], float]:
    return {
        tokens: float(np.prod([model(tokens[:i])[tokens[i]] for i in range(length)]))
        for tokens in itertools.product(range(size), repeat=length)
    }


def continued(
    kept: tuple[int, ...], probability: float, target: Model, size: int, length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """All texts of a length that begin with `kept`, which the target then continues."""
    if len(kept) >= length:
        yield kept[:length], probability
        return
    for token, p in enumerate(target(kept)):
        yield from continued((*kept, token), probability * p, target, size, length)


def chain_texts(
    rule: Rule, target: Model, draft: Model, size: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[tuple[int, ...], float], float]:
    """Distribution of the first k + 1 tokens, and the mean number of accepted drafts."""
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    mean = 0.0
    for tokens, drawn in sequence_probs(draft, size, k).items():
        if drawn == 0:
            continue
        prefixes = [tokens[:i] for i in range(k + 1)]
        p, q = probs_of(target, prefixes), probs_of(draft, prefixes[:k])
        for chance, accepted, bonus in outcomes(
            lambda tokens=tokens, p=p, q=q: rule(tokens, p, q, 1, 0), k, monkeypatch
        ):
            mean += drawn * chance * len(accepted)
            for token, share in enumerate(bonus):
                kept = (*tokens[: len(accepted)], token)
                for text, each in continued(kept, drawn * chance * share, target, size, k + 1):
                    texts[text] += each
    return texts, mean


def check_same(found: dict[tuple[int, ...], float], target: Model, size: int, length: int) -> None:
    for text, probability in sequence_probs(target, size, length).items():
        assert found[text] == pytest.approx(probability, abs=2e-6), text


# ---- the drafter-invariant rule -------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "chosen", "accepted", "bonus"),
    [
        ([], [4], [], 4),
        ([1, 2, 3], [0, 2, 3, 4], [], 0),
        ([1, 2, 3], [1, 0, 3, 4], [0], 0),
        ([1, 2, 3], [1, 2, 3, 4], [0, 1, 2], 4),
        ([-1, 2], [1, 2, 3], [], 1),
        ([1, 5], [1, 2, 3], [0], 2),
    ],
)
def test_matching_chain(
    draft: list[int], chosen: list[int], accepted: list[int], bonus: int
) -> None:
    chain = accept_matching(draft, [], chosen)
    assert (chain.accepted, chain.bonus_token) == (accepted, bonus)
    assert chain.num_accepted_drafts == len(accepted)
    as_tree = accept_matching(draft, list(range(-1, len(draft) - 1)), chosen)
    assert as_tree == chain


def test_matching_tree_follows_the_branch_the_target_chose() -> None:
    #  0: 1   1: 2   2: 3 (under 0)   3: 3 (under 1)   4: 4 (under 3)
    draft, parents = [1, 2, 3, 3, 4], [-1, -1, 0, 1, 3]
    assert accept_matching(draft, parents, [2, 0, 3, 0, 4, 0]) == Verdict([1, 3, 4], 0)
    assert accept_matching(draft, parents, [1, 4, 3, 0, 4, 0]) == Verdict([0], 4)
    assert accept_matching(draft, parents, [0, 1, 1, 1, 1, 1]) == Verdict([], 0)
    assert accept_matching(draft, parents, [2, 3, 0, 0, 4, 0]) == Verdict([1], 0)


def test_matching_never_depends_on_the_draft() -> None:
    """Any draft, in any number of steps, gives the text of plain decoding."""
    logits_of = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)) * 1.5  # by last token
    params = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.4)
    key = noise_key(3, 0)

    def text_with(draft_length: int, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        text = [0, 1]
        while len(text) < 40:
            draft = rng.integers(-1, 6, draft_length).tolist()
            rows = torch.stack([logits_of[min(4, max(0, t))] for t in [text[-1], *draft]])
            group = RowGroup(params, key, np.array(text, np.int32), 2, 0, draft)
            verdict = accept_matching(draft, [], choose_tokens(rows, [group]).tolist())
            text += [draft[i] for i in verdict.accepted] + [verdict.bonus_token]
        return text[:40]

    plain = text_with(0, 0)
    assert len(set(plain[2:])) > 2
    for length, seed in ((1, 1), (3, 2), (8, 3)):
        assert text_with(length, seed) == plain


# ---- the classical rules: chains ------------------------------------------------------------


@pytest.mark.parametrize("rule", [rejection, accept_block])
@pytest.mark.parametrize(("size", "k"), [(5, 1), (4, 2), (3, 3)])
def test_chains_keep_the_targets_distribution(
    rule: Rule, size: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        target, draft = random_model(size, seed), random_model(size, seed + 100)
        texts, _ = chain_texts(rule, target, draft, size, k, monkeypatch)
        check_same(texts, target, size, k + 1)


@pytest.mark.parametrize("rule", [rejection, accept_block])
def test_reduced_draft_vocabulary_reaches_every_token(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_model(5, 1), random_model(5, 2, support=2)
    texts, _ = chain_texts(rule, target, draft, 5, 2, monkeypatch)
    check_same(texts, target, 5, 3)


@pytest.mark.parametrize("rule", [rejection, accept_block])
def test_filtered_target_never_emits_what_it_excludes(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = random_model(4, 5, support=2), random_model(4, 6)
    texts, _ = chain_texts(rule, target, draft, 4, 2, monkeypatch)
    check_same(texts, target, 4, 3)


@pytest.mark.parametrize("rule", [rejection, accept_block])
@pytest.mark.parametrize("tokens", [(0, 1), (2, 2), (-1, 1), (1, -1), (1, 4), (4, 7)])
def test_drafts_that_were_not_drawn(
    rule: Rule, tokens: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A point mass, and tokens outside the vocabulary, which are never kept."""
    target = random_model(4, 8)
    prefixes = [tuple(min(3, max(0, t)) for t in tokens[:i]) for i in range(3)]
    p = probs_of(target, prefixes)
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, accepted, bonus in outcomes(lambda: rule(tokens, p, None, 1, 0), 2, monkeypatch):
        if chance > 0:
            assert all(0 <= tokens[i] < 4 for i in range(len(accepted)))
        for token, share in enumerate(bonus):
            kept = (*prefixes[len(accepted)], token)
            for text, each in continued(kept, chance * share, target, 4, 3):
                texts[text] += each
    check_same(texts, target, 4, 3)


@pytest.mark.parametrize("rule", [rejection, accept_block])
def test_a_token_that_cannot_have_been_drawn_is_not_kept(rule: Rule) -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    draft = torch.tensor([[0.0, 0.5, 0.5]])  # claims never to draw token 0
    for key in range(20):
        assert rule([0], target, draft, key, 0).num_accepted_drafts == 0


def test_block_keeps_at_least_as_many_as_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        target, draft = random_model(3, seed), random_model(3, seed + 50)
        _, blockwise = chain_texts(accept_block, target, draft, 3, 3, monkeypatch)
        _, tokenwise = chain_texts(rejection, target, draft, 3, 3, monkeypatch)
        assert blockwise >= tokenwise - 1e-9


def test_block_on_the_papers_example(monkeypatch: pytest.MonkeyPatch) -> None:  # X10
    """Two tokens, target (1/3, 2/3), draft (2/3, 1/3), K = 2: 10/9 kept by token, 11/9 by block."""
    target: Model = lambda _: np.array([1 / 3, 2 / 3])  # noqa: E731
    draft: Model = lambda _: np.array([2 / 3, 1 / 3])  # noqa: E731
    _, tokenwise = chain_texts(rejection, target, draft, 2, 2, monkeypatch)
    texts, blockwise = chain_texts(accept_block, target, draft, 2, 2, monkeypatch)
    assert tokenwise == pytest.approx(10 / 9, abs=1e-6)
    assert blockwise == pytest.approx(11 / 9, abs=1e-6)
    check_same(texts, target, 2, 3)


@pytest.mark.parametrize("rule", [rejection, accept_block])
def test_zero_one_and_full_acceptance(rule: Rule) -> None:
    certain = torch.eye(4)
    for draft, expected in (
        ([0, 1, 2], Verdict([0, 1, 2], 3)),
        ([0, 2, 2], Verdict([0], 1)),
        ([3, 1, 2], Verdict([], 0)),
    ):
        for key in range(20):
            assert rule(draft, certain, None, key, 5) == expected
    same = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)), 1)
    for key in range(50):  # equal distributions: everything is kept
        assert rule([1, 5, 0], same, same[:3], key, 5).accepted == [0, 1, 2]


# ---- the classical rule: trees --------------------------------------------------------------


@pytest.mark.parametrize("replacement", [True, False])
def test_trees_keep_the_targets_distribution(
    replacement: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two siblings under the text and two under the first of them, drawn from the drafter."""
    size, parents = 3, [-1, -1, 0, 0, 1]
    target, draft = random_model(size, 20), random_model(size, 21)
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens in itertools.product(range(size), repeat=5):
        paths: list[tuple[int, ...]] = [()]
        drawn, q = 1.0, []
        for i, token in enumerate(tokens):
            context = paths[parents[i] + 1]
            probs = draft(context).copy()
            if not replacement:
                probs[[tokens[j] for j in range(i) if parents[j] == parents[i]]] = 0.0
                probs /= probs.sum()
            q.append(probs)
            drawn *= probs[token]
            paths.append((*context, token))
        if drawn == 0:
            continue
        p = probs_of(target, paths)
        q_rows = torch.tensor(np.stack(q), dtype=torch.float32)
        for chance, accepted, bonus in outcomes(
            lambda tokens=tokens, p=p, q=q_rows: accept_rejection(tokens, parents, p, q, 1, 0),
            4,
            monkeypatch,
        ):
            kept = paths[accepted[-1] + 1] if accepted else ()
            for token, share in enumerate(bonus):
                for text, each in continued(
                    (*kept, token), drawn * chance * share, target, size, 3
                ):
                    texts[text] += each
    check_same(texts, target, size, 3)


def test_tree_of_certain_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings that were not drawn at all, one of them impossible."""
    target, tokens, parents = random_model(4, 30), [2, 9, 0, 3], [-1, -1, -1, 0]
    paths = [(), (2,), (0,), (0,), (2, 3)]
    p = probs_of(target, paths)
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for chance, accepted, bonus in outcomes(
        lambda: accept_rejection(tokens, parents, p, None, 1, 0), 4, monkeypatch
    ):
        if chance == 0:
            continue
        assert 1 not in accepted
        kept = paths[accepted[-1] + 1] if accepted else ()
        for token, share in enumerate(bonus):
            for text, each in continued((*kept, token), chance * share, target, 4, 3):
                texts[text] += each
    check_same(texts, target, 4, 3)


# ---- with the real random numbers -----------------------------------------------------------


@pytest.mark.parametrize("rule", [rejection, accept_block])
def test_sampled_texts_follow_the_warped_distribution(rule: Rule) -> None:  # B16
    """Logits, filters, coupled drafts and several steps, as the engine does it; two tokens."""
    size, num_texts = 5, 3000
    generator = torch.Generator().manual_seed(4)
    target_logits = torch.randn(size, size, generator=generator)  # by last token
    draft_logits = target_logits + 0.7 * torch.randn(size, size, generator=generator)
    params = SamplingParams(temperature=0.8, top_p=0.9)

    def rows_of(logits: torch.Tensor, tokens: list[int]) -> RowGroup:
        return RowGroup(params, 0, np.array(tokens, np.int32), 1, 0)

    def step(text: list[int], key: int) -> list[int]:
        draft_key = draft_noise_key(key, len(text)) if rule is accept_block else key
        draft: list[int] = []
        for _ in range(2):
            context = np.array(text + draft, np.int32)
            row = draft_logits[[context[-1]]]
            draft.append(int(draw_drafts(row, [RowGroup(params, draft_key, context, 1, 0)])[0][0]))
        last = [text[-1], *draft]
        p = torch.cat([table[t] for t in last])
        q = torch.cat([draft_table[t] for t in last[:2]])
        verdict = rule(draft, p, q, key, len(text))
        return [draft[i] for i in verdict.accepted] + [verdict.bonus_token]

    table = [target_probs(target_logits[[t]], rows_of(target_logits, [t])) for t in range(size)]
    draft_table = [target_probs(draft_logits[[t]], rows_of(draft_logits, [t])) for t in range(size)]
    counts = np.zeros((size, size))
    for seed in range(num_texts):
        text = [2]
        while len(text) < 4:
            text += step(text, noise_key(seed, 0))
        counts[text[2], text[3]] += 1
    transition = torch.cat(table).double().numpy()
    expected = np.zeros((size, size))  # [third token, fourth token]
    for second in range(size):
        expected += transition[2][second] * transition[second][:, None] * transition
    expected *= num_texts
    assert counts[expected == 0].sum() == 0
    cells = expected > 0
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    assert statistic < 57  # once in 5,000 with 24 degrees of freedom


@pytest.mark.parametrize("rule", [rejection, accept_block])
def test_same_seed_same_verdict(rule: Rule) -> None:
    p = torch.softmax(torch.randn(4, 30, generator=torch.Generator().manual_seed(1)), 1)
    q = torch.softmax(torch.randn(3, 30, generator=torch.Generator().manual_seed(2)), 1)
    verdicts = [rule([3, 4, 5], p, q, noise_key(seed, 0), 10) for seed in range(40)]
    assert verdicts == [rule([3, 4, 5], p, q, noise_key(seed, 0), 10) for seed in range(40)]
    assert len({verdict.bonus_token for verdict in verdicts}) > 5
    elsewhere = [rule([3, 4, 5], p, q, noise_key(seed, 0), 11) for seed in range(40)]
    assert elsewhere != verdicts
