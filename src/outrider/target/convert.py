"""Turn a GGUF file into a model directory in the cache, once: later starts map it from there."""

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from outrider.cache import cache_dir
from outrider.errors import ModelError
from outrider.target import gguf
from outrider.target.find import identity_of
from outrider.target.gguf import GGUFFile
from outrider.target.native import fitting_weights
from outrider.target.pretrained import read_pretrained
from outrider.tokenizer import Tokenizer

log = logging.getLogger("outrider")

VERSION = 1  # raise it when a conversion comes out differently: old ones are then made again


def converted(path: Path, dtype: torch.dtype) -> Path:
    """Directory with the converted GGUF file, made on first use."""
    written = path.stat().st_mtime_ns
    identity = f"{path.resolve()}|{written}|{identity_of(path)}|{VERSION}|{dtype}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    target = cache_dir("models") / f"{path.stem}-{digest}"
    if not target.is_dir():
        log.info("converting %s, once", path.name)
        work = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            _convert(path, dtype, work)
            try:
                os.rename(work, target)
            except OSError:  # another process was first; its result is the same
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(path: Path, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json, weights, tokenizer and provenance of a GGUF file."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from outrider.target import gguf_tokenizer

    file = GGUFFile(path)
    if file.architecture in gguf.FAMILIES and gguf_tokenizer.is_known(file):
        settings = gguf.hf_config(file)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        weights = fitting_weights(str(path), config, gguf.state_dict(file, dtype))
        tokenizer = gguf_tokenizer.build_tokenizer(file)
    else:
        config, weights, tokenizer = _read_by_transformers(file, dtype)
    values = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(values, indent=1))
    tokenizer.save(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    provenance = {
        "source": path.name,
        "bytes": path.stat().st_size,
        "architecture": file.architecture,
        "dtype": values["dtype"],
        "converter": VERSION,
        "versions": {p: importlib.metadata.version(p) for p in ("torch", "gguf", "tokenizers")},
    }
    (directory / "provenance.json").write_text(json.dumps(provenance, indent=1))


def _read_by_transformers(
    file: GGUFFile, dtype: torch.dtype
) -> tuple[Any, dict[str, torch.Tensor], Tokenizer]:
    """Configuration, weights and tokenizer of a family that only transformers knows. Slow."""
    from transformers import AutoTokenizer

    path = file.path
    scaled = file.get("rope.scaling.type", "none") != "none"
    if scaled or any(name.startswith("rope_f") for name in file.tensors):
        raise ModelError(
            f"{path} is of the family {file.architecture!r}, which is read through transformers, "
            "and that loses its position scaling; give the model in Hugging Face's format"
        )
    directory, name = str(path.parent), path.name
    model = read_pretrained(str(path), directory, torch.float32, gguf_file=name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    except (ValueError, LookupError, OSError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot read the tokenizer of {path}: {error}") from error
    weights = {k: v.to(dtype).contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    config = model.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")  # the weights are plain numbers from here on
    return config, weights, Tokenizer.from_transformers(tokenizer)
