"""Runs the app under uvicorn, until a signal: the first drains, the second ends at once."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from socket import socket
from types import FrameType

import uvicorn

from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.serving.app import create_app, service_of
from outrider.serving.logs import json_logs
from outrider.serving.policy import report
from outrider.serving.service import Service, Settings

HANGUP: int | None = getattr(signal, "SIGHUP", None)  # where there is one
SIGNALS = (signal.SIGTERM, signal.SIGINT, *([] if HANGUP is None else [HANGUP]))

FAREWELL_SECONDS = 1  # for the last words of calls that are cut off


def serve(
    llm: LLM, settings: Settings, host: str, port: int, drain_seconds: float | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, or until SIGHUP where it does not read a policy again.

    Calls that are under way then have `drain_seconds` to end, None: as long as they take; new
    ones are refused with 503.

    Raises:
        ConfigError: nobody can listen on this address, or the file of the policy holds none.
    """
    app = create_app(llm, settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=None if drain_seconds is None else ceil(drain_seconds),
    )
    with json_logs():
        server = _Server(config, service_of(app))
        try:
            server.run()
        except UnicodeError as error:  # "a..b"
            if server.started:
                raise
            raise ConfigError(f"cannot serve on {host}:{port}: {host!r} is no host") from error
        except SystemExit as end:
            if server.started:
                raise
            raise ConfigError(f"cannot serve on {host}:{port}: {_reason(end)}") from end


def _reason(end: SystemExit) -> str:
    """Why uvicorn has ended: it exits while it handles what the system says of the address."""
    error = end.__context__
    return error.strerror or str(error) if isinstance(error, OSError) else "the log says why"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, but the process ends with 0 when all has been answered."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if number != HANGUP or handler != signal.SIG_IGN:  # as `nohup` leaves it
                signal.signal(number, self.handle_exit)
        if self._service.policy_file is not None:
            self._service.policy_file.on_hangup(report)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """As uvicorn's own, but what has to end at once is told so and ends in order."""
        await super().shutdown(sockets)
        if self.force_exit and not self.lifespan.shutdown_event.is_set():
            calls = set(self.server_state.tasks)
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls, timeout=FAREWELL_SECONDS)
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.drain()
