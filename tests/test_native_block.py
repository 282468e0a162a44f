"""A draft in one compiled call against the same draft call by call: the same bits."""

from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import toy_drafter

from outrider.drafters.dflash import DFlash
from outrider.drafters.native import NativeStack
from outrider.drafters.native_block import NativeBlocks, native_blocks
from outrider.drafters.native_heads import input_projection
from outrider.drafters.stack import TorchStack
from outrider.drafting.chooser import Chooser, Seat
from outrider.drafting.rollout import BlockRollout, make_rollout
from outrider.drafting.source import DraftContext
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
}
GREEDY = SamplingParams(temperature=0)
PARAMS = {
    "greedy": [GREEDY] * 3,
    "sampled": [SamplingParams(temperature=0.8)] * 3,
    "one with a bias": [GREEDY, SamplingParams(temperature=0, logit_bias={5: 3.0}), GREEDY],
}


def rollout(shape: str, dtype: torch.dtype, in_one_call: bool) -> BlockRollout[Any]:
    drafter: Any = toy_drafter(shape.split()[0], **SHAPES[shape]).to(dtype)
    drafter.projection = input_projection(drafter, dtype)
    chooser = Chooser(drafter.d2t, VOCAB, (), wants_probs=False)
    made = make_rollout(drafter, lambda drafter: NativeStack(drafter, dtype), chooser)
    assert isinstance(made, BlockRollout) and made._blocks is not None
    made.stack.allocate_kv(PAGES)
    if not in_one_call:
        made._blocks = None
    return made


def seats(step: int, params: list[SamplingParams], width: int) -> list[Seat]:
    """Three requests whose texts have grown since the step before, the last one most."""
    lengths = [[2, 21, 40], [3, 28, 60]]
    known = [0, 0, 0] if step == 0 else [n - 1 for n in lengths[0]]
    tables = np.random.default_rng(1).permutation(PAGES).astype(np.int32).reshape(3, -1)
    made = []
    for i, (length, held) in enumerate(zip(lengths[step], known, strict=True)):
        random = np.random.default_rng(i)
        text = random.integers(0, VOCAB, 80).astype(np.int32)[:length]
        features = torch.from_numpy(random.normal(size=(80, width)).astype(np.float32))
        context = DraftContext(str(i), text, 1, params[i])
        budget = [4, 7, 1][i] if step == 0 else [7, 2, 5][i]
        new = features[held : length - 1]
        made.append(Seat(context, budget, 7 + i, held, new, page_table=tables[i]))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_call_says_what_its_parts_say(shape: str, params: str, dtype: torch.dtype) -> None:
    both = [rollout(shape, dtype, in_one_call) for in_one_call in (True, False)]
    width = both[0].drafter.config.feature_size
    for step in (0, 1):
        found, expected = (seats(step, PARAMS[params], width) for _ in both)
        for made, drafted in zip(both, (found, expected), strict=True):
            with torch.inference_mode():
                made.draft(drafted)
        for ours, theirs in zip(found, expected, strict=True):
            assert len(ours.tokens) == ours.budget
            assert ours.tokens == theirs.tokens
            assert ours.chances == theirs.chances
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
    width, blocks = made.drafter.config.feature_size, made._blocks
    assert blocks is not None
    table = [np.arange(PAGES, dtype=np.int32)]
    for told in (
        {"held": [0], "lengths": [3], "budgets": [1], "last": [VOCAB]},
        {"held": [1205], "lengths": [1208], "budgets": [1], "last": [0]},
        {"held": [0], "lengths": [9], "budgets": [1], "last": [0]},
    ):
        with pytest.raises(AssertionError):
            blocks.draft(told, table, torch.zeros(2, width), choose=True)
