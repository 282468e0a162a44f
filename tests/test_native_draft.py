"""A draft in one compiled call against the same draft call by call: the same tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import toy_drafter

from outrider.drafters.dflash import DFlash
from outrider.drafters.native import NativeStack
from outrider.drafters.native_draft import Asked, NativeBlocks, native_blocks
from outrider.drafters.native_heads import input_projection
from outrider.drafters.stack import TorchStack
from outrider.drafting.chooser import Chooser, Seat
from outrider.drafting.neural import NeuralSource
from outrider.drafting.rollout import (
    BlockRollout,
    MaskedRollout,
    RecurrentRollout,
    SequentialBlockRollout,
    make_rollout,
)
from outrider.drafting.source import Draft, DraftContext
from outrider.native import library
from outrider.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, no compiled kernels")

PAGES, VOCAB = 60, 96
SURE = {"markov_rank": 6, "confidence_head": True}
SHAPES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": SURE,
    "dspark that is not sure": {"markov_rank": 5},
    "dspark without a head": {},
    "dspark sure of states alone": SURE | {"confidence_sees_token": False},
    "dspark gated": SURE | {"markov_head": "gated"},
    "peagle": {},
    "peagle normed": {"norm_before_fc": True},
    "pard": {"target_layer_ids": ()},
    "eagle3": {},
    "eagle3 of two layers": {"num_layers": 2, "norm_before_residual": True},
    "mtp": {"target_layer_ids": (2,)},
}
ONE_CALL = {
    BlockRollout: "_blocks",
    SequentialBlockRollout: "_blocks",
    MaskedRollout: "_masks",
    RecurrentRollout: "_chains",
}
GREEDY = SamplingParams(temperature=0)
PARAMS = {
    "greedy": [GREEDY] * 3,
    "one sampled": [GREEDY, SamplingParams(temperature=0.8), GREEDY],
    "penalised": [SamplingParams(temperature=0.8, presence_penalty=1.0)] * 3,
    "sampled": [SamplingParams(temperature=0.8)] * 3,
    "one with a bias": [GREEDY, SamplingParams(temperature=0, logit_bias={5: 3.0}), GREEDY],
}


def rollout(shape: str, dtype: torch.dtype, in_one_call: bool) -> Any:
    drafter: Any = toy_drafter(shape.split()[0], **SHAPES[shape]).to(dtype)
    drafter.projection = input_projection(drafter, dtype)
    chooser = Chooser(drafter.d2t, VOCAB, (), wants_probs=False)
    made: Any = make_rollout(drafter, lambda drafter: NativeStack(drafter, dtype), chooser)
    name = ONE_CALL[type(made)]
    assert getattr(made, name) is not None
    made.stack.allocate_kv(PAGES)
    if not in_one_call:
        setattr(made, name, None)
    return made


def seats(step: int, params: list[SamplingParams], made: Any) -> list[Seat]:
    """Three requests whose texts have grown since the step before, the last one most."""
    lengths = [[2, 21, 40], [3, 28, 60]]
    width, reach = made.drafter.config.feature_size, made.reach
    known = [0, 0, 0] if step == 0 else [n - reach for n in lengths[0]]
    tables = np.random.default_rng(1).permutation(PAGES).astype(np.int32).reshape(3, -1)
    found = []
    for i, (length, held) in enumerate(zip(lengths[step], known, strict=True)):
        random = np.random.default_rng(i)
        text = random.integers(0, VOCAB, 80).astype(np.int32)[:length]
        features = torch.from_numpy(random.normal(size=(80, width)).astype(np.float32))
        context = DraftContext(str(i), text, 1, params[i])
        budget = [4, 7, 1][i] if step == 0 else [7, 2, 5][i]
        new = features[held : length - reach]
        found.append(Seat(context, budget, 7 + i, held, new, page_table=tables[i]))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_says_what_its_parts_say(shape: str, params: str, dtype: torch.dtype) -> None:
    both = [rollout(shape, dtype, in_one_call) for in_one_call in (True, False)]
    for step in (0, 1):
        found, expected = (seats(step, PARAMS[params], made) for made in both)
        for made, drafted in zip(both, (found, expected), strict=True):
            with torch.inference_mode():
                made.draft(drafted)
        for ours, theirs in zip(found, expected, strict=True):
            assert len(ours.tokens) == ours.budget
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.chances, theirs.chances, rtol=2e-5, atol=2e-5)
    assert len({token for seat in found for token in seat.tokens}) > 2


def test_it_needs_all_its_parts_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = toy_drafter("dflash")
    assert isinstance(drafter, DFlash)
    stack = NativeStack(drafter, torch.float32)
    assert native_blocks(drafter, stack) is None  # its input is still torch's
    drafter.projection = input_projection(drafter, torch.float32)
    assert isinstance(native_blocks(drafter, stack), NativeBlocks)
    assert native_blocks(drafter, TorchStack(drafter)) is None


def test_texts_beyond_what_it_knows_and_foreign_tokens_are_caught() -> None:
    made = rollout("dspark", torch.float32, True)
    width = made.drafter.config.feature_size
    for held, length, last, new in ((0, 3, VOCAB, 2), (1205, 1208, 0, 2), (0, 9, 0, 2)):
        asked = Asked(
            held=[held],
            texts=[np.array([1] * (length - 1) + [last], np.int32)],
            budgets=[1],
            page_tables=[np.arange(PAGES, dtype=np.int32)],
            features=torch.zeros(new, width),
        )
        with pytest.raises(AssertionError):
            made._blocks.draft(asked)


@pytest.mark.parametrize("shape", ["dflash", "dspark", "peagle", "eagle3", "mtp"])
def test_torch_shares_nothing_out_beside_compiled_layers(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that it woke would spin on the cores that the target's next forward wants."""
    drafter = toy_drafter(shape, **SHAPES[shape])
    config = drafter.config
    target: Any = SimpleNamespace(
        num_layers=config.target_num_layers,
        hidden_size=config.target_hidden_size,
        vocab_size=config.vocab_size,
        embedding=drafter.embedding,
        head=torch.randn(config.vocab_size, config.hidden_size),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        max_model_len=64,
    )
    source = NeuralSource(drafter)
    source.bind(target, None, 2)
    monkeypatch.setattr(source._rollout, "draft", lambda seats: seen.append(threads()))
    monkeypatch.setattr(source, "_draft", lambda seat: Draft())
    threads, seen = torch.get_num_threads, []
    usual = threads()
    torch.set_num_threads(2)
    try:
        features = torch.zeros(9, config.feature_size)
        text = np.arange(10, dtype=np.int32)
        source.propose([DraftContext("a", text, 1, GREEDY, features=features)], [2])
        assert seen == [1] and threads() == 2
    finally:
        torch.set_num_threads(usual)
