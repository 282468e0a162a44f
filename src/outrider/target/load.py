"""From what a user names as a model to a target: find it, convert a GGUF once, read it fast.

A GGUF file becomes a directory of safetensors, config.json and tokenizer.json in the cache; every
later start maps the weights from there and imports no transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ModelError, TokenizerMismatch
from outrider.machine import cpu_flags
from outrider.target.attention import IMPLEMENTATION
from outrider.target.base import Target
from outrider.target.convert import converted
from outrider.target.find import find_model, identity_of
from outrider.target.pretrained import read_pretrained
from outrider.tokenizer import Tokenizer, first_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
}
# Instruction sets with bf16 products; without them bf16 is emulated and slower than fp32.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # "bf16" is ARM's


@dataclass(slots=True)
class LoadedModel:
    """A model found and read, not yet built: what any target is made from."""

    name: str
    config: dict[str, Any]  # of the language model, every default written out
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...] = ()
    directory: Path | None = None  # config.json and weights; None: only `module`
    module: "PreTrainedModel | None" = None
    source: Path | None = None  # a GGUF file, or `directory`

    @property
    def identity(self) -> str | None:
        """Tells models of one name apart, see `identity_of`; None of a module: it has no files."""
        return None if self.source is None else identity_of(self.source)

    def config_object(self) -> Any:
        """The configuration as an object; transformers' own only where it has to compute."""
        rope = self.config.get("rope_parameters") or {}
        tables = [t for t in (rope, *rope.values()) if isinstance(t, dict)]
        if all(t.get("rope_type", "default") == "default" for t in tables):
            return SimpleNamespace(**self.config)
        from transformers import AutoConfig

        settings = {k: v for k, v in self.config.items() if k != "model_type"}
        return AutoConfig.for_model(self.config["model_type"], **settings)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights by Hugging Face name, in `dtype`, mapped from disk where they are stored so.

        A tied model has no `lm_head.weight`. Treat the tensors as read-only.
        """
        files = sorted(self.directory.glob("*.safetensors")) if self.directory else []
        if self.module is None and files:
            tensors = _mapped(files)
        else:
            tensors = dict(self.hf_model().state_dict())
            if self.config.get("tie_word_embeddings"):
                tensors.pop("lm_head.weight", None)
        # A model that also sees pictures keeps its language model one level down.
        return {
            name.replace("language_model.", ""): tensor.to(self.dtype)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in tensors.items()
        }

    def hf_model(self) -> "PreTrainedModel":
        """The model as a module of transformers, built on first use."""
        if self.module is None:
            assert self.directory is not None
            model = read_pretrained(self.name, str(self.directory), self.dtype)
            self.module = model.to(self.device)  # pyright: ignore[reportArgumentType]
        return self.module


def load_target(
    model: "str | Path | PreTrainedModel | None" = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    max_model_len: int | None = None,
    deterministic: bool | None = None,
    tokenizer: Any = None,
) -> tuple[Target, LoadedModel]:
    """Find a model, read it and build the target that runs it.

    Args: see `load_model` and `build_target`.
    """
    loaded = load_model(model, dtype, device, tokenizer)
    return build_target(loaded, max_model_len, deterministic), loaded


def build_target(
    loaded: LoadedModel, max_model_len: int | None = None, deterministic: bool | None = None
) -> Target:
    """The one place where it is decided what runs a model.

    Args:
        max_model_len: longest text in tokens; None takes the model's own limit.
        deterministic: True insists on it, False does without, None takes what the target offers.

    Raises:
        ModelError: no target runs this model exactly, or not deterministically.
    """
    from outrider.target.model import TransformersTarget, check_model_len
    from outrider.target.native import NativeTarget

    config = loaded.config_object()
    if _why_not_native(loaded, config) is None:
        length = check_model_len(max_model_len, config)
        return NativeTarget(config, loaded.state_dict(), loaded.dtype, length, loaded.name)
    return TransformersTarget(loaded.hf_model(), max_model_len, loaded.name, deterministic)


def _why_not_native(loaded: LoadedModel, config: Any) -> str | None:
    from outrider.target.native import why_not_native

    if loaded.dtype not in (torch.bfloat16, torch.float32):
        return f"no lean forward in {loaded.dtype}"
    if loaded.config.get("quantization_config"):
        return "its weights are quantised"
    return why_not_native(config, loaded.device.type)


def load_model(
    model: "str | Path | PreTrainedModel | None" = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    tokenizer: Any = None,
) -> LoadedModel:
    """Find a model and read its configuration and tokenizer.

    Args:
        model: None for the default model; a directory; a .gguf file; an installed distribution
            that ships one; a name on the Hugging Face hub; or a model of transformers.
        dtype: "auto" is bfloat16 where the device computes in it, else float32.
        device: "auto" is cuda where there is one, else cpu.
        tokenizer: in place of the model's own: a directory, a name, a tokenizer of transformers
            or a `Tokenizer`.

    Raises:
        ModelError: it is not found or cannot be read; the message says what was tried.
    """
    where = _device(device)
    if model is not None and not isinstance(model, str | Path):
        return _from_module(model, dtype, where, tokenizer)
    kind = resolve_dtype(dtype, where)
    source, name = find_model(model)
    path = source
    if path.suffix == ".gguf":
        path = converted(path, kind)
        config = json.loads((path / "config.json").read_text())
        own = Tokenizer.from_directory(path)
    else:
        config = _hf_config(path, name)
        own = _own_tokenizer(path, tokenizer is not None)
    found = own if tokenizer is None else resolve_tokenizer(tokenizer)
    if tokenizer is not None and found is not None:
        _check_tokenizer(name, found, own, config)
    eos = _eos_ids(path, config, found)
    return LoadedModel(name, config, found, kind, where, eos, directory=path, source=source)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The type to compute in.

    Raises:
        ModelError: an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    return torch.bfloat16 if cpu_flags() & BF16_FLAGS else torch.float32


def resolve_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """A `Tokenizer` from what a user gives: a name, a path, one of transformers, one already."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        path, _ = find_model(tokenizer)
        if path.suffix == ".gguf":
            return load_model(path).tokenizer
        return _hf_tokenizer(path)
    return Tokenizer.from_transformers(tokenizer)


