"""Compiled layers of drafters against the same layers in torch, and what no row may notice."""

from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import DRAFT_VOCAB, HIDDEN, KINDS, toy_drafter
from toy_models import make_batch

from outrider.drafters.native import NativeStack, why_not_native
from outrider.drafters.stack import TorchStack
from outrider.errors import ModelError
from outrider.native import library
from outrider.target.base import ForwardBatch

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, no compiled kernels")

PAGES = 90
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Both:
    """The two stacks of one drafter, in float32, given the same calls."""

    def __init__(self, kind: str, **overrides: Any) -> None:
        self.drafter = toy_drafter(kind, **overrides)
        self.stacks = NativeStack(self.drafter, torch.float32), TorchStack(self.drafter)
        for stack in self.stacks:
            stack.allocate_kv(PAGES)
        self.has_side = kind.startswith(("eagle3", "peagle"))

    def store(self, batch: ForwardBatch) -> None:
        context = rows(batch.num_rows)
        for stack in self.stacks:
            stack.store_context(batch, context)

    def compare(self, batch: ForwardBatch) -> None:
        x, side = rows(batch.num_rows), rows(batch.num_rows, 1) if self.has_side else None
        (states, logits), expected = (stack.run(batch, x, side) for stack in self.stacks)
        assert states.shape == (len(batch.logits_rows), HIDDEN)
        assert logits.shape == (len(batch.logits_rows), DRAFT_VOCAB)
        torch.testing.assert_close(states, expected[0], **CLOSE)
        torch.testing.assert_close(logits, expected[1], **CLOSE)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def batch_of(
    sizes: list[int],
    contexts: list[int] | None = None,
    tables: list[list[int]] | None = None,
    two_way: bool = False,
    **kwargs: Any,
) -> ForwardBatch:
    """New rows of several requests, each by default in scattered pages of its own."""
    contexts = contexts or [0] * len(sizes)
    order = np.random.default_rng(1).permutation(PAGES).tolist()
    tables = tables or [order[b :: len(sizes)] for b in range(len(sizes))]
    batch = make_batch([[0] * n for n in sizes], tables, contexts, **kwargs)
    batch.two_way = two_way
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_float32_results_are_those_of_torch(kind: str) -> None:
    both = Both(kind)
    both.compare(batch_of([40, 3, 17]))
    both.compare(batch_of([5, 1, 8], [40, 3, 17], logits_rows=[4, 5, 7, 13]))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("normed", [False, True])
def test_a_second_input_with_either_residual(layers: int, normed: bool) -> None:
    both = Both("eagle3", num_layers=layers, norm_before_residual=normed, qk_norm=True)
    both.compare(batch_of([33, 9]))
    for step in range(3):
        both.compare(batch_of([1, 1], [33 + step, 9 + step]))


@pytest.mark.parametrize("kind", ["dflash", "dspark", "pard"])
@pytest.mark.parametrize("contexts", [[0, 5], [16, 31], [250, 255], [300, 700]])
def test_blocks_see_themselves_and_a_context_of_stored_keys(kind: str, contexts: list[int]) -> None:
    both = Both(kind)
    stored = [0, 0]
    for share in (0.4, 0.41, 1.0):  # the context comes in portions of any size
        sizes = [int(share * n) - done for n, done in zip(contexts, stored, strict=True)]
        both.store(batch_of(sizes, stored))
        stored = [done + n for done, n in zip(stored, sizes, strict=True)]
    assert stored == contexts
    both.compare(batch_of([8, 3], contexts, two_way=True))
    both.store(batch_of([2, 1], contexts))  # what was accepted takes the place of the block
    both.compare(batch_of([8, 8], [contexts[0] + 2, contexts[1] + 1], two_way=True))


def test_a_first_row_depends_on_the_last_of_its_block_alone_when_they_see_each_other() -> None:
    stack = native("dflash", torch.float32)
    x = rows(20)
    changed = x.clone()
    changed[9] += 1.0  # the last of the first request
    for two_way in (False, True):
        batch = batch_of([10, 10], two_way=two_way)
        before = stack.run(batch, x)[1].clone()
        after = stack.run(batch, changed)[1]
        differs = (before != after).any(1)
        assert differs[9]
        assert differs[:9].all() if two_way else not differs[:9].any()
        assert not differs[10:].any()


def native(kind: str, dtype: torch.dtype, codes: bool | None = None) -> NativeStack:
    stack = NativeStack(toy_drafter(kind), dtype, codes)
    stack.allocate_kv(PAGES)
    return stack


WEIGHTS = pytest.mark.parametrize(
    ("dtype", "codes"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "codes"],
)


