"""Read GGUF files: metadata, configuration in Hugging Face's terms, weights.

transformers can read GGUF too. It takes 17 s for the 98 MB default model, of which dequantising
is 1 s: it parses the vocabulary three times through numpy objects and builds the tensor name map
once per module. It also loses Llama 3's frequency factors and every `rope.scaling`. So the
families below are read here, and all others through transformers.
"""

import mmap
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import pi, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.checks import INT32_MAX, integer, number
from outrider.errors import ModelError

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
CHUNK = 1 << 20  # weights dequantised at once: 4 MB in fp32 stay in the cache until rounded

EMBEDDING = "token_embd.weight"
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_TENSORS = LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # in torch's order
    kind: int  # ggml's number of the storage type
    offset: int  # from the start of the file


class GGUFFile:
    """Metadata and tensor table of a GGUF file; tensor data stays on disk until asked for.

    Raises:
        ModelError: it is no GGUF file of version 2 or 3, it ends early, or what it holds is no
            whole language model.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._read()
        except (OSError, struct.error, ValueError, KeyError) as error:
            raise ModelError(f"cannot read {path} as a GGUF file: {error}") from error
        reason = self._why_no_model()
        if reason is not None:
            raise ModelError(f"{path} {reason}")

    def _read(self) -> None:
        if self.data[:4] != b"GGUF":
            raise ValueError(f"it starts with {self.data[:4]!r}, expected b'GGUF'")
        self._at = 4
        version, num_tensors, num_keys = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}, expected 2 or 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I")[0])
        self.architecture = str(self.metadata.get("general.architecture"))
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        for info in table:
            info.offset += start
        self.tensors = {info.name: info for info in table}

    def _why_no_model(self) -> str | None:
        """Why this is no language model by itself: other things come in GGUF files too."""
        parts = self.metadata.get("split.count", 1)
        if parts != 1:
            part = self.metadata.get("split.no", 0) + 1
            return (
                f"is part {part} of {parts} of a model; join them with "
                "`llama-gguf-split --merge FIRST_PART WHOLE`"
            )
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            return f"holds a thing of the type {kind!r}, expected 'model'"
        if "general.architecture" not in self.metadata:
            return "does not name its architecture (general.architecture)"
        if len(self.tensors[EMBEDDING].shape if EMBEDDING in self.tensors else ()) != 2:
            return f"holds no matrix {EMBEDDING}, which every language model has"
        return None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._at += length
        return self.data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._unpack(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"it holds a value of unknown type {kind}")
        item, count = self._unpack("IQ")
        if item in SCALARS:
            return list(self._unpack(f"{count}{SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]

    def _tensor(self) -> TensorInfo:
        name = self._string()
        (num_dims,) = self._unpack("I")
        dims = self._unpack(f"{num_dims}Q")
        kind, offset = self._unpack("IQ")
        return TensorInfo(name, tuple(reversed(dims)), kind, offset)

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of the model's own architecture: ``get("block_count")``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise one tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{name} in {self.path} has unknown type {info.kind}") from error
        row_bytes = info.shape[-1] // block * block_bytes
        num_rows = prod(info.shape[:-1])
        size = num_rows * row_bytes
        if info.offset + size > len(self.data):
            raise ModelError(f"{self.path} ends before the data of {name}: the file is truncated")
        raw = np.frombuffer(self.data, np.uint8, size, info.offset).reshape(num_rows, row_bytes)
        out = torch.empty(num_rows, info.shape[-1], dtype=dtype)
        step = max(1, CHUNK // info.shape[-1])
        for start in range(0, num_rows, step):
            rows = dequantize(raw[start : start + step], kind)
            out[start : start + step] = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
        return out.view(info.shape)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Settings of the Hugging Face configuration of a file of one of FAMILIES.

    Raises:
        ModelError: names a size that the file does not tell.
    """
    heads, width = _size(file, "attention.head_count"), _size(file, "embedding_length")
    settings: dict[str, Any] = {
        "model_type": FAMILIES[file.architecture],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": width,
        "intermediate_size": _size(file, "feed_forward_length"),
        "num_hidden_layers": _size(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(file, "attention.head_count_kv", heads),
        "head_dim": _size(file, "attention.key_length", width // heads),
        "max_position_embeddings": _size(file, "context_length"),
        "rms_norm_eps": _shortest(_number(file, "attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids(file),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if file.architecture != "qwen2":  # which has biases without a setting
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if file.architecture == "gemma3":
        return settings | _gemma_settings(file, settings)
    return settings | {"rope_parameters": _rope(file)}


def eos_ids(file: GGUFFile) -> list[int]:
    """Ids that end a text: end of sequence, end of turn."""
    keys = ("eos", "eot", "eom")
    found = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    return sorted({token for token in found if token is not None})


def state_dict(file: GGUFFile, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face's names. A tied model has no `lm_head.weight`."""
    names = {name: _hf_name(file, name) for name in file.tensors if name != "rope_freqs.weight"}
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        tensors = threads.map(lambda name: _weight(file, name, dtype), names)
        return dict(zip(names.values(), tensors, strict=True))


def _weight(file: GGUFFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    if file.architecture == "gemma3" and "norm" in name:
        # Stored as the factor 1 + w, while the model adds the 1 itself; subtract before rounding.
        return (file.load(name, torch.float32) - 1.0).to(dtype)
    weight = file.load(name, dtype)
    if file.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        # llama.cpp rotates neighbouring columns, transformers the halves of a head.
        kind = "head_count" if ".attn_q." in name else "head_count_kv"
        heads = file.get(f"attention.{kind}", file.get("attention.head_count"))
        if weight.shape[0] % (2 * heads):
            raise ModelError(f"{name} in {file.path} has {weight.shape[0]} rows for {heads} heads")
        pairs = weight.view(heads, -1, 2, *weight.shape[1:])
        weight = pairs.transpose(1, 2).reshape(weight.shape)
    return weight


def _hf_name(file: GGUFFile, name: str) -> str:
    head, _, suffix = name.rpartition(".")
    if head in TENSORS:
        return f"{TENSORS[head]}.{suffix}"
    layer_tensors = GEMMA_TENSORS if file.architecture == "gemma3" else LAYER_TENSORS
    block, _, rest = head.removeprefix("blk.").partition(".")
    if not head.startswith("blk.") or rest not in layer_tensors:
        raise ModelError(f"{file.path} holds {name}, which no {file.architecture} model has")
    return f"model.layers.{block}.{layer_tensors[rest]}.{suffix}"


def _size(file: GGUFFile, key: str, default: int | None = None) -> int:
    name = f"{file.architecture}.{key} in {file.path}"
    return integer(name, file.get(key, default), 1, INT32_MAX, ModelError)


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    name = f"{file.architecture}.{key} in {file.path}"
    return number(name, file.get(key, default), 0.0, sys.float_info.max, ModelError)


def _gemma_settings(file: GGUFFile, settings: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without the file saying it."""
    layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    width, head_dim = settings["hidden_size"], settings["head_dim"]
    return {
        # 27B (62 layers) scales its queries by width / heads, every other size by its head.
        "query_pre_attn_scalar": width // heads if layers == 62 else head_dim,
        "sliding_window": _size(file, "attention.sliding_window"),
        "layer_types": [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)
        ],
        "rope_parameters": {
            "full_attention": _rope(file, default_theta=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _rope(file: GGUFFile, default_theta: float = 10000.0) -> dict[str, Any]:
    theta = _shortest(_number(file, "rope.freq_base", default_theta))
    kind = file.get("rope.scaling.type", "none")
    factor = _number(file, "rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta} | _llama3_scaling(file, theta)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear":
        raise ModelError(f"{file.path} scales positions by {kind!r}, known are none and linear")
    return {"rope_type": "linear", "rope_theta": theta, "factor": _shortest(factor)}


def _llama3_scaling(file: GGUFFile, theta: float) -> dict[str, Any]:
    """Llama 3's parameters from the divisors of its frequencies, checked by computing those."""
    divisors = file.load("rope_freqs.weight", torch.float32).numpy().astype(np.float64)
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    size = 2 * len(divisors)
    wavelength = 2 * pi * theta ** (np.arange(0, size, 2) / size)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelError(f"{file.path} scales its frequencies by factors that are not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """The decimal that an fp32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def chat_template(file: GGUFFile) -> str | None:
    return file.metadata.get("tokenizer.chat_template")


def named_specials(file: GGUFFile) -> Iterator[tuple[str, str]]:
    """("eos_token", "<|im_end|>") and so on, for those the file names."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            yield f"{name}_token", tokens[token_id]
