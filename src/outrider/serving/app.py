"""The app: which path leads where, and who may take it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider import __version__
from outrider.llm import LLM
from outrider.serving.errors import ApiError, out_of_order
from outrider.serving.http import Edge, JSONBody, error_response, not_found
from outrider.serving.limits import Keys
from outrider.serving.page import add_page
from outrider.serving.policy import add_policy
from outrider.serving.service import Service, Settings
from outrider.serving.worker import EngineGone


def create_app(llm: LLM, settings: Settings | None = None) -> Edge:
    """An ASGI app that serves one model; the engine starts and ends with its lifespan.

    Raises:
        ConfigError: the file of the policy cannot be read or holds none.
    """
    service = Service(llm, settings or Settings())
    return Edge(_routes(service), service.metrics.call)


def service_of(app: Edge) -> Service:
    """What an app of `create_app` serves."""
    return app.inner.state.service


def _routes(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="outrider",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,  # to an address that the client's Host header names
        exception_handlers={
            ApiError: _refuse,
            EngineGone: _refuse_all,
            HTTPException: _refuse_route,
            Exception: _excuse,
        },
    )
    app.state.service = service
    _add_api(app, service)
    _add_health(app, service)
    add_policy(app, service.llm.rules, partial(admit, service, service.admin_keys))
    add_page(app, service, partial(admit, service, service.keys))
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        admit(service, service.keys, request)
        return await service.complete(request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        admit(service, service.keys, request)
        return await service.chat(request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        admit(service, service.keys, request)
        return JSONBody(service.models())

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        admit(service, service.keys, request)
        service.check_model(name)
        return JSONBody(service.models()["data"][0])

    @app.get("/decisions")
    async def decisions(request: Request) -> Response:
        admit(service, service.keys, request)
        return JSONBody(await service.decisions(request.state.owner))


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        is_alive = service.worker.is_alive
        return JSONBody({"status": "ok" if is_alive else "failed"}, 200 if is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        is_ready = service.worker.is_alive and not service.is_draining
        return JSONBody({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def admit(service: Service, keys: Keys, request: Request) -> None:
    """Note whose call it is.

    Raises:
        ApiError: 401 without one of the keys, 503 without an engine.
    """
    owner = keys.owner(request.headers.get("authorization"))
    request.state.owner = owner
    if owner:
        request.state.record["owner"] = owner
    service.check_alive()


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _refuse_all(_: Request, __: Exception) -> Response:
    """The engine ended between the check and the call."""
    return error_response(out_of_order())


async def _excuse(_: Request, __: Exception) -> Response:
    """What nobody foresaw; it goes on to the edge, which logs it."""
    error = ApiError(500, "the server failed at this call; its log says more")
    return error_response(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """No such path, or no such method on it."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(not_found(request.url.path))
    said = f"{request.method} is not a method of {request.url.path}"
    return error_response(ApiError(error.status_code, said, headers=error.headers))
