"""GGUF files: converted once, to exactly the model they hold, or refused."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from load_cases import CLOSE, TOKENS, error_of, own_cache, toy
from toy_gguf import logits_of, write_gguf
from toy_models import damaged

from outrider.errors import ModelError
from outrider.target import convert
from outrider.target import gguf as gguf_reader
from outrider.target.gguf import GGUFFile
from outrider.target.load import (
    load_model,
)
from outrider.tokenizer import Tokenizer

CPU = torch.device("cpu")
__all__ = ["own_cache"]  # a fixture for every test here


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_gguf_gives_the_model_it_was_written_from(tmp_path, family, tied):
    model = toy(family, tie_word_embeddings=tied)
    loaded = load_model(write_gguf(tmp_path / "toy.gguf", family, model), dtype="float32")
    weights, expected = loaded.state_dict(), model.state_dict()
    assert ("lm_head.weight" in weights) is not tied
    assert set(weights) == set(expected) - ({"lm_head.weight"} if tied else set())
    for name, weight in weights.items():
        # Gemma's norms go through 1 + w in fp32, everything else is bit for bit.
        limit = 1e-6 if family == "gemma3" and "norm" in name else 0
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=limit)
    torch.testing.assert_close(
        logits_of(loaded.hf_model(), TOKENS), logits_of(model, TOKENS), **CLOSE
    )
    assert loaded.eos_token_ids == (2,)
    assert loaded.name == "toy"
    assert loaded.config["tie_word_embeddings"] is tied
    assert loaded.config["rms_norm_eps"] == 1e-6


def test_gemma_settings_that_no_key_tells(tmp_path):
    loaded = load_model(write_gguf(tmp_path / "toy.gguf", "gemma3", toy("gemma3")))
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert loaded.config["layer_types"] == kinds
    assert loaded.config["sliding_window"] == 8
    assert loaded.config["query_pre_attn_scalar"] == 8
    ropes = loaded.config["rope_parameters"]
    assert ropes["sliding_attention"]["rope_theta"] == 10_000
    assert ropes["full_attention"]["rope_theta"] == 1_000_000


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_0"])
def test_quantised_weights_equal_the_reference_dequantisation(tmp_path, kind):
    qtype = gguf.GGMLQuantizationType[kind]
    model = toy("qwen3", intermediate_size=64)
    path = write_gguf(tmp_path / "toy.gguf", "qwen3", model, quantised=qtype)
    weights = load_model(path, dtype="float32").state_dict()
    for name, weight in weights.items():
        expected = model.state_dict()[name].numpy()
        if expected.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, qtype), qtype)
        assert np.array_equal(weight.numpy(), expected), name


def test_bfloat16_rounds_once(tmp_path):
    model = toy("llama")
    path = write_gguf(tmp_path / "toy.gguf", "llama", model)
    weights = load_model(path, dtype="bfloat16").state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, model.state_dict()[name].bfloat16()), name


def test_large_tensors_are_dequantised_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.target.gguf.CHUNK", 100)
    model = toy("llama")
    path = write_gguf(tmp_path / "toy.gguf", "llama", model)
    weight = GGUFFile(path).load("token_embd.weight", torch.float32)
    assert torch.equal(weight, model.state_dict()["model.embed_tokens.weight"])


def llama3_divisors(theta: float, size: int, factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them: wavelengths against 8192 / 1 and 8192 / 4."""
    divisors = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (i / size)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = toy("llama", head_dim=64, rope_parameters=rope, max_position_embeddings=16384)
    extra = {"rope_freqs.weight": llama3_divisors(5e5, 64, 32.0)}
    loaded = load_model(
        write_gguf(tmp_path / "toy.gguf", "llama", model, tensors=extra), dtype="float32"
    )
    assert loaded.config["rope_parameters"] == rope
    torch.testing.assert_close(
        logits_of(loaded.hf_model(), TOKENS), logits_of(model, TOKENS), **CLOSE
    )
    other = {"rope_freqs.weight": np.linspace(1, 7, 32, dtype=np.float32)}
    path = write_gguf(tmp_path / "other.gguf", "llama", model, tensors=other)
    assert "not Llama 3's" in error_of(path)


def test_linear_scaling_is_kept_and_other_kinds_are_refused(tmp_path):
    model = toy("llama")
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    loaded = load_model(write_gguf(tmp_path / "a.gguf", "llama", model, keys=keys))
    assert loaded.config["rope_parameters"]["rope_type"] == "linear"
    assert loaded.config["rope_parameters"]["factor"] == 4.0
    keys["rope.scaling.type"] = "yarn"
    path = write_gguf(tmp_path / "b.gguf", "llama", model, keys=keys)
    assert "scales positions by 'yarn'" in error_of(path)


def test_conversion_happens_once_per_file_and_type(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "toy.gguf", "llama", toy("llama"))
    done = []
    original = convert._convert
    monkeypatch.setattr(convert, "_convert", lambda *a: (done.append(a[1]), original(*a)))
    for dtype in ("float32", "float32", "bfloat16", "float32", "bfloat16"):
        load_model(path, dtype=dtype)
    assert done == [torch.float32, torch.bfloat16]
    write_gguf(path, "llama", toy("llama", seed=1, num_hidden_layers=2))  # another file
    assert load_model(path, dtype="float32").config["num_hidden_layers"] == 2
    assert done == [torch.float32, torch.bfloat16, torch.float32]
    (first, *_) = (tmp_path / "cache" / "models").glob("*/provenance.json")
    assert json.loads(first.read_text())["source"] == "toy.gguf"


