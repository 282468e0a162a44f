"""A headless Chromium, driven over its DevTools pipe: no driver, no socket, no network."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars"),
)
PATIENCE = 60.0  # seconds; other work may share the machine


def find_chromium() -> str | None:
    """The browser's path; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, send: Any, session: str) -> None:
        self._send, self._session = send, session
        self.faults: list[str] = []  # uncaught exceptions, and what the console calls errors
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._send(method, params, self._session, self._hear)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """What an expression gives, awaited; raises what it throws."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """The colour scheme that the system is said to prefer: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _hear(self, event: dict[str, Any]) -> None:
        method, told = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            self.faults.append(told["exceptionDetails"].get("exception", {}).get("description", ""))
        if method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.faults.append(told["entry"]["text"])


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A tab of a browser with a new profile in `folder`."""
    path = find_chromium()
    assert path is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    shell = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        with open(to_browser[1], "wb") as out, open(from_browser[0], "rb") as back:
            send = _Pipe(out, back)
            target = send("Target.createTarget", {"url": "about:blank"})["targetId"]
            tab = {"targetId": target, "flatten": True}
            yield Page(send, send("Target.attachToTarget", tab)["sessionId"])
            send("Browser.close", {})
    finally:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Pipe:
    """Commands out and answers back, JSON between zero bytes."""

    def __init__(self, out: Any, back: Any) -> None:
        self._out, self._back = out, back
        self._ids = itertools.count(1)

    def __call__(
        self, method: str, params: dict, session: str | None = None, hear: Any = None
    ) -> dict[str, Any]:
        name = next(self._ids)
        message = {"id": name, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            said = json.loads(self._read())
            if said.get("id") == name:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            if hear is not None and "method" in said:
                hear(said)

    def _read(self) -> bytes:
        data = bytearray()
        while (byte := self._back.read(1)) not in (b"\0", b""):
            data += byte
        assert data, "the browser has gone"
        return bytes(data)
