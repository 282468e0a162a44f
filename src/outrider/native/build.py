"""Compile the C++ sources for this CPU once, and keep the result in the cache directory."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from outrider.cache import cache_dir
from outrider.errors import ConfigError
from outrider.machine import cpu_flags, cpu_name
from outrider.threads import num_threads_of_environment

log = logging.getLogger("outrider")
HERE = Path(__file__).parent
# -ffp-contract=off: a sum has the same bits whichever function the compiler inlines it into.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC"]
REASON_LENGTH = 100  # characters of a compiler's complaint that are shown


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled for this machine; None (with one log line) where that fails.

    `OUTRIDER_NATIVE=0` turns them off; `OUTRIDER_NUM_THREADS` says how many threads they and torch
    use.

    Raises:
        ConfigError: one of these variables, `CXX` or the cache directory cannot be used.
    """
    num_threads = num_threads_of_environment()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    wanted = os.environ.get("OUTRIDER_NATIVE") or "1"
    if wanted not in ("0", "1"):
        raise ConfigError(f"OUTRIDER_NATIVE must be 0 or 1, got {wanted!r}")
    lib = _load(_compiler()) if wanted == "1" else None
    if lib is not None:
        lib.outrider_set_num_threads(torch.get_num_threads())
    return lib


def pointer(array: np.ndarray | torch.Tensor | None) -> ctypes.c_void_p:
    """Address of the first element of a contiguous array or tensor, null for None."""
    if array is None:
        return ctypes.c_void_p(None)
    if isinstance(array, torch.Tensor):
        return ctypes.c_void_p(array.data_ptr())
    return ctypes.c_void_p(array.__array_interface__["data"][0])  # array.ctypes takes a µs more


def _load(compiler: list[str]) -> ctypes.CDLL | None:
    """The library of these sources and this CPU: from the cache, compiled, or by another compiler.

    Args:
        compiler: command and its own flags; empty when there is none.
    """
    home = cache_dir("native")
    prefix = f"outrider-{_sources_key()}"
    own = f"{prefix}-{_key(shlex.join(compiler))}"
    reason = "no C++ compiler found (g++ or clang++)"
    if compiler:
        lib = _cached(home, own)
        if lib is not None:
            return lib
        try:
            return ctypes.CDLL(str(_compile(compiler, home, own)))
        except (subprocess.CalledProcessError, OSError) as error:
            reason = f"no kernels from {shlex.join(compiler)!r} ({_reason(error)})"
    lib = _cached(home, prefix)
    if lib is None:
        log.warning("%s: running on plain torch, slower", reason)
    return lib


def _compiler() -> list[str]:
    """`CXX` as a command, or the compiler on the path; empty when there is none."""
    named = os.environ.get("CXX", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise ConfigError(f"CXX must be a command, got {named!r}: {error}") from error
    found = shutil.which("g++") or shutil.which("clang++")
    return command or ([found] if found else [])


def _cached(home: Path, prefix: str) -> ctypes.CDLL | None:
    """A whole library whose name starts so; a damaged one is passed over.

    The name ends in the checksum, because loading half a library can end the process.
    """
    for path in sorted(home.glob(f"{prefix}-*.so")):
        try:
            if path.stem.rpartition("-")[2] == _key(path.read_bytes()):
                return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _compile(compiler: list[str], home: Path, prefix: str) -> Path:
    """Compile and link, and put the result in the cache under its checksum."""
    sources = sorted(HERE.glob("*.cpp"))
    log.info("Compiling kernels …")
    with tempfile.TemporaryDirectory(dir=home) as work:
        objects = [Path(work) / f"{source.stem}.o" for source in sources]
        commands = [
            [*compiler, *FLAGS, "-c", str(source), "-o", str(obj)]
            for source, obj in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        linked = Path(work) / "linked.so"
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        target = home / f"{prefix}-{_key(linked.read_bytes())}.so"
        os.replace(linked, target)  # atomic: two processes may build at once
    return target


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")


def _reason(error: Exception) -> str:
    """Why there is no library, in one short line."""
    lines = (getattr(error, "stderr", None) or "").splitlines()
    lines = [line for line in lines if "error" in line] or lines
    text = lines[0] if lines else getattr(error, "strerror", None) or str(error)
    if isinstance(error, subprocess.CalledProcessError) and not lines:
        text = f"exit code {error.returncode}"
    return text.strip()[:REASON_LENGTH]


def _sources_key() -> str:
    # A cache directory may be shared by machines.
    cpu = [cpu_name(), platform.machine(), *sorted(cpu_flags())]
    parts = ["\n".join([*FLAGS, *cpu]).encode()]
    parts += [path.read_bytes() for path in sorted(HERE.glob("*.h")) + sorted(HERE.glob("*.cpp"))]
    return _key(b"".join(parts))


def _key(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]
