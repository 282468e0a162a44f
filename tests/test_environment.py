"""What the surroundings can do wrong: cache directory, threads, compiler, standard streams."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeTarget

from outrider import LLM
from outrider.bench.timing import pin
from outrider.cache import cache_dir
from outrider.cli.bench_options import cpu_threads
from outrider.cli.train_options import TargetOptions
from outrider.errors import ConfigError
from outrider.native import build
from outrider.threads import check_num_threads, num_threads_of_environment, set_num_threads


@pytest.mark.parametrize("variable", ["OUTRIDER_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_that_is_no_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"the cache directory .*/file.*OUTRIDER_CACHE"):
        cache_dir("models")


def test_the_cache_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE", "~/mine")
    assert cache_dir("models") == tmp_path / "mine" / "models"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None, 10**6])
def test_impossible_numbers_of_threads(value: object) -> None:
    with pytest.raises(ConfigError, match=r"num_threads must be .*, got "):
        check_num_threads(value)


@pytest.mark.parametrize("text", ["junk", "1.5", "0", "-1", "99999", "9" * 6000])
def test_impossible_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OUTRIDER_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="OUTRIDER_NUM_THREADS must be"):
        num_threads_of_environment()
    with pytest.raises(ConfigError, match="OUTRIDER_NUM_THREADS must be"):
        build.library.__wrapped__()


def test_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NUM_THREADS", " 2 ")
    assert num_threads_of_environment() == 2
    monkeypatch.setenv("OUTRIDER_NUM_THREADS", "")
    assert num_threads_of_environment() is None


def by_target(asked: int | None) -> int:
    return TargetOptions(num_threads=asked).set_threads()


def by_bench(asked: int | None) -> int:
    pin(asked)
    return cpu_threads()


def by_llm(asked: int | None) -> int:
    LLM(target=FakeTarget(), num_threads=asked, speculative_config=None)
    return set_num_threads()


@pytest.mark.parametrize("ask", [set_num_threads, by_target, by_bench, by_llm])
def test_threads_that_are_asked_for_go_before_the_environment(ask, monkeypatch) -> None:
    lib, cores = build.library(), []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: cores.append(given))
    before = torch.get_num_threads(), set_num_threads()
    monkeypatch.setenv("OUTRIDER_NUM_THREADS", "1")
    build.library.__wrapped__()  # as at the start
    try:
        assert ask(None) == torch.get_num_threads() == 1
        for asked in (2, 3):
            assert ask(asked) == torch.get_num_threads() == asked
            assert lib is None or lib.outrider_num_threads() == asked
            assert ask(None) == asked  # nobody goes back to the variable
        with pytest.raises(ConfigError, match="must be a positive integer, got 0"):
            ask(0)
    finally:
        set_num_threads(before[1])
        torch.set_num_threads(before[0])


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A compiler that works unless it is called 'broken'; the commands it was given."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        if command[0] == "broken":
            raise subprocess.CalledProcessError(1, command, stderr="note\nx.cpp: fatal error: no")
        if command[0] == "absent":
            raise FileNotFoundError(2, "No such file or directory", "absent")
        Path(command[-1]).write_bytes(b"library of " + command[0].encode())

    def load(path: str) -> str:
        return Path(path).read_text()

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(ctypes, "CDLL", load)
    return commands


def test_a_library_is_compiled_once(compiling: list[list[str]]) -> None:
    assert build._load(["g++", "-g"]) == "library of g++"
    assert compiling[0][:2] == ["g++", "-g"]
    count = len(compiling)
    assert build._load(["g++", "-g"]) == "library of g++"
    assert len(compiling) == count
    assert build._load(["clang++"]) == "library of clang++"


def test_a_damaged_library_is_compiled_again(compiling: list[list[str]], tmp_path: Path) -> None:
    build._load(["g++"])
    (path,) = (tmp_path / "native").glob("*.so")
    path.write_bytes(path.read_bytes()[:5])
    count = len(compiling)
    assert build._load(["g++"]) == "library of g++"
    assert len(compiling) == 2 * count


@pytest.mark.parametrize("compiler", [[], ["absent"], ["broken", "-g"]])
def test_without_a_compiler_a_good_library_of_another_one_serves(
    compiling: list[list[str]], caplog: pytest.LogCaptureFixture, compiler: list[str]
) -> None:
    assert build._load(compiler) is None
    (message,) = caplog.messages
    assert "running on plain torch" in message and "\n" not in message and len(message) < 200
    if compiler:
        assert " ".join(compiler) in message
        assert "No such file" in message or "fatal error: no" in message
    caplog.clear()
    build._load(["g++"])
    assert build._load(compiler) == "library of g++"
    assert not caplog.messages


def test_cxx_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache g++ -g")
    assert build._compiler() == ["ccache", "g++", "-g"]
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(ConfigError, match="CXX must be a command"):
        build._compiler()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert build._compiler() == []


def test_native_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", "no")
    with pytest.raises(ConfigError, match="OUTRIDER_NATIVE must be 0 or 1, got 'no'"):
        build.library.__wrapped__()


# Standard streams


def shell(command: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = command.replace("outrider", f"{sys.executable} -m outrider.cli.main")
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=60, check=False, **options
    )


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("outrider --help >/dev/full", 1, b"No space left on device"),
        ("outrider --version >&-", 1, b"standard output is closed"),
        (r"printf 'a\xff\xfeb' | outrider generate -", 2, b"expected UTF-8"),
        (r"outrider generate $'\xff'", 2, b"expected UTF-8"),
        ("outrider generate", 2, b"no prompt given"),
        ("outrider generate - <&-", 2, b"a prompt is empty"),
    ],
)
def test_streams_that_cannot_be_used_are_one_sentence(
    command: str, code: int, message: bytes
) -> None:
    done = shell(command)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(b"outrider: ") and message in done.stderr
    assert done.stderr.count(b"\n") == 1 and done.stdout == b""


def test_nobody_listens() -> None:
    done = shell("outrider --help | true; exit ${PIPESTATUS[0]}", env=dict(os.environ))
    assert done.stderr == b""


THREADS_WITH_HEAPS = """
import ctypes, re, sys, threading
from outrider.serving.memory import share_heaps
share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
meeting = threading.Barrier(8)
def work():
    libc.malloc(50_000)
    meeting.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc"
)
@pytest.mark.parametrize(("given", "most"), [(None, 2), ("5", 5)])
def test_threads_of_a_server_share_heaps(given: str | None, most: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    env |= {} if given is None else {"MALLOC_ARENA_MAX": given}
    command = [sys.executable, "-c", THREADS_WITH_HEAPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
    assert done.stdout.count("<heap nr=") == most
