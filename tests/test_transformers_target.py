"""The packed, paged forward against the plain forward of transformers, in fp32."""

import copy
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import FAMILIES, VOCAB, make_batch, toy_model

from outrider.errors import ModelError
from outrider.target.attention import ancestors, page_runs
from outrider.target.base import PAGE_SIZE
from outrider.target.model import TransformersTarget

# Logits have a standard deviation of 2; the plain forward differs from fp64 by up to 2e-5.
CLOSE = {"rtol": 1e-5, "atol": 5e-5}


@cache
def reference_model(family: str):
    return toy_model(family)


@cache
def target_of(family: str) -> TransformersTarget:
    return TransformersTarget(copy.deepcopy(reference_model(family)), name=f"toy-{family}")


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def target(family: str) -> TransformersTarget:
    target = target_of(family)
    target.allocate_kv(16)
    return target


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def reference(family: str, tokens: list[int]) -> torch.Tensor:
    """Logits [n, V] of the plain model over one text."""
    with torch.inference_mode():
        return reference_model(family)(torch.tensor([tokens]), use_cache=False).logits[0]


def test_packed_prompts_equal_separate_forwards(family, target):
    texts = [text(37, 1), text(5, 2), text(1, 3), text(20, 4)]
    out = target.forward(make_batch(texts, [[0, 1, 2], [9], [4], [5, 6]]))
    torch.testing.assert_close(
        out.logits, torch.cat([reference(family, t) for t in texts]), **CLOSE
    )


def test_pages_in_any_order(family, target):
    tokens = text(61)
    out = target.forward(make_batch([tokens], [[11, 3, 4, 0]]))
    torch.testing.assert_close(out.logits, reference(family, tokens), **CLOSE)


@pytest.mark.parametrize("table", [[2, 3, 4, 5], [7, 1, 2, 12]], ids=["run", "scattered"])
def test_prefill_in_chunks_then_single_tokens(family, target, table):
    tokens = text(45)
    bounds = [0, 7, 23, 40, 41, 42, 45]
    logits = [
        target.forward(make_batch([tokens[a:b]], [table], [a])).logits for a, b in pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(logits), reference(family, tokens), **CLOSE)


def test_prefill_beside_decoding(family, target):
    old, new = text(30, 5), text(18, 6)
    target.forward(make_batch([old[:26]], [[3, 8]]))
    out = target.forward(make_batch([old[26:], new], [[3, 8], [1, 2]], [26, 0]))
    expected = torch.cat([reference(family, old)[26:], reference(family, new)])
    torch.testing.assert_close(out.logits, expected, **CLOSE)


@pytest.mark.parametrize("table", [[2, 3], [9, 1]], ids=["run", "scattered"])
def test_every_tree_node_equals_its_own_path(family, target, table):
    context, drafts = text(21), text(7, 9)
    parents = [-1, -1, 0, 0, 2, 1, 4]
    target.forward(make_batch([context], [table]))
    out = target.forward(make_batch([drafts], [table], [21], {0: parents}))
    for row in range(len(drafts)):
        path, node = [], row
        while node >= 0:
            path.insert(0, drafts[node])
            node = parents[node]
        torch.testing.assert_close(out.logits[row], reference(family, context + path)[-1], **CLOSE)


