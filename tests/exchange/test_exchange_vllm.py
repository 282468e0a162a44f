"""vLLM's CPU build serves our drafters, and accepts as much of their drafts as it should.

The drafters learn three answers of the demo target by heart, which takes seconds and gives drafts
that are right often, but not always.
"""

from collections.abc import Iterator

import pytest
import torch
from acceptance import ExchangeTarget, added, served, worked_out
from exchange_peers import VLLM, peer_python
from torch.nn import functional as F

from outrider.drafters import Drafter, DrafterConfig, make_drafter
from outrider.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.exchange,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        peer_python(VLLM) is None,
        reason="vLLM's CPU build is not installed: `make test-exchange` installs it",
    ),
]

PROMPTS = [
    "Name three rivers.",
    "Write a haiku about rain.",
    "What is two and two?",
]
MAX_TOKENS, DEPTHS = 32, 4
STEPS = {"dflash": 120}  # its slots learn apart from one another, and later
MASK = 7  # a special token that no text holds
SHAPES = {
    "eagle3": {"target_layer_ids": (1, 14, 26)},
    "eagle3, five layers": {"target_layer_ids": (-1, 1, 9, 17, 26), "norm_before_residual": True},
    "peagle": {"target_layer_ids": (1, 14, 26), "mask_token_id": MASK, "num_layers": 2},
    "dflash": {"target_layer_ids": (1, 14, 26), "mask_token_id": MASK, "qk_norm": True},
}


@pytest.fixture(scope="module")
def target() -> Iterator[ExchangeTarget]:
    """One thread: those of two processes on two cores would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ExchangeTarget()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def samples(target) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) with enough of the answer for the last draft."""
    tokenizer = Tokenizer.from_directory(target.directory)
    every = []
    for text in PROMPTS:
        chat = tokenizer.chat([{"role": "user", "content": text}])
        prompt = list(tokenizer.encode(chat, add_special_tokens=False))
        every.append((prompt, target.answer(prompt, MAX_TOKENS + DEPTHS + 1)))
    return every


def learned(target: ExchangeTarget, name: str, samples) -> Drafter:
    """A drafter that has seen the answers, with parameters that bf16 holds."""
    torch.manual_seed(0)
    said = torch.cat([torch.tensor(answer) for _, answer in samples])
    ids = torch.cat([said, torch.arange(100, 600)]).unique()
    config = DrafterConfig(
        **{
            "algorithm": name.split(",")[0],
            "hidden_size": 576,
            "intermediate_size": 512,
            "num_layers": 1,
            "num_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "draft_vocab_size": len(ids),
            "num_draft_tokens": DEPTHS,
            "target_hidden_size": 576,
            "target_num_layers": 30,
            "rope_theta": 100_000.0,
        }
        | SHAPES[name]
    )
    drafter = make_drafter(config)
    drafter.d2t = ids
    drafter.attach(target.embedding, target.head)
    place = torch.full((config.vocab_size,), -100).index_put((ids,), torch.arange(len(ids)))
    texts = [target.texts([*p, *a], config.target_layer_ids) for p, a in samples]
    optimizer = torch.optim.Adam(drafter.parameters(), 1e-3)
    for step in range(STEPS.get(config.algorithm, 40)):
        text, (prompt, answer) = texts[step % len(texts)], samples[step % len(texts)]
        anchors = torch.arange(len(prompt), len(prompt) + len(answer) - DEPTHS)
        found = drafter.guess(text, anchors, torch.full_like(anchors, DEPTHS))
        loss = F.cross_entropy(found.logits, place[text.token_ids[found.places]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    return drafter.eval()


@pytest.mark.parametrize("name", SHAPES)
def test_vllm_accepts_what_it_should(name, target, samples):
    drafter = learned(target, name, samples)
    prompts = [prompt for prompt, _ in samples]
    texts, theirs = served(target, drafter, prompts, MAX_TOKENS)
    assert texts == [answer[:MAX_TOKENS] for _, answer in samples]
    ours = added([worked_out(target, drafter, p, a, MAX_TOKENS) for p, a in samples])
    print(name, ours, theirs)
    assert ours.acceptance_length > 1.5  # there is something to compare
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, rel=0.05)
    for here, there in zip(ours.per_position, theirs.per_position, strict=True):
        assert abs(here - there) <= 0.05 * ours.drafts
