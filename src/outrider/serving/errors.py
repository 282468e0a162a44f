"""What the server refuses, in OpenAI's error envelope."""

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from outrider.errors import PromptError, PromptTooLong, SamplingError, UserError
from outrider.serving.worker import AnswerFailure, EngineFailure, EngineGone

TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is no answer: status, sentence, and what an OpenAI client reads of it.

    Args:
        status: HTTP status.
        message: what was given and what was expected.
        code: for programs, as "model_not_found"; None where OpenAI has none.
        param: the field at fault.
        headers: of the response, as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        default = "server_error" if self.status >= 500 else TYPES[400]
        return TYPES.get(self.status, default)

    @property
    def envelope(self) -> dict[str, Any]:
        """The body of the response."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}


def failed(error: EngineFailure, fields: Mapping[str, str]) -> ApiError:
    """What is answered when the engine lost a request, or has failed for good.

    `fields` as those of `refused`, for what was found out too late to be refused.
    """
    if isinstance(error, EngineGone):
        return out_of_order()
    if isinstance(error, AnswerFailure):
        return refused(SamplingError(str(error)), fields)
    return ApiError(500, str(error), code="engine_failure")


def out_of_order() -> ApiError:
    """What is answered without an engine."""
    told = "the server is out of order: its engine has failed"
    return ApiError(503, told, headers={"Retry-After": "10"})


def refused(error: UserError, fields: Mapping[str, str]) -> ApiError:
    """A 400 that says what the engine says of a request.

    `fields`: by the engine's word for something, the field that the client gave it in, where that
    is another.
    """
    said, param = str(error), None
    if isinstance(error, PromptError):
        name = "prediction" if said.startswith("the prediction") else "prompt"
        param = fields.get(name, name)
    elif isinstance(error, SamplingError):  # its messages name a parameter first
        found = re.match(r"(?:a token id in )?(\w+)", said)
        if found is not None:
            param = fields.get(found[1], found[1])
            said = said.replace(found[1], param, 1)
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, said, param=param, code=code)


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON; halves of characters, which clients can send, go back as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def to_event(body: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(body) + b"\n\n"


def quoted(text: str) -> bytes:
    """What `to_json` makes of text, without what it does for anything else."""
    return encode_basestring(text).encode("utf-8", "backslashreplace")
