"""Reads a JSON policy; what is wrong is told with its place, as in ``$.rules[2].when.kv_usage``.

{"version": 1,
 "rules": [{"name": "short drafts under load",
            "when": {"batch_size": {"at_least": 8}, "kind": ["chat", "maths"]},
            "then": {"forbid": ["remote drafts"], "num_draft_tokens": 4},
            "last": false}]}
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from outrider.checks import (
    INT32_MAX,
    boolean,
    integer,
    number,
    shown,
    too_long_integer,
    unique_keys,
)
from outrider.errors import ConfigError
from outrider.policy.restrict import Allowed, LoadFacts, RequestFacts
from outrider.policy.rules import LOAD_FACTS, Condition, Rule, RuleSet

VERSION = 1  # of the schema
MAX_RULES = 100
MAX_BYTES = 1 << 20
COUNT = (0.0, float(INT32_MAX))
SHARE = (0.0, 1.0)
# Fact -> lowest and highest; names are those of RequestFacts and LoadFacts.
NUMBERS: dict[str, tuple[float, float]] = {
    "context_len": COUNT,
    "num_output_tokens": COUNT,
    "priority": (-float(INT32_MAX), float(INT32_MAX)),
    "batch_size": COUNT,
    "num_waiting": COUNT,
    "kv_usage": SHARE,
    "memory_usage": SHARE,
}
TEXTS = ("tag", "kind", "owner")
BOOLEANS = ("has_prediction",)
COMPARISONS = ("above", "at_least", "below", "at_most")
PLAIN: dict[str, Any] = {"version": VERSION, "rules": []}  # the policy that leaves everything


def read_json(text: str | bytes, what: str = "the policy") -> Any:
    """The JSON document in a text, its content not yet checked.

    Raises:
        ConfigError: no JSON; a key given twice; NaN or infinity; larger than 1 MiB.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{what} must have at most {MAX_BYTES} bytes, got {len(text)}")
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_constant)
    except ConfigError as error:  # of the two hooks
        raise ConfigError(f"{what} {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} is nested too deeply") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{what} is no JSON: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{what} {too_long_integer()}") from error


