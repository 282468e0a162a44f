"""The processes of a run, started by torchrun or alone, and how they are asked to stop."""

import importlib
import os
import signal
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ENDING_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
# Its functions have the group of all processes as a default, taken when it is imported. Imported
# while there is a group (transformers does), it keeps that group, and gloo's threads, alive to the
# end of Python, where one that lets go of a tensor then ends the process by SIGABRT.
KEEPS_THE_GROUP = "torch.distributed.nn.functional"


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of a run."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """It alone writes and shows anything."""
        return self.rank == 0

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether one process says so; all have to ask."""
        if self.size == 1:
            return flag
        found = torch.tensor(int(flag), device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)


ALONE = World()


def join_world(device: str) -> tuple[World, str]:
    """Meet the other processes that torchrun started, if it did.

    Returns:
        The world, and the device of this process: with several GPUs each process has its own.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE, device
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu and ":" not in device:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        importlib.import_module(KEEPS_THE_GROUP)
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return World(dist.get_rank(), dist.get_world_size()), device


def leave_world() -> None:
    """End what `join_world` began, threads included."""
    if dist.is_initialized():
        dist.destroy_process_group()


class StopSignals(AbstractContextManager["StopSignals"]):
    """Notes Ctrl-C, SIGTERM and SIGHUP in place of ending; the same one again ends at once.

    torchrun hands on a SIGTERM after a Ctrl-C, which must not end what the Ctrl-C has begun.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for name in ENDING_SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.number == number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
