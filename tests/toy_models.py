"""Small random models and a toy tokenizer, built in tests. Nothing is downloaded."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.target.base import PAGE_SIZE, ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Large enough that random logits differ by whole units: a wrong mask is then far from rounding.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
}
FAMILIES = ("llama", "qwen3", "gemma3", "gemma2", "mistral", "gpt_oss")


def toy_config(family: str, **overrides: Any) -> Any:
    """Configuration of a random model of a few thousand parameters."""
    import transformers as tf

    settings = SHAPE | overrides
    if family == "llama":
        return tf.LlamaConfig(**settings)
    if family == "qwen3":
        return tf.Qwen3Config(**settings)
    if family == "gemma3":
        return tf.Gemma3TextConfig(**(SLIDING | {"query_pre_attn_scalar": 8} | settings))
    if family == "gemma2":
        caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
        return tf.Gemma2Config(**(SLIDING | caps | {"query_pre_attn_scalar": 8} | settings))
    if family == "mistral":
        return tf.MistralConfig(**({"sliding_window": 8} | settings))
    assert family == "gpt_oss", family
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return tf.GptOssConfig(**(SLIDING | experts | {"rope_parameters": rope} | settings))


def toy_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> "PreTrainedModel":
    """A random model of one of FAMILIES, in eval mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = toy_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():  # norms start at one or zero, and sinks at zero: make every one count
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def damaged(
    weights: "dict[str, torch.Tensor]",
) -> "Iterator[tuple[str, dict[str, torch.Tensor]]]":
    """The weights without each of them in turn, and with each in another shape; and its name."""
    for name, weight in weights.items():
        yield name, {other: kept for other, kept in weights.items() if other != name}
        yield name, weights | {name: torch.cat([weight, weight])}


def toy_tokenizer(chat_template: str | None = None) -> "TokenizersBackend":
    """A byte-level tokenizer of VOCAB tokens: three special ones, 91 bytes, two merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>"]
    kept = [c for c in alphabet if c.isascii() and c not in "`^~|@$"]  # 88 characters
    kept += ["Ġ", "Ċ", "Ã"]  # space, newline, first byte of most accented letters
    vocab = {token: i for i, token in enumerate([*special, *kept, "th", "he"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_batch(
    rows: list[list[int]],
    tables: list[list[int]],
    context_lens: list[int] | None = None,
    parents: dict[int, list[int]] | None = None,
    logits_rows: list[int] | None = None,
    layer_ids: tuple[int, ...] = (),
) -> ForwardBatch:
    """Pack new tokens of several requests; requests named in ``parents`` are trees."""
    context_lens = context_lens or [0] * len(rows)
    parents = parents or {}
    all_parents, positions = [], []
    for b, (tokens, context_len) in enumerate(zip(rows, context_lens, strict=True)):
        above = parents.get(b, [j - 1 for j in range(len(tokens))])
        depths: list[int] = []
        for parent in above:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        all_parents += above
        positions += [context_len + depth for depth in depths]
        assert len(tables[b]) * PAGE_SIZE >= context_len + len(tokens)
    starts = np.cumsum([0] + [len(r) for r in rows], dtype=np.int32)
    wanted = list(range(int(starts[-1]))) if logits_rows is None else logits_rows
    return ForwardBatch(
        token_ids=np.array([t for r in rows for t in r], dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        row_starts=starts,
        context_lens=np.array(context_lens, dtype=np.int32),
        page_tables=[np.array(t, dtype=np.int32) for t in tables],
        parents=np.array(all_parents, dtype=np.int32),
        logits_rows=np.array(wanted, dtype=np.int32),
        is_tree=np.array([b in parents for b in range(len(rows))]),
        layer_ids=layer_ids,
    )
