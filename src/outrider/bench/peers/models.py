"""One model in the formats its peers read, with the same bf16 weights in each."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from outrider.bench.peers.group import run_in_group
from outrider.bench.peers.install import environment_of
from outrider.bench.peers.spec import Peer
from outrider.cache import cache_dir
from outrider.errors import ConfigError
from outrider.target.find import find_model
from outrider.target.load import LoadedModel, load_model
from outrider.target.pretrained import no_progress_bars


def model_directory(model: str | None) -> Path:
    """The model as a directory of Hugging Face's, bf16; made once in the cache."""
    return _made_once("directory", model, "bfloat16", _write_directory)


def gguf_of(model: str | None) -> Path | None:
    """The GGUF file that the model comes from."""
    path, _ = find_model(model)
    return path if path.suffix == ".gguf" else None


def gguf_type(path: Path) -> str:
    """How most of its weights are stored: ``Q4_1``."""
    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(path).fields.get("general.file_type")
    kind = "GGUF" if field is None else LlamaFileType(field.contents()).name
    return kind.removeprefix("MOSTLY_")


def model_gguf(model: str | None) -> Path | None:
    """The model as a bf16 GGUF file; None where it does not come from one."""
    path = gguf_of(model)
    if path is None:
        return None
    made = _made_once("gguf", model, "bfloat16", lambda _, home: _write_gguf(path, home))
    return made / "model.gguf"


def converted_for(peer: Peer, model: Path) -> Path:
    """The model in a format of the peer's own, made by its command.

    Args:
        model: as `model_directory` gives it: its name tells its weights.

    Raises:
        ConfigError: the command failed.
    """
    target = cache_dir("peer-models") / f"{model.name}-{peer.name}"
    if target.is_dir():
        return target
    home = environment_of(peer)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / "model"
        names = {"venv": str(home), "model": str(model), "converted": str(made)}
        command = [part.format(**names) for part in peer.convert]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        try:
            done = run_in_group(command, environment)
        except OSError as error:
            raise ConfigError(
                f"{peer.title} could not convert the model: {command[0]}: {error.strerror}; "
                f"`outrider bench peers --install {peer.name}` makes its environment anew"
            ) from error
        if done.returncode or not made.is_dir():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(f"{peer.title} could not convert {model}: {last}")
        os.rename(made, target)
    return target


def _made_once(
    kind: str, model: str | None, dtype: str, write: Callable[[LoadedModel, Path], None]
) -> Path:
    loaded = load_model(model, dtype)
    name = loaded.name.replace("/", "--")
    target = cache_dir("peer-models") / f"{name}-{loaded.identity}-{kind}"
    if not target.is_dir():
        work = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            write(loaded, work)
            os.rename(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _write_directory(loaded: LoadedModel, directory: Path) -> None:
    module = loaded.hf_model()
    module.generation_config.eos_token_id = list(loaded.eos_token_ids) or None
    with no_progress_bars():
        module.save_pretrained(directory)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(directory)


def _write_gguf(source: Path, directory: Path) -> None:
    """The same file with its matrices dequantised to bf16; vectors are float32 as in any GGUF."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(directory / "model.gguf", architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        parts = field.types
        below = parts[-1] if parts[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), parts[0], sub_type=below)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, quants.quantize(values, Kind.BF16), raw_dtype=Kind.BF16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
