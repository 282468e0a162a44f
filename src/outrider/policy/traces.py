"""What every source would have drafted at every place of some texts, to try plans on.

A trace is recorded while the target decodes plainly, token by token, and all sources are asked
each time: whatever a plan does later, at each place it may come to the drafts are known, and so is
the text. One JSON line per request, after one line with what calls cost.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider.drafting.source import Draft, DraftSource
from outrider.errors import DataError
from outrider.policy.fixed import FixedLength
from outrider.policy.gains import CallCost
from outrider.policy.view import Ask, StepView, cap
from outrider.writing import whole_file


@dataclass(slots=True)
class RequestTrace:
    """One text and the drafts that were offered at each of its places."""

    kind: str
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)  # output
    # By output place (tokens written before), the draft of each source that had one.
    drafts: list[dict[str, Draft]] = field(default_factory=list)


class CallSeconds(NamedTuple):
    """What a call of a source takes."""

    base: float = 0.0
    per_request: float = 0.0
    per_token: float = 0.0  # of text that is new to it

    def of(self, num_requests: int, new_tokens: int) -> float:
        """Of one call."""
        return self.base + self.per_request * num_requests + self.per_token * new_tokens


@dataclass(slots=True)
class Trace:
    """Texts with their drafts, and what calls take by source."""

    requests: list[RequestTrace]
    calls: dict[str, CallSeconds]

    def write(self, path: Path) -> None:
        """Keep it as JSON lines."""
        with whole_file(path) as file:
            file.write((json.dumps({"calls": self.calls}) + "\n").encode())
            for request in self.requests:
                file.write((json.dumps(_as_json(request)) + "\n").encode())


def read_trace(path: Path) -> Trace:
    """What `Trace.write` wrote.

    Raises:
        DataError: the file cannot be read, or a line of it is no part of a trace.
    """
    number = 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        number = 1
        calls = {
            name: CallSeconds(*map(float, seconds))
            for name, seconds in json.loads(lines[0])["calls"].items()
        }
        trace = Trace([], calls)
        for line in lines[1:]:
            number += 1
            trace.requests.append(_request(json.loads(line)))
        return trace
    except OSError as error:
        raise DataError(f"the trace {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError) as error:
        raise DataError(f"line {number} of {path} is no part of a trace: {error!r}") from error


class Recorder(FixedLength):
    """A `Policy` of plain decoding under which every source is asked at each place."""

    def __init__(self) -> None:
        super().__init__()
        self._requests: dict[str, RequestTrace] = {}
        self._costs: dict[str, CallCost] = {}
        self._lengths: dict[tuple[str, str], int] = {}  # of texts when sources last saw them
        self._new_tokens = 0

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        budgets = [cap(ask, source) for ask in view.asks]
        self._new_tokens = 0
        for ask, budget in zip(view.asks, budgets, strict=True):
            if budget:
                key = source.name, ask.request_id
                self._new_tokens += ask.length - self._lengths.get(key, 0)
                self._lengths[key] = ask.length
        return budgets

    def choose(self, view: StepView) -> list[Draft]:
        return [Draft() for _ in view.asks]

    def observe(self, ask: Ask, submitted: Draft, true_ids: Sequence[int]) -> None:
        """Keep the drafts of this place, and the token that came."""
        request = self._requests.setdefault(ask.request_id, RequestTrace(ask.kind, 0))
        request.drafts.append({draft.source: draft for draft in ask.drafts})
        request.token_ids += true_ids

    def observe_call(self, name: str, num_requests: int, seconds: float) -> None:
        cost = self._costs.setdefault(name, CallCost())
        cost.observe(num_requests, seconds, self._new_tokens)

    def trace(self, num_prompt_tokens: dict[str, int]) -> Trace:
        """What was recorded of these requests; each has the tokens of its prompt."""
        for name, count in num_prompt_tokens.items():
            if name in self._requests:
                self._requests[name].num_prompt_tokens = count
        calls = {
            name: CallSeconds(cost.base, cost.per_request, cost.per_token)
            for name, cost in self._costs.items()
        }
        return Trace(
            [self._requests[name] for name in num_prompt_tokens if name in self._requests], calls
        )


def synthetic(num_requests: int, num_tokens: int, seed: int = 0) -> Trace:
    """A trace of invented texts of three kinds, for tests and for timing plans.

    "copy" costs nothing and knows edits for long stretches, "guess" costs a call and knows
    something of all but random text. Confidences are right on average.
    """
    rng = random.Random(seed)
    kinds = {"edit": (0.95, 0.6), "chat": (0.25, 0.7), "random": (0.03, 0.05)}
    requests = []
    for index in range(num_requests):
        kind, rates = list(kinds.items())[index % len(kinds)]
        text = [rng.randrange(50_000) for _ in range(num_tokens + 16)]
        request = RequestTrace(kind, 200 + rng.randrange(400), text[:num_tokens])
        for place in range(num_tokens):
            request.drafts.append(
                {
                    name: _invented(rng, text[place : place + most], rate, name)
                    for (name, most), rate in zip((("copy", 16), ("guess", 7)), rates, strict=True)
                }
            )
        requests.append(request)
    return Trace(requests, {"copy": CallSeconds(4e-6, 2e-6), "guess": CallSeconds(8e-4, 1.5e-4)})


def _invented(rng: random.Random, true: list[int], rate: float, source: str) -> Draft:
    """A chain of which each token is right as often as its confidence says, if those before are."""
    confidence = [min(0.98, max(0.02, rng.gauss(rate, 0.1))) for _ in true]
    tokens = [t if rng.random() < c else 50_000 for t, c in zip(true, confidence, strict=True)]
    return Draft(tokens, confidence=confidence, source=source)


def _as_json(request: RequestTrace) -> dict[str, Any]:
    return {
        "kind": request.kind,
        "num_prompt_tokens": request.num_prompt_tokens,
        "token_ids": request.token_ids,
        "drafts": [
            {
                name: [draft.token_ids, draft.parents, [round(c, 4) for c in draft.confidence]]
                for name, draft in drafts.items()
            }
            for drafts in request.drafts
        ],
    }


def _request(found: dict[str, Any]) -> RequestTrace:
    request = RequestTrace(
        str(found["kind"]), int(found["num_prompt_tokens"]), [int(t) for t in found["token_ids"]]
    )
    for drafts in found["drafts"]:
        place = {
            name: Draft(tokens, parents, None, confidence, name)
            for name, (tokens, parents, confidence) in drafts.items()
        }
        for draft in place.values():
            draft.check()
        request.drafts.append(place)
    return request
