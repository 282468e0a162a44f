"""`/policy`: the rules in force, read and replaced while requests run."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from outrider.checks import shown
from outrider.errors import ConfigError
from outrider.policy.live import LivePolicy, PolicyFile, PolicyVersion
from outrider.policy.rule_document import MAX_BYTES, read_facts, read_json
from outrider.policy.rule_schema import policy_schema
from outrider.policy.rules import shown_explanation
from outrider.serving.errors import ApiError, refused
from outrider.serving.http import JSONBody, read_body

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0


def add_policy(app: FastAPI, live: LivePolicy, may_use: Callable[[Request], None]) -> None:
    """The endpoints; `may_use` raises where a caller may not use them."""

    def authorize(request: Request) -> None:
        may_use(request)
        if query := request.url.query:  # a "?dry_run=1" that changed the policy would be a trap
            raise ApiError(400, f"{request.url.path} takes no query, got {shown(query)}")

    @app.get("/policy")
    async def policy(request: Request) -> Response:
        authorize(request)
        return JSONBody(_shown(live))

    @app.put("/policy")
    async def replace(request: Request) -> Response:
        authorize(request)
        body = await read_body(request, MAX_BYTES)
        return _changed(live, lambda: live.replace(read_json(body)))

    @app.post("/policy/back")
    async def back(request: Request) -> Response:
        authorize(request)
        return _changed(live, live.back)

    @app.post("/policy/explain")
    async def explain(request: Request) -> Response:
        authorize(request)
        return JSONBody(_explained(live, await read_body(request, MAX_BYTES)))

    @app.get("/policy/schema")
    async def schema(request: Request) -> Response:
        authorize(request)
        return JSONBody(policy_schema())


async def watch(file: PolicyFile) -> None:
    """Reload the file whenever it changes; what is wrong with it is logged and changes nothing."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        try:
            version = file.poll()
        except ConfigError as error:
            report(error)
        else:
            if version is not None:
                report(version)


def report(found: PolicyVersion | ConfigError) -> None:
    """Log a policy that came into force, or one that could not."""
    if isinstance(found, ConfigError):
        logger.warning("policy refused: %s", found)
    else:
        logger.info("policy in force", extra={"record": {"version": found.number}})


def _changed(live: LivePolicy, change: Callable[[], PolicyVersion]) -> Response:
    try:
        report(change())
    except ConfigError as error:
        raise refused(error, {}) from error
    return JSONBody(_shown(live))


def _shown(live: LivePolicy) -> dict[str, Any]:
    versions = live.versions
    return {
        "version": versions[-1].number,
        "since": versions[-1].since,
        "policy": versions[-1].document,
        "versions": [{"version": one.number, "since": one.since} for one in versions],
    }


def _explained(live: LivePolicy, data: bytes) -> dict[str, Any]:
    """A dry run of the policy in the body, or of the one in force, on the facts in the body."""
    try:
        body = read_json(data, "the body")
        if not isinstance(body, dict) or body.keys() - {"facts", "policy"}:
            raise ConfigError(f'expected {{"facts": …}} and perhaps "policy", got {shown(body)}')
        request, load = read_facts(body.get("facts", {}), "$.facts")
        rules = live.compile(body["policy"]) if "policy" in body else live.current.rules
    except ConfigError as error:
        raise refused(error, {}) from error
    return shown_explanation(rules.explain(request, load))
