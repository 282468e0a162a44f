"""The drafters' modules and their losses, against the plain definitions."""

import numpy as np
import pytest
import torch
from fakes import FakeTarget
from neural_cases import KINDS, toy_drafter

from outrider.drafters import attention
from outrider.drafters.attention import Chains, causal_attention, chain_attention
from outrider.drafters.base import Drafter, Texts
from outrider.native import library
from outrider.training.batches import AnchorRule, Pack
from outrider.training.features import Features
from outrider.training.losses import LossWeights, Wanted, head_losses, losses

V = 24


def attached(kind: str) -> Drafter:
    drafter, target = toy_drafter(kind, V), FakeTarget(V)
    drafter.attach(target.embedding, target.head)
    return drafter


def random_texts(drafter: Drafter, lengths: list[int], seed: int = 0) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return Texts(
        torch.randint(V, (total,), generator=generator),
        [0, *np.cumsum(lengths).tolist()],
        torch.randn(total, drafter.config.feature_size, generator=generator),
    )


# ---- attention while training


def brute_force(query, own_keys, own_values, keys, values, limits, own_mask):
    """One chain, one row, one head at a time."""
    chains, length, heads, dim = query.shape
    share = heads // keys.shape[1]
    out = torch.empty(chains, length, heads, dim)
    for a in range(chains):
        for row in range(length):
            for head in range(heads):
                group = head // share
                seen = [keys[i, group] for i in range(int(limits[a]))]
                worth = [values[i, group] for i in range(int(limits[a]))]
                for j in range(own_keys.shape[1]):
                    if own_mask is None or own_mask[row, j]:
                        seen.append(own_keys[a, j, group])
                        worth.append(own_values[a, j, group])
                scores = torch.stack(seen) @ query[a, row, head] * dim**-0.5
                out[a, row, head] = scores.softmax(0) @ torch.stack(worth)
    return out.flatten(2)


