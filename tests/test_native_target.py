"""The lean forward against transformers, and its promise: a row's bits depend on its text alone."""

from typing import Any

import numpy as np
import pytest
import torch
from toy_models import VOCAB, damaged, make_batch, toy_config, toy_model

from outrider.errors import ModelError
from outrider.native import library
from outrider.target.base import ForwardBatch
from outrider.target.native import NativeTarget, why_not_native

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, no compiled kernels")

SHAPE = {"head_dim": 16, "num_hidden_layers": 3}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
TEXT = np.random.default_rng(5).integers(3, VOCAB, 90).tolist()


def toy(family: str, **overrides: Any) -> Any:
    if family == "qwen2":  # biases on queries, keys and values
        import transformers as tf

        settings = toy_config("qwen3", **SHAPE).to_dict()
        settings = {k: v for k, v in settings.items() if k not in ("model_type", "head_dim")}
        settings |= {"hidden_size": 64, "layer_types": None} | overrides
        torch.manual_seed(0)
        model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model
    return toy_model(family, **(SHAPE | overrides))


def native(model: Any, dtype: torch.dtype = torch.float32, pages: int = 40) -> NativeTarget:
    target = NativeTarget(model.config, model.state_dict(), dtype, 256, "toy")
    target.allocate_kv(pages)
    return target


def run(target: NativeTarget, batch: ForwardBatch) -> torch.Tensor:
    return target.forward(batch).logits.clone()


