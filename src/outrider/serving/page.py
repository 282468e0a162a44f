"""The page at `/`: a playground and a live view, and what the live view reads.

Its files are read when the server starts, so no path of a call ever reaches the file system. The
page loads nothing from elsewhere, and its policy forbids it to.
"""

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider.checks import shown
from outrider.serving.errors import ApiError
from outrider.serving.http import JSONBody, not_found
from outrider.serving.service import Service

FOLDER = Path(__file__).parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, service: Service, authorize: Callable[[Request], None]) -> None:
    """The page, open to everybody, and `/live`; `authorize` raises where a caller may not look."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}

    def file(name: str) -> Response:
        return Response(files[name], headers=HEADERS | {"Content-Type": TYPES[Path(name).suffix]})

    @app.get("/")
    async def page() -> Response:
        return file("index.html")

    @app.get("/web/{name:path}")
    async def part(name: str) -> Response:
        if name not in files:
            raise not_found(f"/web/{name}")
        return file(name)

    @app.get("/live")
    async def live(request: Request) -> Response:
        authorize(request)
        since = _step(request.query_params.get("since", "0"))
        found = await service.live(request.state.owner, since)
        return JSONBody(found, headers={"Cache-Control": "no-store"})


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, f"since must be the number of a step, got {shown(text)}", param="since")
    return int(text)
