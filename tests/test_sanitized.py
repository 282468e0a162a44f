"""The compiled code under the sanitizers of its compiler: no access outside its memory.

What a fault there overwrites may show much later, in any test or in none. So the tests that call
the compiled code run once more, in a process that stops at the first such access.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTED = [
    "test_drafting.py",
    "test_engine_random.py",
    "test_kv.py",
    "test_lookup.py",
    "test_native_draft.py",
    "test_native_heads.py",
    "test_native_stack.py",
    "test_native_target.py",
    "test_sampling.py",
    "test_table_build.py",
    "test_table_format.py",
    "test_table_lookup.py",
    "test_table_source.py",
    "test_verify.py",
]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"


def runtime(name: str) -> str | None:
    """Path of a library of g++, None where it has none."""
    gxx = shutil.which("g++")
    if gxx is None:
        return None
    found = subprocess.run([gxx, f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip() if Path(found.stdout.strip()).is_absolute() else None


RUNTIMES = [runtime(f"lib{name}.so") for name in ("asan", "ubsan", "stdc++")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(None in RUNTIMES, reason="no g++ with sanitizers")
def test_the_compiled_code_stays_inside_its_memory(tmp_path: Path) -> None:
    report = tmp_path / "report"
    environment = {
        **os.environ,
        "CXX": f"g++ {FLAGS}",
        "OUTRIDER_CACHE": str(tmp_path / "cache"),
        "LD_PRELOAD": " ".join(filter(None, RUNTIMES)),
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={report}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={report}",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not slow and not model", *(str(HERE / name) for name in TESTED)],
        cwd=HERE.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    found = "\n".join(path.read_text() for path in tmp_path.glob("report*"))
    assert done.returncode == 0, f"{found[:3000]}\n{done.stdout[-3000:]}\n{done.stderr[-1000:]}"
    assert " passed" in done.stdout
    assert list(tmp_path.glob("cache/native/*.so")), "the plain path was tested, nothing compiled"
