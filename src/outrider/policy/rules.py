"""Rules of a JSON policy: who may draft when, and how many tokens at most. Never which token.

The planner asks `RuleSet.restrict(request, load)` once per drafting request and step, with the
`RequestFacts` and `LoadFacts` of outrider.policy.restrict; all requests of a step are asked with
the same load object. Every rule whose conditions all hold applies, in the order of the document,
up to one that says it is the last. Rules only ever narrow: of several lists of sources those in
all of them may draft, what any rule forbids is forbidden, and the smallest number of tokens counts.

docs/policy.md describes the document; rule_document.py reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from outrider.policy.restrict import EVERYTHING, Allowed, LoadFacts, RequestFacts

Test = Callable[[Any], bool]  # of the facts of a request, or of the load

HEALTHY = 1.0  # of a source that the load does not list
LOAD_FACTS = ("batch_size", "num_waiting", "kv_usage", "memory_usage", "health")
# Relation -> what an explanation calls it.
RELATIONS = {
    "above": "above",
    "at_least": "at least",
    "below": "below",
    "at_most": "at most",
    "is": "",
    "one_of": "one of",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a fact with a value that the document gives."""

    fact: str  # a field of RequestFacts or LoadFacts
    relation: str  # a key of RELATIONS
    value: Any  # of "one_of" a tuple
    source: str = ""  # of "health"

    @property
    def is_of_load(self) -> bool:
        return self.fact in LOAD_FACTS

    @property
    def name(self) -> str:
        return f"{self.fact}.{self.source}" if self.fact == "health" else self.fact

    def get(self, facts: RequestFacts | LoadFacts) -> Any:
        """The fact that is compared."""
        found = getattr(facts, self.fact)
        return found.get(self.source, HEALTHY) if self.fact == "health" else found

    def test(self) -> Test:
        """The comparison as a function of the facts, as fast as Python can."""
        get = _health_of(self.source) if self.fact == "health" else attrgetter(self.fact)
        return _comparison(get, self.relation, self.value)

    def __str__(self) -> str:
        return f"{RELATIONS[self.relation]} {_shown(self.value)}".lstrip()


def _health_of(source: str) -> Callable[[Any], Any]:
    return lambda facts: facts.health.get(source, HEALTHY)


def _comparison(get: Callable[[Any], Any], relation: str, value: Any) -> Test:
    tests: dict[str, Test] = {
        "above": lambda facts: get(facts) > value,
        "at_least": lambda facts: get(facts) >= value,
        "below": lambda facts: get(facts) < value,
        "at_most": lambda facts: get(facts) <= value,
        "is": lambda facts: get(facts) == value,
        "one_of": lambda facts: get(facts) in value,
    }
    return tests[relation]


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds, and what follows from it."""

    name: str
    conditions: tuple[Condition, ...] = ()  # all of them; none: always
    allowed: Allowed = EVERYTHING
    is_last: bool = False  # no rule behind it is looked at when it applies


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one rule applies to given facts, or does not."""

    rule: Rule
    applies: bool
    reason: str  # "" where it applies


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a policy makes of given facts."""

    verdicts: list[Verdict]
    allowed: Allowed

    @property
    def applied(self) -> list[str]:
        return [verdict.rule.name for verdict in self.verdicts if verdict.applies]


@dataclass(slots=True)
class _Compiled:
    """One rule for the hot path."""

    index: int
    load_tests: list[Test]
    request_tests: list[Test]
    is_last: bool


@dataclass(slots=True)
class RuleSet:
    """Rules in their order; answers are remembered, so that equal ones are one object."""

    rules: Sequence[Rule] = ()
    _compiled: list[_Compiled] = field(init=False, repr=False)
    _load: LoadFacts | None = field(init=False, default=None, repr=False)
    _under_load: list[_Compiled] = field(init=False, default_factory=list, repr=False)
    _answers: dict[tuple[int, ...], Allowed] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._compiled = [
            _Compiled(
                index,
                [condition.test() for condition in rule.conditions if condition.is_of_load],
                [condition.test() for condition in rule.conditions if not condition.is_of_load],
                rule.is_last,
            )
            for index, rule in enumerate(self.rules)
        ]

    def restrict(self, request: RequestFacts, load: LoadFacts) -> Allowed:
        """What the rules leave for a request; 1 to 5 µs with twenty rules."""
        if load is not self._load:
            self._under_load = [
                rule for rule in self._compiled if all(test(load) for test in rule.load_tests)
            ]
            self._load = load
        applied: list[int] = []
        for rule in self._under_load:
            for test in rule.request_tests:
                if not test(request):
                    break
            else:
                applied.append(rule.index)
                if rule.is_last:
                    break
        key = tuple(applied)
        answer = self._answers.get(key)
        if answer is None:
            answer = narrowed([self.rules[index].allowed for index in applied])
            self._answers[key] = answer
        return answer

    def explain(self, request: RequestFacts, load: LoadFacts) -> Explanation:
        """Which rules apply to these facts and why the others do not; for a dry run."""
        verdicts: list[Verdict] = []
        ended_by = ""
        for rule in self.rules:
            reason = f"{ended_by} is the last" if ended_by else ""
            for condition in () if ended_by else rule.conditions:
                facts = load if condition.is_of_load else request
                if not condition.test()(facts):
                    found = _shown(condition.get(facts))
                    reason = f"{condition.name} is {found}, expected {condition}"
                    break
            verdicts.append(Verdict(rule, not reason, reason))
            if not reason and rule.is_last:
                ended_by = rule.name
        return Explanation(verdicts, narrowed([v.rule.allowed for v in verdicts if v.applies]))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return repr(list(value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def narrowed(parts: Sequence[Allowed]) -> Allowed:
    """What all of these leave together."""
    lists = [part.sources for part in parts if part.sources is not None]
    sources = lists[0] if lists else None
    for other in lists[1:]:
        sources = tuple(name for name in sources or () if name in other)
    bounds = [part.num_draft_tokens for part in parts if part.num_draft_tokens is not None]
    forbidden = frozenset[str]().union(*(part.forbidden for part in parts))
    return Allowed(sources, min(bounds, default=None), forbidden)


def shown_allowed(allowed: Allowed) -> dict[str, Any]:
    """`Allowed` as JSON: null where nothing is said."""
    return {
        "sources": None if allowed.sources is None else list(allowed.sources),
        "forbid": sorted(allowed.forbidden),
        "num_draft_tokens": allowed.num_draft_tokens,
    }


def shown_explanation(explanation: Explanation) -> dict[str, Any]:
    """`Explanation` as JSON."""
    return {
        "rules": [
            {
                "name": v.rule.name,
                "applies": v.applies,
                **({"why_not": v.reason} if v.reason else {}),
            }
            for v in explanation.verdicts
        ],
        "allowed": shown_allowed(explanation.allowed),
    }