@pytest.mark.parametrize("portion", [1, 1 << 24])
@pytest.mark.parametrize("causal", [False, True])
def test_chains_see_their_text_up_to_their_limit_and_themselves(
    portion: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", portion)
    torch.manual_seed(0)
    starts, chain_starts = [0, 5, 12], [0, 3, 5]
    limits = torch.tensor([1, 3, 5, 2, 7])
    query = torch.randn(5, 3, 4, 8, requires_grad=True)
    own = torch.randn(2, 5, 3, 2, 8)
    context = torch.randn(2, 12, 2, 8)
    mask = torch.ones(3, 3, dtype=torch.bool).tril() if causal else None
    found = chain_attention(query, *own, *context, Chains(limits, chain_starts, starts), mask)
    for text in range(2):
        rows = slice(chain_starts[text], chain_starts[text + 1])
        inside = slice(starts[text], starts[text + 1])
        parts = (query[rows], own[0][rows], own[1][rows], context[0][inside], context[1][inside])
        expected = brute_force(*parts, limits[rows], mask)
        torch.testing.assert_close(found[rows], expected, rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(found.square().sum(), query)
    assert torch.isfinite(slope).all() and slope.abs().max() > 0


def test_texts_of_a_pack_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    packed = causal_attention(query, key, value, [0, 4, 9])
    for rows in (slice(0, 4), slice(4, 9)):
        alone = causal_attention(query[rows], key[rows], value[rows], [0, rows.stop - rows.start])
        torch.testing.assert_close(packed[rows], alone)


# ---- guesses


@pytest.mark.parametrize("kind", KINDS)
def test_a_guess_depends_on_its_own_text_and_nothing_behind_its_anchor(kind: str) -> None:
    """But for the tokens of the chain itself, which a drafter that goes on token by token reads."""
    drafter = attached(kind)
    texts = random_texts(drafter, [9, 14, 6])
    anchors, lengths = torch.tensor([4, 12, 13, 25]), torch.tensor([4, 2, 4, 3])
    with torch.no_grad():
        together = drafter.guess(texts, anchors, lengths)
        for anchor, length in zip(anchors.tolist(), lengths.tolist(), strict=True):
            text = sum(anchor >= start for start in texts.starts) - 1
            first, end = texts.starts[text], anchor + length + 1
            features = texts.features[first:end].clone()
            features[anchor - first :] = 99.0  # not there yet
            tokens = texts.token_ids[first:end].clone()
            tokens[-1] = (tokens[-1] + 1) % V  # what is guessed last is never read
            alone = drafter.guess(
                Texts(tokens, [0, end - first], features),
                torch.tensor([anchor - first]),
                torch.tensor([length]),
            )
            mine = together.anchors == anchor
            order, own_order = together.depths[mine].argsort(), alone.depths.argsort()
            assert together.depths[mine][order].tolist() == list(range(length))
            torch.testing.assert_close(
                together.logits[mine][order], alone.logits[own_order], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("kind", KINDS)
def test_partitions_of_a_pack_have_the_gradients_of_the_whole(kind: str) -> None:
    drafter = attached(kind)
    texts = random_texts(drafter, [20, 7, 12])
    count = len(texts.token_ids)
    features = Features(
        texts.features, torch.randn(count, 4), torch.randn(count), torch.zeros(count).int()
    )
    anchors, lengths = torch.tensor([3, 8, 15, 22, 30, 34]), torch.tensor([4, 4, 4, 3, 1, 4])
    pack = Pack([], texts, features, anchors, lengths)

    def gradients(count: int) -> tuple[dict[str, torch.Tensor], list[int]]:
        drafter.zero_grad()
        sizes = []
        for part in pack.partitions(count):
            guesses = drafter.guess(part.texts, part.anchors, part.lengths)
            goal = part.texts.token_ids[guesses.places]
            loss = torch.nn.functional.cross_entropy(guesses.logits, goal, reduction="sum")
            if guesses.confidence is not None:
                loss = loss + guesses.confidence.square().sum()
            loss.backward()
            sizes.append(len(part.texts.token_ids))
        named = drafter.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}, sizes

    whole, _ = gradients(1)
    parts, sizes = gradients(3)
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-3, atol=1e-4)
    assert max(sizes) < count


def test_conditional_drop_keeps_a_share_of_every_depth() -> None:
    rule = AnchorRule(num_draft_tokens=5, anchors_per_pack=1000, keep_ratio=0.5, keep_min=0.2)
    lengths = rule.lengths(1000, np.random.default_rng(0))
    kept = [int((lengths > depth).sum()) for depth in range(5)]
    assert kept == [1000, 500, 250, 200, 200]


# ---- losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_slopes_are_those_of_the_definitions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, places, size = 37, 11, 48
    logits = (torch.randn(rows, size) * 3).to(dtype)
    target = (torch.randn(places, size) * 3).to(dtype)
    log_sums = target.float().logsumexp(-1) + 0.2  # some mass lies outside
    labels = torch.randint(-1, size, (rows,))
    wanted = Wanted(
        target, log_sums, torch.randint(places, (rows,)), labels, torch.randint(-1, size, (rows,))
    )
    weights = LossWeights(ce=0.3, kl=0.5, tv=1.2)
    shares = torch.rand(rows)
    found, slopes_found = losses(logits, wanted, weights, shares)

    leaf = logits.double().requires_grad_()
    p = (target.double() - log_sums[:, None]).exp()[wanted.places]
    log_q = leaf.log_softmax(-1)
    picked = log_q.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    terms = {
        "ce": torch.where(labels >= 0, -picked, 0.0),
        "kl": -(p * log_q).sum(-1),
        "tv": ((log_q.exp() - p).abs().sum(-1) + 1 - p.sum(-1)) / 2,
    }
    total = 0.3 * terms["ce"] + 0.5 * terms["kl"] + 1.2 * terms["tv"]
    (slopes,) = torch.autograd.grad((shares * total).sum(), leaf)
    for name, term in terms.items():
        torch.testing.assert_close(found.terms[name].double(), term.detach(), rtol=1e-4, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(slopes_found.double(), slopes, rtol=tolerance, atol=tolerance)
    best = logits.argmax(-1)
    assert found.agrees.tolist() == (best == wanted.best).tolist()
    assert found.right.tolist() == (best == labels).tolist()


def test_losses_in_portions_have_the_slopes_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.training.losses.ROWS", 5)
    torch.manual_seed(0)
    rows, places, size = 17, 6, 32
    frozen = torch.randn(size, 8)
    weight = torch.randn(size, 3, requires_grad=True)
    states = [torch.randn(rows, width, requires_grad=True) for width in (8, 3)]
    target = torch.randn(places, size)
    ids = [torch.randint(size, (rows,)) for _ in range(2)]
    where = torch.randint(places, (rows,))
    wanted = Wanted(target, target.logsumexp(-1), where, *ids)
    weights, shares = LossWeights(ce=0.3, kl=0.5, tv=1.2), torch.rand(rows)
    logits = states[0] @ frozen.T + states[1] @ weight.T
    whole, slopes = losses(logits.detach(), wanted, weights, shares)
    expected = torch.autograd.grad(logits, [*states, weight], slopes)
    parts, found = head_losses([(states[0], frozen), (states[1], weight)], wanted, weights, shares)
    for mine, one in zip([*found.states, found.weights[1]], expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, one, rtol=1e-4, atol=1e-5)
    assert found.weights[0] is None
    for name, term in whole.terms.items():
        torch.testing.assert_close(parts.terms[name], term, rtol=1e-5, atol=1e-5)
    assert parts.agrees.tolist() == whole.agrees.tolist()


@pytest.mark.skipif(library() is None, reason="the compiled kernels are not available")
def test_total_variation_is_the_chance_of_rejection() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2] + [0.0] * 13]).log().clamp(min=-50)
    logits = torch.tensor([[0.2, 0.3, 0.5] + [0.0] * 13]).log().clamp(min=-50)
    zero = torch.zeros(1, dtype=torch.long)
    found, _ = losses(logits, Wanted(target, torch.zeros(1), zero, zero, zero), LossWeights(), zero)
    assert found.acceptance.item() == pytest.approx(0.2 + 0.3 + 0.2, abs=1e-5)
