"""Deterministic execution through transformers: a row's bits depend on its text alone."""

from typing import Any

import numpy as np
import pytest
import torch
from toy_gguf import logits_of
from toy_models import VOCAB, make_batch, toy_model

from outrider.errors import ModelError
from outrider.native import library
from outrider.target.base import ForwardBatch
from outrider.target.load import load_target
from outrider.target.model import TransformersTarget

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, no compiled kernels")

TEXT = np.random.default_rng(5).integers(3, VOCAB, 60).tolist()
FAMILIES = ("llama", "gemma2", "gemma3", "mistral", "qwen3")


def row_exact(family: str, dtype: torch.dtype) -> TransformersTarget:
    target = TransformersTarget(toy_model(family, dtype=dtype, head_dim=16))
    target.allocate_kv(24)
    return target


def run(target: TransformersTarget, batch: ForwardBatch) -> torch.Tensor:
    return target.forward(batch).logits.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_chunks_pages_or_neighbours(family: str, dtype: torch.dtype) -> None:
    target = row_exact(family, dtype)
    assert target.deterministic
    whole = run(target, make_batch([TEXT], [[0, 1, 2, 3]]))
    table, at = [20, 11, 12, 7], 0
    for size in (1, 2, 13, 30, 1, 12, 1):
        batch = make_batch([TEXT[at : at + 3], TEXT[at : at + size]], [[22], table], [0, at])
        logits = run(target, batch)[len(TEXT[at : at + 3]) :]
        assert torch.equal(logits, whole[at : at + size]), (at, size)
        at += size
    assert at == len(TEXT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_row_has_the_bits_of_its_path_and_of_its_moved_branch(
    family: str, dtype: torch.dtype
) -> None:
    target = row_exact(family, dtype)
    prefix, table = TEXT[:29], [3, 1, 8]
    tokens, parents, branch = [7, 8, 9, 10, 11, 12], [-1, 0, 0, 2, 2, 4], [0, 2, 4, 5]
    run(target, make_batch([prefix], [table]))
    logits = run(target, make_batch([tokens], [table], [29], parents={0: parents}))
    text = prefix + [tokens[i] for i in branch]
    alone = run(target, make_batch([[*text, 60]], [[20, 21, 22]]))
    assert torch.equal(logits[branch], alone[29:-1])
    slots = np.array([table[p // 16] * 16 + p % 16 for p in range(29, 48)], dtype=np.int32)
    target.move_kv(slots[branch], slots[: len(branch)])
    assert torch.equal(run(target, make_batch([[60]], [table], [len(text)]))[0], alone[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_the_model_itself(family: str) -> None:
    model = toy_model(family, head_dim=16)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0]
    target = TransformersTarget(model)
    target.allocate_kv(8)
    logits = run(target, make_batch([TEXT], [[5, 2, 0, 7]]))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gpt_oss", {"head_dim": 16}, "attention sinks"),
        ("llama", {"head_dim": 8}, "heads are 8 wide"),
        ("llama", {"head_dim": 16, "dtype": torch.float16}, "no kernel for weights of .*float16"),
    ],
)
def test_what_has_no_kernel_runs_without_and_refuses_to_promise(
    family: str, overrides: dict[str, Any], reason: str
) -> None:
    assert not TransformersTarget(toy_model(family, **overrides)).deterministic
    with pytest.raises(ModelError, match=f"cannot run deterministically: .*{reason}"):
        TransformersTarget(toy_model(family, **overrides), deterministic=True)


def test_a_model_with_row_dependent_operations_keeps_its_own_linear_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy_model("llama", head_dim=16)
    norm = model.model.norm.forward
    # The last norm of this model looks at all rows of the forward.
    monkeypatch.setattr(model.model.norm, "forward", lambda x: norm(x) * (1 + 1e-6 * x.shape[1]))
    target = TransformersTarget(model)
    assert not target.deterministic
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    with pytest.raises(ModelError, match="depends on the number of rows"):
        TransformersTarget(model, deterministic=True)


def test_without_the_promise_the_model_keeps_its_own_linear_layers() -> None:
    model = toy_model("llama", head_dim=16)
    assert not TransformersTarget(model, deterministic=False).deterministic
    assert type(model.lm_head) is torch.nn.Linear


def test_a_model_may_be_the_target_of_several_in_one_type():
    model = toy_model("gemma2", head_dim=16)
    tokens = [5, 6, 7]
    expected = logits_of(model, tokens)
    targets = [TransformersTarget(model, deterministic=choice) for choice in (None, None, False)]
    assert [target.deterministic for target in targets] == [True, True, False]
    for target in targets:
        target.allocate_kv(2)
        torch.testing.assert_close(target.head, targets[0].head, rtol=0, atol=0)
        got = target.forward(make_batch([tokens], [[1]])).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match=r"target in torch.float32 already.* torch.bfloat16"):
        load_target(model, dtype="bfloat16")
    assert load_target(model, dtype="float32")[0].deterministic
    with pytest.raises(ModelError, match=r"packed in torch.float32 got rows of torch.bfloat16"):
        TransformersTarget(model.bfloat16())