def reference(model: Any, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_transformers(family: str) -> None:
    model = toy(family)
    logits = run(native(model), make_batch([TEXT], [list(range(6))]))
    torch.testing.assert_close(logits, reference(model, TEXT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_requests_in_chunks_over_scattered_pages(family: str) -> None:
    model = toy(family)
    target = native(model)
    tables = [[31, 4, 17, 9, 2, 38], [0, 5, 3]]
    texts = [TEXT[:70], TEXT[10:50]]
    done = [0, 0]
    for sizes in ((1, 17), (33, 0), (36, 23)):
        parts = [text[d : d + n] for text, d, n in zip(texts, done, sizes, strict=True)]
        live = [i for i, part in enumerate(parts) if part]
        batch = make_batch(
            [parts[i] for i in live], [tables[i] for i in live], [done[i] for i in live]
        )
        logits = run(target, batch)
        row = 0
        for i in live:
            expected = reference(model, texts[i])[done[i] : done[i] + sizes[i]]
            torch.testing.assert_close(logits[row : row + sizes[i]], expected, rtol=1e-4, atol=1e-4)
            row += sizes[i]
            done[i] += sizes[i]
    assert done == [70, 40]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_chunks_pages_or_neighbours(family: str, dtype: torch.dtype) -> None:
    model = toy(family)
    target = native(model, dtype)
    whole = run(target, make_batch([TEXT], [list(range(6))]))
    table = [20, 11, 12, 39, 7, 25]
    at = 0
    for size in (1, 2, 13, 30, 1, 12, 1, 30):
        neighbour = TEXT[at : at + 3]
        chunk = TEXT[at : at + size]
        batch = make_batch([neighbour, chunk], [[30], table], [0, at])
        logits = run(target, batch)[len(neighbour) :]
        assert torch.equal(logits, whole[at : at + size]), (at, size)
        at += size
    assert at == len(TEXT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", [5, 30, 32])
def test_a_tree_row_has_the_bits_of_its_path(family: str, dtype: torch.dtype, context: int) -> None:
    model = toy(family)
    target = native(model, dtype)
    prefix = TEXT[:context]
    tokens, parents = [7, 8, 9, 10, 11, 12, 13, 14], [-1, 0, 0, 1, 3, 2, 4, 6]
    table = [3, 1, 8, 6]
    run(target, make_batch([prefix], [table]))
    logits = run(target, make_batch([tokens], [table], [context], parents={0: parents}))
    for row in range(len(tokens)):
        path, node = [], row
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        alone = run(target, make_batch([prefix + path], [[20, 21, 22, 23]]))
        assert torch.equal(logits[row], alone[-1]), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_goes_on_from_a_moved_branch(dtype: torch.dtype) -> None:
    model = toy("gemma3")
    target = native(model, dtype)
    prefix, table = TEXT[:29], [3, 1, 8]
    run(target, make_batch([prefix], [table]))
    tokens, parents = [7, 8, 9, 10, 11, 12], [-1, 0, 0, 2, 2, 4]
    run(target, make_batch([tokens], [table], [29], parents={0: parents}))
    branch = [0, 2, 4, 5]
    slots = np.array([table[p // 16] * 16 + p % 16 for p in range(29, 48)], dtype=np.int32)
    target.move_kv(slots[branch], slots[: len(branch)])
    text = prefix + [tokens[i] for i in branch]
    logits = run(target, make_batch([[60]], [table], [len(text)]))
    alone = run(target, make_batch([[*text, 60]], [[20, 21, 22]]))
    assert torch.equal(logits[0], alone[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_outputs_of_the_layers(family: str) -> None:
    model = toy(family)
    batch = make_batch([TEXT[:20]], [[0, 1]], layer_ids=(2, -1, 0), logits_rows=[3, 19])
    output = native(model).forward(batch)
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, __, out, i=index: outputs.__setitem__(
                i, out if isinstance(out, torch.Tensor) else out[0]
            )
        )
    with torch.no_grad():
        result = model(torch.tensor([TEXT[:20]]), output_hidden_states=True)
    outputs[-1] = result.hidden_states[0]
    expected = torch.cat([outputs[i][0] for i in (2, -1, 0)], dim=1)
    torch.testing.assert_close(output.features, expected, rtol=1e-3, atol=5e-4)
    torch.testing.assert_close(output.logits, result.logits[0][[3, 19]], rtol=1e-4, atol=1e-4)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    lib = library()
    assert lib is not None
    before = lib.outrider_num_threads()
    target = native(toy("qwen3"), torch.bfloat16)
    batch = make_batch([TEXT, TEXT[:9]], [list(range(6)), [9]])
    try:
        results = []
        for threads in (1, 2, 3):
            lib.outrider_set_num_threads(threads)
            results.append(run(target, batch))
    finally:
        lib.outrider_set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_contexts_of_several_segments_agree_with_transformers() -> None:
    model = toy("llama", max_position_embeddings=1024)
    text = np.random.default_rng(1).integers(3, VOCAB, 700).tolist()
    target = NativeTarget(model.config, model.state_dict(), torch.float32, 1024, "toy")
    target.allocate_kv(60)
    table = np.random.default_rng(2).permutation(60).tolist()
    run(target, make_batch([text[:690]], [table]))
    logits = run(target, make_batch([text[690:]], [table], [690]))
    torch.testing.assert_close(logits, reference(model, text)[690:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {"head_dim": 8}, "head_dim is 8, not a multiple of 16"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama", {"mlp_bias": True}, "biases in the MLP"),
        ("gemma2", {}, "family 'gemma2'"),
        ("gpt_oss", {}, "family 'gpt_oss'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "position scaling 'dynamic'",
        ),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_reason(
    family: str, overrides: dict[str, Any], reason: str
) -> None:
    config = toy_config(family, **(SHAPE | overrides))
    assert reason in (why_not_native(config) or "")
    with pytest.raises(ModelError, match="toy"):
        NativeTarget(config, {}, torch.float32, 64, "toy")


def test_other_devices_are_refused() -> None:
    assert "not on cuda" in (why_not_native(toy_config("llama", **SHAPE), "cuda") or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(family: str) -> None:
    for bias in (False, True):
        model = toy(family, attention_bias=bias)
        weights: Any = model.state_dict()
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        for name, others in damaged(weights):
            with pytest.raises(ModelError, match=f"the weights of toy must hold {name} of"):
                NativeTarget(model.config, others, torch.float32, 64, "toy")


def test_weights_that_the_configuration_does_not_speak_of_are_not_read() -> None:
    model = toy("llama")
    extra = {
        f"model.layers.1.self_attn.{name}": torch.full((width,), 7.0)
        for name, width in (("q_norm.weight", 16), ("k_norm.weight", 16), ("q_proj.bias", 64))
    }
    target = NativeTarget(model.config, model.state_dict() | extra, torch.float32, 64, "toy")
    target.allocate_kv(2)
    logits = run(target, make_batch([TEXT[:20]], [[0, 1]]))
    torch.testing.assert_close(logits, reference(model, TEXT[:20]), rtol=1e-4, atol=1e-4)


def test_a_head_beside_a_tied_embedding_is_used_as_transformers_uses_it() -> None:
    model = toy("llama", tie_word_embeddings=True)
    head = torch.randn(VOCAB, model.config.hidden_size)
    target = NativeTarget(
        model.config, model.state_dict() | {"lm_head.weight": head}, torch.float32, 64, "toy"
    )
    assert target.head is head
    with pytest.raises(ModelError, match=r"must hold lm_head.weight of the shape \(96, 32\)"):
        NativeTarget(
            model.config,
            model.state_dict() | {"lm_head.weight": head[1:]},
            torch.float32,
            64,
            "toy",
        )