def test_accepted_branch_is_moved_and_continued(family, target):
    context, table = text(15), [4, 6]
    target.forward(make_batch([context], [table]))
    drafts, parents = text(5, 9), [-1, -1, 1, 0, 2]  # accepted: rows 1, 2, 4
    target.forward(make_batch([drafts], [table], [15], {0: parents}))
    slots = [table[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(32)]
    moves = [(15 + row, 15 + depth) for depth, row in enumerate([1, 2, 4])]
    target.move_kv(
        np.array([slots[a] for a, _ in moves], dtype=np.int32),
        np.array([slots[b] for _, b in moves], dtype=np.int32),
    )
    accepted, rest = [drafts[i] for i in (1, 2, 4)], text(3, 11)
    out = target.forward(make_batch([rest], [table], [18]))
    expected = reference(family, context + accepted + rest)[18:]
    torch.testing.assert_close(out.logits, expected, **CLOSE)


def test_rejected_drafts_leave_no_trace(family, target):
    tokens, table = text(28), [5, 2]
    target.forward(make_batch([tokens[:20]], [table]))
    target.forward(make_batch([text(8, 77)], [table], [20]))  # all rejected
    out = target.forward(make_batch([tokens[20:]], [table], [20]))
    torch.testing.assert_close(out.logits, reference(family, tokens)[20:], **CLOSE)


def test_logits_of_the_rows_asked_for_only(family, target):
    texts = [text(9, 1), text(6, 2)]
    every = target.forward(make_batch(texts, [[0], [1]])).logits.clone()
    some = target.forward(make_batch(texts, [[0], [1]], logits_rows=[3, 8, 14])).logits
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, every[[3, 8, 14]], **CLOSE)
    none = target.forward(make_batch(texts, [[0], [1]], logits_rows=[])).logits
    assert none.shape == (0, VOCAB)


def test_features_are_the_outputs_of_the_layers(family, target):
    tokens = text(12)
    got = target.forward(make_batch([tokens], [[0]], layer_ids=(1, -1, 2))).features
    with torch.inference_mode():
        states = reference_model(family)(
            torch.tensor([tokens]), use_cache=False, output_hidden_states=True
        ).hidden_states
        layers = reference_model(family).get_decoder().layers
        seen = {}
        hook = layers[2].register_forward_hook(
            lambda m, a, out: seen.update(last=out if torch.is_tensor(out) else out[0])
        )
        reference_model(family)(torch.tensor([tokens]), use_cache=False)
        hook.remove()
    # transformers normalises the last entry of hidden_states, so the last layer is hooked instead.
    expected = torch.cat([states[2][0], states[0][0], seen["last"][0]], dim=-1)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert target.forward(make_batch([tokens], [[0]])).features is None


def test_shapes_and_sizes(family, target):
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (VOCAB, 32, 3)
    assert target.max_model_len == 256
    assert target.kv_bytes_per_token == 3 * 2 * (2 * 8) * 4  # layers, K and V, 2 heads of 8, fp32
    assert target.deterministic is False


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_split_into_steps_gives_the_same_logits(data):
    """Random chunks, random pages, random trees in between: the text decides, nothing else."""
    family = data.draw(st.sampled_from(FAMILIES))
    target = target_of(family)
    target.allocate_kv(12)
    tokens = text(data.draw(st.integers(2, 60)), seed=data.draw(st.integers(0, 9)))
    table = data.draw(st.permutations(range(12)))[:6]
    done, logits = 0, []
    while done < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - done))
        if data.draw(st.booleans()):
            parents = [
                data.draw(st.integers(-1, i - 1)) for i in range(data.draw(st.integers(1, 6)))
            ]
            drafts = text(len(parents), 5)
            target.forward(make_batch([drafts], [table], [done], {0: parents}))
        batch = make_batch([tokens[done : done + size]], [table], [done])
        logits.append(target.forward(batch).logits)
        done += size
    torch.testing.assert_close(torch.cat(logits), reference(family, tokens), **CLOSE)


@pytest.mark.parametrize(
    ("table", "length", "runs"),
    [
        ([0, 1, 2], 40, [(0, 40)]),
        ([5, 6, 2, 3, 9], 70, [(80, 32), (32, 32), (144, 6)]),
        ([4, 3], 17, [(64, 16), (48, 1)]),
        ([7, 8], 16, [(112, 16)]),
        ([7], 0, []),
    ],
)
def test_page_runs(table, length, runs):
    assert page_runs(np.array(table, dtype=np.int32), length) == runs


def test_ancestors():
    seen = ancestors(np.array([-1, 0, 0, 2, -1]))
    assert [torch.nonzero(row).flatten().tolist() for row in seen] == [
        [0], [0, 1], [0, 2], [0, 2, 3], [4],
    ]  # fmt: skip


