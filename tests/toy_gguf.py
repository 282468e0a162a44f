"""Write a toy model as a GGUF file, as llama.cpp's converter would."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from toy_models import VOCAB, toy_tokenizer

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(
    path: Path,
    family: str,
    model: Any,
    quantised: gguf.GGMLQuantizationType | None = None,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    chat_template: str | None = None,
    pre: str = "gpt-2",
) -> Path:
    """A file with this model's weights; two-dimensional ones ``quantised`` if wanted.

    Args:
        keys: more metadata, under the architecture's prefix; floats, strings or integers.
        tensors: more tensors, under GGUF's names.
    """
    arch = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, model.config)
    for key, value in (keys or {}).items():
        add = {float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}
        add[type(value)](f"{writer.arch}.{key}", value)
    _write_tokenizer(writer, pre, chat_template)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        array = _as_stored(family, model.config, name, weight.numpy())
        kind = quantised if quantised is not None and array.ndim == 2 else None
        if kind is not None:
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", array, raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_stored(family: str, config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    if family == "gemma3" and "norm" in name:
        return weight + 1
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer: gguf.GGUFWriter, pre: str, chat_template: str | None) -> None:
    tokenizer = toy_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(VOCAB)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]