def _own_tokenizer(path: Path, is_replaced: bool) -> Tokenizer | None:
    """The model's tokenizer; one that cannot be read does not matter where another is given."""
    try:
        return _hf_tokenizer(path)
    except ModelError:
        if not is_replaced:
            raise
        return None


def _check_tokenizer(
    name: str, given: Tokenizer, own: Tokenizer | None, config: dict[str, Any]
) -> None:
    """Refuse a tokenizer whose ids mean something else to the model.

    Raises:
        TokenizerMismatch: names the first token that differs from the model's own, or ids that
            the model does not have.
    """
    difference = None if own is None else first_difference(own, given)
    if difference is not None:
        token_id, expected, got = difference
        raise TokenizerMismatch(
            f"the tokenizer is not for {name}: token {token_id} is {got!r}, expected {expected!r}"
        )
    size = config.get("vocab_size")
    if own is not None or size is None:
        return
    # Special tokens may lie beyond: Gemma 3 has one for pictures, which text never holds.
    beyond = [i for i in range(size, given.vocab_size) if i not in given.special_ids]
    if any(given.tokens[i] is not None for i in beyond):
        raise TokenizerMismatch(
            f"the tokenizer is not for {name}: it has {given.vocab_size} tokens, "
            f"expected at most the {size} of the model's vocabulary"
        )


def _mapped(files: list[Path]) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is not iterable
                tensors[name] = shard.get_tensor(name)
    return tensors


def _hf_config(path: Path, name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the configuration of {name}: {error}") from error
    return config.get_text_config(decoder=True).to_dict()


def _hf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory; None where there is none: ids still work."""
    if not any(path.glob("tokenizer*")) and not any(path.glob("vocab*")):
        return None
    from transformers import AutoTokenizer

    try:
        return Tokenizer.from_transformers(AutoTokenizer.from_pretrained(path))
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"cannot read the tokenizer in {path}: {error}") from error


def _from_module(
    model: "PreTrainedModel", dtype: str | torch.dtype, device: torch.device, tokenizer: Any
) -> LoadedModel:
    """Take over a loaded model; "auto" keeps its type and its device."""
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"expected a name, a path or a model of transformers, got {type(model).__name__}"
        )
    kind = model.dtype if dtype == "auto" else resolve_dtype(dtype, device)
    if kind != model.dtype and model.config._attn_implementation == IMPLEMENTATION:
        raise ModelError(f"the model is a target in {model.dtype} already, it cannot be in {kind}")
    config = model.config.get_text_config(decoder=True).to_dict()
    found = resolve_tokenizer(tokenizer)
    name = model.name_or_path or type(model).__name__
    if found is not None:
        _check_tokenizer(name, found, None, config)
    eos = _as_ids(getattr(model.generation_config, "eos_token_id", None)) or _as_ids(
        config.get("eos_token_id")
    )
    module = model.to(kind)  # pyright: ignore[reportArgumentType]
    return LoadedModel(name, config, found, kind, module.device, eos, module=module)


def _eos_ids(path: Path, config: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends a text: by generation_config.json, else the configuration, else the tokenizer."""
    generation: dict[str, Any] = {}
    if (path / "generation_config.json").is_file():
        generation = json.loads((path / "generation_config.json").read_text())
    found = _as_ids(generation.get("eos_token_id")) or _as_ids(config.get("eos_token_id"))
    return found or _as_ids(tokenizer.eos_token_id if tokenizer else None)


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device must be auto, cpu or cuda, got {device!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but torch finds no CUDA device")
    return found