def test_window_at_the_first_page_boundary():
    """The window cuts in the middle of a run, exactly at a page, and beyond the context."""
    target = target_of("mistral")
    target.allocate_kv(8)
    tokens = text(30)
    for context in (7, 8, 9, 16, 23, 24, 25):
        target.forward(make_batch([tokens[:context]], [[6, 1]]))
        out = target.forward(make_batch([tokens[context : context + 3]], [[6, 1]], [context]))
        expected = reference("mistral", tokens[: context + 3])[context:]
        torch.testing.assert_close(out.logits, expected, **CLOSE)


def test_two_targets_share_one_model():
    model = copy.deepcopy(reference_model("gemma3"))
    first, second = TransformersTarget(model), TransformersTarget(model)
    first.allocate_kv(2)
    second.allocate_kv(2)
    a, b = text(20, 1), text(20, 2)
    first.forward(make_batch([a[:12]], [[1, 0]]))
    second.forward(make_batch([b[:12]], [[1, 0]], layer_ids=(0,)))
    out = first.forward(make_batch([a[12:]], [[1, 0]], [12]))
    torch.testing.assert_close(out.logits, reference("gemma3", a)[12:], **CLOSE)
    assert first._taps == second._taps == {}


# What cannot be run exactly is refused, with the reason.


def refusal(model, **kwargs) -> str:
    with pytest.raises(ModelError) as caught:
        TransformersTarget(model, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refuses_positions_that_follow_the_batch(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope |= {"original_max_position_embeddings": 128}
    assert f"position scaling is '{kind}'" in refusal(toy_model("llama", rope_parameters=rope))


def test_static_position_scaling_is_run():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = toy_model("llama", rope_parameters=rope)
    plain = copy.deepcopy(model)
    target = TransformersTarget(model)
    target.allocate_kv(2)
    tokens = text(20)
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens]), use_cache=False).logits[0]
    got = target.forward(make_batch([tokens], [[1, 0]])).logits
    torch.testing.assert_close(got, expected, **CLOSE)


def test_refuses_recurrent_models():
    import transformers as tf

    config = tf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "recurrent state" in refusal(tf.MambaForCausalLM(config))


def test_refuses_encoder_decoders():
    import transformers as tf

    config = tf.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    assert "encoder-decoder" in refusal(tf.T5ForConditionalGeneration(config))


def test_refuses_unknown_layer_types():
    import transformers as tf

    config = tf.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=32, num_experts=2,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=1,
    )  # fmt: skip
    reason = refusal(tf.AutoModelForCausalLM.from_config(config))
    assert "linear_attention" in reason or "recurrent" in reason
    model = toy_model("llama")
    model.config.layer_types = ["chunked_attention", "full_attention", "full_attention"]
    assert "layers of type chunked_attention" in refusal(model)


def test_refuses_attention_that_bypasses_the_interface():
    model = toy_model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    assert "called 2 times in 2 layers" in refusal(model)


def test_refuses_attention_that_means_something_else():
    """A bias our function is never told of shows in the probe's logits."""
    model = toy_model("llama")
    module = model.model.layers[0].self_attn
    forward = module.forward

    def biased(*args, **kwargs):
        output, weights = forward(*args, **kwargs)
        ours = model.config._attn_implementation == "outrider"
        return (output if ours else output * 2.0), weights

    module.forward = biased
    assert "its logits differ from its own" in refusal(model)


def test_refuses_a_sliding_layer_without_its_window():
    model = toy_model("gemma3", sliding_window=64)
    model.model.layers[0].self_attn.sliding_window = None
    assert "does not tell its window" in refusal(model)


@pytest.mark.parametrize("length", [0, -1, 257])
def test_refuses_impossible_lengths(length):
    assert f"in [1, 256] for this model, got {length}" in refusal(
        toy_model("llama"), max_model_len=length
    )


def test_bfloat16_runs_within_rounding():
    model = toy_model("gemma3", dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    target = TransformersTarget(model, max_model_len=100)
    assert (target.dtype, target.max_model_len) == (torch.bfloat16, 100)
    target.allocate_kv(4)
    tokens = text(40)
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens]), use_cache=False).logits[0].float()
    got = target.forward(make_batch([tokens], [[2, 0, 1]])).logits
    assert float((got - expected).norm() / expected.norm()) < 0.05