def load_policy(path: Path) -> Any:
    """The JSON document in a file; raises as `read_json`, and for what cannot be opened."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror}") from error
    return read_json(text, f"the policy {path}")


def compile_policy(document: Any, source_names: Collection[str] | None = None) -> RuleSet:
    """The rules of a document.

    Args:
        source_names: all that there are: others are refused; None: not known, any name passes.

    Raises:
        ConfigError: names the place in the document, what stands there, and what was expected.
    """
    root = _object(document, "$", {"version", "rules", "about"}, {"version", "rules"})
    if integer("$.version", root["version"], 0) != VERSION:
        raise ConfigError(f"$.version must be {VERSION}, got {root['version']}")
    _text(root.get("about", ""), "$.about")
    rules = _list(root["rules"], "$.rules", MAX_RULES)
    known = None if source_names is None else frozenset(source_names)
    return RuleSet([_rule(rule, f"$.rules[{i}]", i, known) for i, rule in enumerate(rules)])


def read_facts(given: Any, place: str = "$") -> tuple[RequestFacts, LoadFacts]:
    """Facts for a dry run, all in one object; those that are not given have their defaults.

    Raises:
        ConfigError: an unknown fact or an impossible value, with its place.
    """
    facts = _object(given, place, {*NUMBERS, *TEXTS, *BOOLEANS, "health"})
    values = {name: _fact(name, value, f"{place}.{name}") for name, value in facts.items()}
    of_load = {name: value for name, value in values.items() if name in LOAD_FACTS}
    of_request = {name: value for name, value in values.items() if name not in LOAD_FACTS}
    return RequestFacts(**of_request), LoadFacts(**of_load)


def _fact(name: str, value: Any, place: str) -> Any:
    if name == "health":
        shares = _object(value, place).items()
        return {source: number(f"{place}.{source}", share, *SHARE) for source, share in shares}
    if name in NUMBERS:
        return _number(value, place, name)
    return boolean(place, value) if name in BOOLEANS else _text(value, place)


def _rule(given: Any, place: str, index: int, known: frozenset[str] | None) -> Rule:
    rule = _object(given, place, {"name", "about", "when", "then", "last"}, {"then"})
    _text(rule.get("about", ""), f"{place}.about")
    return Rule(
        name=_text(rule.get("name", f"rule {index}"), f"{place}.name"),
        conditions=tuple(_conditions(rule.get("when", {}), f"{place}.when", known)),
        allowed=_effect(rule["then"], f"{place}.then", known),
        is_last=boolean(f"{place}.last", rule.get("last", False)),
    )


def _conditions(given: Any, place: str, known: frozenset[str] | None) -> list[Condition]:
    found: list[Condition] = []
    for fact, value in _object(given, place, {*NUMBERS, *TEXTS, *BOOLEANS, "health"}).items():
        at = f"{place}.{fact}"
        if fact in NUMBERS:
            found += _comparisons(value, at, fact)
        elif fact in TEXTS and isinstance(value, str):
            found.append(Condition(fact, "is", value))
        elif fact in TEXTS:
            found.append(Condition(fact, "one_of", _names(value, at, "text or a list of texts")))
        elif fact in BOOLEANS:
            found.append(Condition(fact, "is", boolean(at, value)))
        else:
            for source, wanted in _object(value, at).items():
                _check_source(source, f"{at}.{source}", known)
                found += _comparisons(wanted, f"{at}.{source}", fact, source)
    return found


def _comparisons(given: Any, place: str, fact: str, source: str = "") -> list[Condition]:
    if not isinstance(given, Mapping):
        return [Condition(fact, "is", _number(given, place, fact), source)]
    if not given:
        raise ConfigError(f"{place} must hold one of {', '.join(COMPARISONS)}, got {{}}")
    return [
        Condition(fact, relation, _number(value, f"{place}.{relation}", fact), source)
        for relation, value in _object(given, place, set(COMPARISONS)).items()
    ]


def _effect(given: Any, place: str, known: frozenset[str] | None) -> Allowed:
    effect = _object(given, place, {"sources", "forbid", "num_draft_tokens"})
    if not effect:
        raise ConfigError(f"{place} must hold sources, forbid or num_draft_tokens, got {{}}")
    named = {}
    for key in ("sources", "forbid"):
        if key in effect:
            names = _names(effect[key], f"{place}.{key}", "a list of names of sources")
            for i, name in enumerate(names):
                _check_source(name, f"{place}.{key}[{i}]", known)
            named[key] = names
    most = effect.get("num_draft_tokens")
    if "num_draft_tokens" in effect:
        most = integer(f"{place}.num_draft_tokens", most, 0, INT32_MAX)
    return Allowed(named.get("sources"), most, frozenset(named.get("forbid", ())))


def _check_source(name: str, place: str, known: frozenset[str] | None) -> None:
    if known is not None and name not in known:
        listed = ", ".join(sorted(known)) or "there are none"
        raise ConfigError(f"{place}: no source is called {shown(name)}; sources: {listed}")


def _number(value: Any, place: str, fact: str) -> float:
    return number(place, value, *NUMBERS.get(fact, SHARE))


def _object(
    value: Any, place: str, keys: Collection[str] | None = None, needed: Collection[str] = ()
) -> Mapping[str, Any]:
    """The value as an object with these keys and no others; None: any."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{place} must be an object, got {shown(value)}")
    unknown = [key for key in value if keys is not None and key not in keys]
    if unknown:
        expected = ", ".join(sorted(keys or ()))
        raise ConfigError(f"{place} has the unknown key {shown(unknown[0])}, expected {expected}")
    missing = [key for key in needed if key not in value]
    if missing:
        raise ConfigError(f"{place} lacks the key {sorted(missing)[0]!r}")
    return value


def _list(value: Any, place: str, most: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{place} must be a list, got {shown(value)}")
    if len(value) > most:
        raise ConfigError(f"{place} holds {len(value)} entries, at most {most}")
    return list(value)


def _names(value: Any, place: str, expected: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{place} must be {expected}, got {shown(value)}")
    return tuple(_text(name, f"{place}[{i}]") for i, name in enumerate(value))


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{place} must be text, got {shown(value)}")
    return value


def _constant(name: str) -> NoReturn:
    raise ConfigError(f"holds {name}, which is no JSON number")
