"""Environments of the peers: made on request, found afterwards."""

import glob
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from outrider.bench.peers.cores import cores_for
from outrider.bench.peers.group import run_in_group
from outrider.bench.peers.spec import Peer
from outrider.cache import cache_dir
from outrider.errors import ConfigError

DONE = "installed"  # file that marks an environment as complete

# Prints the requirements of an installed distribution, without some: they would replace the
# torch that is there by one for another device.
REQUIREMENTS = """
import re, sys
from importlib.metadata import requires
for line in requires(sys.argv[1]) or ():
    name = re.match(r"[A-Za-z0-9_.-]+", line)[0].lower()
    if "extra ==" not in line and name not in sys.argv[2:]:
        print(line)
"""


def environment_of(peer: Peer) -> Path:
    """Directory of the peer's environment, which may not exist."""
    return cache_dir("peers") / peer.name


def python_of(peer: Peer) -> Path | None:
    """The Python to run the peer with; None: it is not installed."""
    if peer.is_ours:
        return Path(sys.executable)
    home = environment_of(peer)
    return home / "bin" / "python" if (home / DONE).is_file() else None


def install(peer: Peer, show: Callable[[str], None]) -> None:
    """Make the peer's environment anew; takes minutes and up to some gigabytes.

    Raises:
        ConfigError: a step failed; the message holds the command and the end of its output.
    """
    home = environment_of(peer)
    shutil.rmtree(home, ignore_errors=True)
    python = home / "bin" / "python"
    _run([_base_python(peer), "-m", "venv", str(home)], show, {})
    build = peer.build_environment.get(platform.machine(), {})
    for step in peer.steps:
        arguments = step
        if isinstance(step, dict):
            command = [str(python), "-c", REQUIREMENTS, step["requirements_of"], *step["without"]]
            arguments = ["install", *_run(command, show, {}).splitlines()]
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, *arguments], show, build)
    (home / DONE).touch()


def runtime_environment(peer: Peer, num_threads: int) -> dict[str, str]:
    """Environment variables to run a peer with, on top of our own."""
    cores = ",".join(map(str, cores_for(num_threads)))
    values = {name: value.format(cores=cores) for name, value in peer.environment.items()}
    found = [path for name in peer.preload if (path := _find_library(name, peer)) is not None]
    if found:
        values["LD_PRELOAD"] = ":".join(found)
    if not peer.is_ours:
        # Models are on this disk; a look for newer ones would time the network.
        values |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        values["PATH"] = f"{environment_of(peer) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return values | {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}


def missing_libraries(peer: Peer) -> list[str]:
    """Libraries that should be preloaded and are not on this machine."""
    return [name for name in peer.preload if _find_library(name, peer) is None]


def _find_library(name: str, peer: Peer) -> str | None:
    places = [environment_of(peer) / "lib", Path("/usr/lib"), Path("/usr/local/lib")]
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    for place in (*places, Path("/usr/lib") / multiarch):
        for path in sorted(glob.glob(str(place / name))):
            return path
    return None


def _base_python(peer: Peer) -> str:
    """A Python that can run the peer: ours, or one of the version it needs."""
    if not peer.python or sys.version_info[:2] == tuple(map(int, peer.python.split("."))):
        return sys.executable
    name = f"python{peer.python}"
    # pyenv puts a stand-in on the PATH that fails where the version is not switched on.
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for path in (shutil.which(name), *sorted(pyenv.glob(f"{peer.python}.*/bin/{name}"))):
        if path is not None and _works(str(path)):
            return str(path)
    raise ConfigError(f"{peer.title} needs {name}, which was not found on this machine")


def _works(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0
    except OSError:
        return False


def _run(command: list[str], show: Callable[[str], None], extra: Mapping[str, str]) -> str:
    shown = " ".join(command[:8]) + (" …" if len(command) > 8 else "")
    show(shown.splitlines()[0])
    try:
        done = run_in_group(command, os.environ | dict(extra))
    except OSError as error:
        raise ConfigError(f"`{shown}` could not be started: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if "WARNING" not in line]
        raise ConfigError(f"`{shown}` failed: {' '.join(lines[-3:]) or 'no output'}")
    return done.stdout
