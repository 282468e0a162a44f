"""From `response_format` and tools to the grammar that an answer follows, behind its thoughts.

Rules are in Lark's notation, as llguidance reads it; the one named `answer` is the whole answer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.checks import shown
from outrider.errors import SamplingError
from outrider.grammar import JSON_OPTIONS, checked_schema, choice_rule
from outrider.sampling_params import check_form
from outrider.serving.errors import ApiError
from outrider.serving.parsers import CALL, END_CALL, END_THINK, THINK

OBJECT = {"type": "object"}
ABOUT_SCHEMA = {"name": str, "description": str, "strict": bool}
NO_PARAMETERS = OBJECT | {"additionalProperties": False}
BLANK = r"[ \n]"
# What ends a regex in Lark's notation, unless it is escaped, as it may be already; a backslash at
# the end escapes nothing, and llguidance drops it.
ENDS = {"/": r"\/", "\n": r"\n", "": ""}
ESCAPED = re.compile(r"\\[^/\n]|\\?([/\n]|\Z)")
THOUGHTS = r"(.|\n)*" + END_THINK.replace("/", r"\/")


def structured_outputs(
    response_format: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """OpenAI's field or vLLM's `structured_outputs` as that of `SamplingParams`.

    Raises:
        ApiError: 400, an unknown format, or both fields.
        SamplingError: `structured_outputs` holds nothing that can be followed.
    """
    if given is not None:
        check_form(given)
    if response_format is None or response_format == {"type": "text"}:
        return given
    if given is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both")
    kind, told = response_format.get("type"), response_format.get("json_schema")
    if kind == "json_object" and set(response_format) == {"type"}:
        return {"json_object": True}
    if kind == "json_schema" and isinstance(told, Mapping):
        schema = told.get("schema")
        for name, kind_of in ABOUT_SCHEMA.items():
            if not isinstance(told.get(name), kind_of | None):
                raise ApiError(
                    400,
                    f"response_format.json_schema.{name} must be of the type {kind_of.__name__}, "
                    f"got {shown(told[name])}",
                    param="response_format",
                )
        if isinstance(schema, Mapping) and set(told) <= {"schema", *ABOUT_SCHEMA}:
            return {"json": schema}
    raise ApiError(
        400,
        'response_format must have the type "text", "json_object", or "json_schema" with '
        f"json_schema.schema, got {shown(response_format)}",
        param="response_format",
    )


class Signature(NamedTuple):
    """One function that may be called; without parameters it takes none."""

    name: str
    parameters: Mapping[str, Any] | None
    is_enforced: bool  # the arguments follow the schema; else they are any object


def call_rules(
    functions: Sequence[Signature],
    is_forced: bool,
    is_one: bool,
    form: Mapping[str, Any] | None,
    is_behind_thoughts: bool,
) -> str:
    """An answer that calls functions, as `ChatParser` reads it.

    Args:
        is_forced: it is nothing but calls; else words may stand before, between and behind them.
        is_one: one call at most, and nothing behind it.
        form: what the words follow that stand there instead of calls.
        is_behind_thoughts: words that begin like thoughts are none.
    """
    spoken = rf" & ~/{BLANK}*{THINK}(.|\n)*/" if is_behind_thoughts else ""
    calls = "call" if is_one else "call (blank call)*"
    if is_forced:
        answer = calls
    elif form is not None:
        answer = f"{calls} | {_rule(form)}"
    else:
        answer = "WORDS | opened" if is_one else "opened* WORDS"
    names = [f"function_{index}" for index in range(len(functions))]
    rules = [
        f"answer: {answer}",
        f"call: {_text(CALL)} called",
        "opened: opening called",
        "opening[lazy]: OPENING",
        f"OPENING: /(.|\\n)*{CALL}/{spoken}",
        f"WORDS: /(.|\\n)*/{spoken}",
        f"blank: /{BLANK}{{0,4}}/",
        f'called: "\\n" ({" | ".join(names)}) {_text(chr(10) + END_CALL)}',
        *(f"{name}: {_call(one)}" for name, one in zip(names, functions, strict=True)),
    ]
    return "\n".join(rules) + "\n" + ("" if is_forced or form is None else _terminals(form))


def whole(rules: str) -> Mapping[str, Any]:
    """Rules as `structured_outputs` of `SamplingParams`."""
    return {"grammar": f"start: answer\n{rules}"}


def behind_thoughts(rules: str, is_thinking: bool) -> Mapping[str, Any]:
    """Rules of an answer that may think first, or that has already begun to."""
    begin = "" if is_thinking else f"{BLANK}{{0,4}}{THINK}"
    start = "thoughts pause answer" if is_thinking else "(thoughts pause)? answer"
    return {
        "grammar": f"start: {start}\n"
        f"thoughts[lazy]: /{begin}{THOUGHTS}/\n"
        f"pause: /{BLANK}{{0,4}}/\n"
        f"{rules}"
    }


def answer_rules(form: Mapping[str, Any]) -> str | None:
    """Rules of an answer in this form of `structured_outputs`.

    None for a grammar in Lark's notation: whoever writes one can name the thoughts.
    """
    return None if "grammar" in form else f"answer: {_rule(form)}\n{_terminals(form)}"


def _rule(form: Mapping[str, Any]) -> str:
    [(kind, value)] = form.items()
    if kind == "regex":
        return "/" + ESCAPED.sub(lambda found: ENDS.get(found[1], found[0]), value) + "/"
    if kind == "choice":
        return "CHOICE"
    return _json(OBJECT if kind == "json_object" else value)


def _terminals(form: Mapping[str, Any]) -> str:
    return choice_rule(form["choice"]) if "choice" in form else ""


def _json(schema: Any) -> str:
    schema = checked_schema(schema)
    options = JSON_OPTIONS | dict(schema.get("x-guidance", {}))
    try:
        return "%json " + json.dumps(schema | {"x-guidance": options})
    except (ValueError, RecursionError, TypeError) as error:
        raise SamplingError(f"structured_outputs.json is no JSON: {error}") from error


def _call(function: Signature) -> str:
    given = NO_PARAMETERS if function.parameters is None else OBJECT | dict(function.parameters)
    begin = f'{{"name": {_text(function.name)}, "arguments": '
    return f"{_text(begin)} {_json(given if function.is_enforced else OBJECT)} {_text('}')}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
