"""Compile the C++ sources for this CPU once, and keep the result in the cache directory."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from outrider.cache import cache_dir

log = logging.getLogger("outrider")
HERE = Path(__file__).parent
# -ffp-contract=off: a sum has the same bits whichever function the compiler inlines it into.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled for this machine; None (with one log line) where that fails.

    `OUTRIDER_NATIVE=0` turns them off.
    """
    if os.environ.get("OUTRIDER_NATIVE", "1") == "0":
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.warning("no C++ compiler found (g++ or clang++): running on plain torch, slower")
        return None
    try:
        lib = ctypes.CDLL(str(_build(compiler)))
    except (subprocess.CalledProcessError, OSError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        log.warning(
            "the kernels did not compile, running on plain torch, slower: %s", detail[-500:]
        )
        return None
    lib.outrider_set_num_threads(
        int(os.environ.get("OUTRIDER_NUM_THREADS", torch.get_num_threads()))
    )
    return lib


def pointer(array: np.ndarray | torch.Tensor | None) -> ctypes.c_void_p:
    """Address of the first element of a contiguous array or tensor, null for None."""
    if array is None:
        return ctypes.c_void_p(None)
    if isinstance(array, torch.Tensor):
        return ctypes.c_void_p(array.data_ptr())
    return ctypes.c_void_p(array.__array_interface__["data"][0])  # array.ctypes takes a µs more


def _build(compiler: str) -> Path:
    """Path of the shared object for these sources, flags, compiler and CPU."""
    sources = sorted(HERE.glob("*.cpp"))
    digest = hashlib.sha256("\n".join([compiler, *FLAGS, _cpu()]).encode())
    for path in sorted(HERE.glob("*.h")) + sources:
        digest.update(path.read_bytes())
    target = cache_dir("native") / f"outrider-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = [Path(work) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *FLAGS, "-c", str(source), "-o", str(obj)]
            for source, obj in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, commands))
        linked = Path(work) / "linked.so"
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        os.replace(linked, target)  # atomic: two processes may build at once
    return target


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _cpu() -> str:
    """Model and instruction sets of this CPU: a cache directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
