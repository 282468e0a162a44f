"""Processes with all that they start: they end together, however we end."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

CLOSING_SECONDS = 10


def run_in_group(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; when we are interrupted, it and its children end too.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate()
        except BaseException:
            end_group(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_group(process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    """End a process that leads a group, gently at first, and whatever it has started."""
    try:
        ask_group_to_end(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLOSING_SECONDS)
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def ask_group_to_end(leader: int) -> None:
    """Ask a process and all it started to end; they are woken for it."""
    signal_group(leader, signal.SIGTERM)
    signal_group(leader, signal.SIGCONT)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process and all it started, unless they are gone."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: no permission for the dead
        os.killpg(leader, number)
