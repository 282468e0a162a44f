"""From `response_format` to the grammar that an answer follows, behind its thoughts."""

import json
from collections.abc import Mapping
from typing import Any

from outrider.checks import shown
from outrider.serving.errors import ApiError
from outrider.serving.parsers import END_THINK, THINK

THOUGHTS = r"(.|\n)*" + END_THINK.replace("/", r"\/")


def structured_outputs(
    response_format: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """OpenAI's field or vLLM's `structured_outputs` as that of `SamplingParams`.

    Raises:
        ApiError: 400, an unknown format, or both fields.
    """
    if response_format is None or response_format == {"type": "text"}:
        return given
    if given is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both")
    kind, told = response_format.get("type"), response_format.get("json_schema")
    if kind == "json_object" and set(response_format) == {"type"}:
        return {"json_object": True}
    if kind == "json_schema" and isinstance(told, Mapping):
        schema = told.get("schema")
        if isinstance(schema, Mapping) and set(told) <= {"name", "description", "schema", "strict"}:
            return {"json": schema}
    raise ApiError(
        400,
        'response_format must have the type "text", "json_object", or "json_schema" with '
        f"json_schema.schema, got {shown(response_format)}",
        param="response_format",
    )


def behind_thoughts(given: Mapping[str, Any], is_thinking: bool) -> Mapping[str, Any]:
    """The grammar of an answer that may think first, or that has already begun to.

    A grammar in Lark's notation is left as it is: whoever writes one can name the thoughts.
    """
    [(kind, value)] = given.items()
    if kind == "grammar":
        return given
    begin = "" if is_thinking else THINK
    start = "thoughts blank answer" if is_thinking else "(thoughts blank)? answer"
    return {
        "grammar": f"start: {start}\n"
        f"thoughts[lazy]: /{begin}{THOUGHTS}/\n"
        "blank: /[ \\n]{0,4}/\n"
        f"answer: {_rule(kind, value)}\n"
    }


def _rule(kind: str, value: Any) -> str:
    if kind == "regex":
        return "/" + str(value).replace("/", r"\/") + "/"
    if kind == "choice":
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    if kind == "json_object":
        value = {"type": "object"}
    return "%json " + (value if isinstance(value, str) else json.dumps(value))