@WEIGHTS
@pytest.mark.parametrize("kind", ["eagle3 normed residual", "dflash", "mtp"])
@pytest.mark.parametrize("two_way", [False, True])
def test_bits_do_not_depend_on_what_shares_the_call(
    kind: str, dtype: torch.dtype, codes: bool, two_way: bool
) -> None:
    stack = native(kind, dtype, codes)
    has_side = kind.startswith("eagle3")

    def run(batch: ForwardBatch, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, logits = stack.run(batch, x, x.flip(1) if has_side else None)
        return states.clone(), logits.clone()

    text, block = rows(250, 2), rows(8, 3)
    alone = [list(range(40))]
    run(batch_of([250], tables=alone), text)
    expected = run(batch_of([8], [250], tables=alone, two_way=two_way), block)
    together = [list(range(60, 40, -1)), list(range(61, 90))]
    run(batch_of([3, 100], tables=together), torch.cat([rows(3, 4), text[:100]]))
    run(batch_of([9, 150], [3, 100], tables=together), torch.cat([rows(9, 5), text[100:]]))
    batch = batch_of([20, 8], [12, 250], tables=together, two_way=two_way)
    states, logits = run(batch, torch.cat([rows(20, 6), block]))
    assert torch.equal(states[20:], expected[0])
    assert torch.equal(logits[20:], expected[1])


@WEIGHTS
def test_stored_keys_do_not_depend_on_portions(dtype: torch.dtype, codes: bool) -> None:
    stack = native("dflash", dtype, codes)
    context, block = rows(70), rows(8, 1)
    results = []
    for table, sizes in (([0, 1, 2, 3, 4], [70]), ([9, 7, 30, 6, 5], [1, 16, 13, 40])):
        at = 0
        for size in sizes:
            stack.store_context(batch_of([size], [at], [table]), context[at : at + size])
            at += size
        results.append(stack.run(batch_of([8], [70], [table], two_way=True), block)[1].clone())
    assert torch.equal(*results)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    lib = library()
    assert lib is not None
    before = lib.outrider_num_threads()
    stack = native("dspark", torch.bfloat16)
    results = []
    try:
        for threads in (1, 2, 3):
            lib.outrider_set_num_threads(threads)
            stack.store_context(batch_of([30, 5]), rows(35))
            batch = batch_of([8, 8], [30, 5], two_way=True)
            results.append(stack.run(batch, rows(16, 1))[1].clone())
    finally:
        lib.outrider_set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_bfloat16_is_close_to_float32() -> None:
    drafter = toy_drafter("eagle3")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        stack = NativeStack(drafter, dtype, codes=False)
        stack.allocate_kv(PAGES)
        results.append(stack.run(batch_of([30]), rows(30), rows(30, 1)))
    (exact, exact_logits), (rounded, logits) = results
    assert (exact - rounded).norm() < 0.02 * exact.norm()
    assert (exact_logits - logits).norm() < 0.02 * exact_logits.norm()
    assert stack.kv_bytes_per_token == 2 * 2 * 16 * 2
    assert (exact != rounded).any()


def coded(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of 127 values that lie evenly to both sides of 0, by output."""
    scale = weight.abs().amax(1, keepdim=True) / 63
    return torch.where(scale > 0, (weight / scale).round() * scale, weight)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "mtp", "pard"])
def test_codes_stand_for_the_nearest_of_127_values(kind: str) -> None:
    drafter = toy_drafter(kind)
    with torch.no_grad():
        drafter.head[5] = 0.0  # an output without a scale …
        drafter.head[6] *= 1e-42  # … and one whose scale is next to nothing
    coarse, fine = (NativeStack(drafter, torch.bfloat16, codes) for codes in (True, False))
    with torch.no_grad():
        drafter.head.copy_(coded(drafter.head))
        for module in drafter.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(coded(module.weight))
    results = []
    for stack in (NativeStack(drafter, torch.float32), coarse, fine):
        stack.allocate_kv(PAGES)
        side = rows(60, 1) if kind == "eagle3" else None
        results.append(stack.run(batch_of([40, 3, 17]), rows(60), side)[1].clone())
    expected, found, other = results
    assert (found - expected).norm() < 0.012 * expected.norm()  # as bfloat16 rounds
    assert (other - expected).norm() > 0.02 * expected.norm()
    assert (found[:, 5] == 0).all()
    assert (found[:, 6].abs() < 1e-30).all()
    outputs = sum(outputs for outputs, _ in coarse._model.shape.matrices)
    assert coarse.weight_bytes == fine.weight_bytes / 2 + 4 * outputs


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"head_dim": 8}, "head_dim is 8, not a multiple of 16"),
        ({"intermediate_size": 90}, "intermediate_size is 90, not a multiple of 16"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(
    overrides: dict[str, Any], reason: str
) -> None:
    drafter = toy_drafter("pard", **overrides)
    assert why_not_native(drafter) == reason
    with pytest.raises(ModelError, match=f"drafter pard: {reason}"):
        NativeStack(drafter, torch.float32)
