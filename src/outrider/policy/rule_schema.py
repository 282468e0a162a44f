"""The JSON Schema of a policy, made of the tables that reading one goes by."""

from typing import Any

from outrider.checks import INT32_MAX
from outrider.policy.rule_document import (
    BOOLEANS,
    COMPARISONS,
    MAX_RULES,
    NUMBERS,
    SHARE,
    TEXTS,
    VERSION,
)

TEXT = {"type": "string"}
LIST = {"type": "array", "items": TEXT}


def policy_schema() -> dict[str, Any]:
    """Draft 2020-12; for editors, and for those who write policies by program."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "outrider policy",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "rules"],
        "properties": {
            "version": {"const": VERSION},
            "about": TEXT,
            "rules": {"type": "array", "maxItems": MAX_RULES, "items": _rule()},
        },
    }


def _rule() -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["then"],
        "properties": {
            "name": TEXT,
            "about": TEXT,
            "when": {"type": "object", "additionalProperties": False, "properties": _facts()},
            "then": {
                "type": "object",
                "additionalProperties": False,
                "minProperties": 1,
                "properties": {
                    "sources": LIST,
                    "forbid": LIST,
                    "num_draft_tokens": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
                },
            },
            "last": {"type": "boolean"},
        },
    }


def _facts() -> dict[str, Any]:
    return {
        **{fact: _number(*limits) for fact, limits in NUMBERS.items()},
        **{fact: {"anyOf": [TEXT, LIST]} for fact in TEXTS},
        **{fact: {"type": "boolean"} for fact in BOOLEANS},
        "health": {"type": "object", "additionalProperties": _number(*SHARE)},
    }


def _number(low: float, high: float) -> dict[str, Any]:
    value = {"type": "number", "minimum": low, "maximum": high}
    comparisons = {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": dict.fromkeys(COMPARISONS, value),
    }
    return {"anyOf": [value, comparisons]}