def test_files_of_one_name_size_and_date_are_converted_each(tmp_path):
    def norm(path: Path) -> torch.Tensor:
        os.utime(path, (0, 0))
        return load_model(path, dtype="float32").state_dict()["model.norm.weight"]

    models = [toy("llama", seed=seed) for seed in range(3)]
    paths = [tmp_path / folder / "model.gguf" for folder in "aba"]  # the last takes the first place
    for path, model in zip(paths, models, strict=True):
        path.parent.mkdir(exist_ok=True)
        write_gguf(path, "llama", model)
        assert torch.equal(norm(path), model.state_dict()["model.norm.weight"])
    assert torch.equal(norm(paths[1]), models[1].state_dict()["model.norm.weight"])
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 3


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "toy.gguf", "llama", toy("llama"))

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            load_model(path)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    load_model(path)


def test_a_converted_model_loads_without_transformers(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "toy.gguf", "llama", toy("llama"))
    load_model(path)
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would raise
    loaded = load_model(path)
    assert loaded.tokenizer is not None
    assert loaded.config_object().hidden_size == 32
    assert loaded.state_dict()["model.norm.weight"].shape == (32,)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GG", "cannot read"),
        (b"", "cannot read"),
        (b"PK\x03\x04" + bytes(64), "starts with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "of version 1"),
    ],
)
def test_broken_files_are_refused(tmp_path, content, reason):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert reason in error_of(path)


def test_truncated_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", "llama", toy("llama"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    assert "the file is truncated" in error_of(path)
    path.write_bytes(whole[:500])
    assert "cannot read" in error_of(path)


def test_unknown_tensors_are_refused(tmp_path):
    extra = {"blk.0.surprise.weight": np.zeros(4, dtype=np.float32)}
    path = write_gguf(tmp_path / "toy.gguf", "llama", toy("llama"), tensors=extra)
    assert "blk.0.surprise.weight, which no llama model has" in error_of(path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_file_with_a_tensor_missing_or_of_another_shape_is_refused(tmp_path, family):
    model = toy(family)
    for name, weights in damaged(model.state_dict()):
        if not name.startswith(("model.layers.0.", "model.norm.")):
            continue
        part = SimpleNamespace(config=model.config, state_dict=lambda weights=weights: weights)
        message = error_of(write_gguf(tmp_path / "toy.gguf", family, part))
        stored = {"q_proj": "attn_q", "k_proj": "attn_k"}
        assert name in message or stored.get(name.split(".")[-2], "?") in message, message
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def write_keys(path: Path, keys: dict[str, Any], tensors: Sequence[str] = ()) -> Path:
    """A GGUF file of nothing but these."""
    architecture = keys.get("general.architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if key != "general.architecture":
            {int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    for name in tensors:
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({"split.count": 3, "split.no": 1}, ["blk.0.attn_q.weight"], "is part 2 of 3 of a model"),
        ({"general.type": "adapter"}, ["blk.0.attn_q.weight.lora_a"], "of the type 'adapter'"),
        ({}, ["blk.0.attn_q.weight.lora_a"], "holds no matrix token_embd.weight"),
        ({"general.architecture": "clip"}, ["v.x"], "holds no matrix token_embd.weight"),
        ({}, [], "holds no matrix token_embd.weight"),
    ],
)
def test_what_is_no_whole_model_is_refused_at_once(tmp_path, keys, tensors, reason):
    assert reason in error_of(write_keys(tmp_path / "x.gguf", keys, tensors))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_file_that_does_not_tell_a_size_is_refused_with_its_key(tmp_path, family):
    file = GGUFFile(write_gguf(tmp_path / "toy.gguf", family, toy(family)))
    known = gguf_reader.hf_config(file)
    optional = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}
    keys = [key for key in file.metadata if key.startswith(f"{family}.")]
    for key in keys:
        value = file.metadata.pop(key)
        if key.removeprefix(f"{family}.") in optional:
            gguf_reader.hf_config(file)
        else:
            with pytest.raises(ModelError, match=f"{key} in .*toy.gguf must be .* got None"):
                gguf_reader.hf_config(file)
        for wrong in ("a", [1, 2], -1):
            file.metadata[key] = wrong
            with pytest.raises(ModelError, match=f"{key} in .*toy.gguf must be .* got"):
                gguf_reader.hf_config(file)
        file.metadata[key] = value
    assert len(keys) >= 9 and gguf_reader.hf_config(file) == known


@pytest.mark.slow
def test_other_families_load_through_transformers(tmp_path, monkeypatch):
    """The reader of transformers, as for a family that is not read here."""
    monkeypatch.setattr("outrider.target.gguf.FAMILIES", {})
    model = toy("llama")
    loaded = load_model(write_gguf(tmp_path / "toy.gguf", "llama", model), dtype="float32")
    torch.testing.assert_close(
        logits_of(loaded.hf_model(), TOKENS), logits_of(model, TOKENS), **CLOSE
    )
    assert "lm_head.weight" in loaded.state_dict()
    extra = {"rope_freqs.weight": llama3_divisors(5e5, 8, 8.0)}
    path = write_gguf(tmp_path / "scaled.gguf", "llama", model, tensors=extra)
    assert "loses its position scaling" in error_of(path)
    weights = {k: v for k, v in model.state_dict().items() if "layers.2" not in k}
    part = SimpleNamespace(config=model.config, state_dict=lambda: weights)
    message = error_of(write_gguf(tmp_path / "part.gguf", "llama", part))
    assert (
        "lack model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight and 7 more"
        in message
    )
