"""What a soak sends: chats whose plain text is known, and all that clients do wrong."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from load import CHAT, Reply, call

from outrider import LLM, SamplingParams
from outrider.bench.workload import DEFAULT_WORKLOAD, read_workload

MAX_BODY_BYTES = 65536  # of the server
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
MALFORMED: tuple[bytes | dict[str, Any], ...] = (
    *(b"", b"{", b"[]", b"\xff\xfe{}", b'{"messages": NaN}', b"[" * 5000),
    *({"messages": 5}, {"messages": []}, HI | {"nothing": 1}, HI | {"temperature": -1}),
    *(HI | {"n": 10**6}, HI | {"seed": 2**70}, HI | {"stop": [""]}, HI | {"tool_choice": "x"}),
    *(HI | {"response_format": {"type": "x"}}, HI | {"speculative": ["nobody"]}),
    HI | {"messages": [{"role": "user", "content": "too long " * 6000}]},
)
POLICIES: tuple[dict[str, Any], ...] = (
    {"version": 1, "rules": []},
    {"version": 1, "rules": [{"name": "short", "when": {}, "then": {"num_draft_tokens": 2}}]},
    {"version": 1, "rules": [{"name": "some", "when": {}, "then": {"forbid": ["lookup"]}}]},
    {"version": 1, "rules": [{"name": "plain", "when": {"tag": "b"}, "then": {"sources": []}}]},
)
# How often each kind comes, in a hundred calls that do work, and what it is answered with.
KINDS = {"streamed": 80, "whole": 8, "left": 8, "gone": 4}
# 0: hung up on; 429: a busy server reads no prompts.
FAULTS = {"malformed": (400, 429), "oversized": (413, 0), "unknown": (404,)}


@dataclass(frozen=True, slots=True)
class Case:
    """A chat and the text that it has when it is decoded plainly and alone."""

    body: dict[str, Any]
    text: str
    num_tokens: int


@dataclass(slots=True)
class Outcome:
    """What became of one call. Times are seconds; `sent` is of `time.perf_counter`."""

    kind: str
    sent: float
    status: int
    fault: str = ""  # what is wrong with the answer
    num_tokens: int = 0  # of an answer that is whole
    first: float = 0.0  # to the first token, of a stream
    seconds: float = 0.0  # to the last
    gaps: list[float] = field(default_factory=list)  # between tokens that did not come together

    @property
    def is_whole(self) -> bool:
        return self.num_tokens > 0


def make_cases(count: int) -> list[Case]:
    """Chats of every kind, greedy and sampled, with stops, penalties and schemas."""
    llm = LLM(speculative_config=None, max_num_seqs=1, enable_prefix_caching=False)
    prompts = read_workload([DEFAULT_WORKLOAD], (), count).prompts
    cases = []
    for number in range(count):
        conversation = prompts[number % len(prompts)].conversation
        body = _settings(number)
        form = body.get("response_format")
        given = {name: value for name, value in body.items() if name != "response_format"}
        if form is not None:
            given["structured_outputs"] = {"json": form["json_schema"]["schema"]}
        [output] = llm.chat(conversation, SamplingParams(**given))
        told = output.outputs[0]
        cases.append(Case({"messages": conversation} | body, told.text, len(told.token_ids)))
    return cases


def _settings(number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": (24, 48, 64, 96)[number % 4], "seed": number}
    body["temperature"] = (0.0, 0.8, 1.0)[number % 3]
    if number % 5 == 1:
        body |= {"stop": ["\n\n", "."], "top_p": 0.9}
    elif number % 5 == 2:
        body |= {"frequency_penalty": 0.5, "logit_bias": {28: -5}}
    elif number % 10 == 3:
        schema = {"name": "thing", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


class Caller:
    """Makes calls and judges the answers; `has_ranks`: some calls come before others."""

    def __init__(self, port: int, cases: Sequence[Case], seed: int, has_ranks: bool) -> None:
        self._has_ranks = has_ranks
        self._port = port
        self._cases = cases
        self._random = random.Random(seed)

    async def work(self) -> Outcome:
        """A call that the engine works for."""
        kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
        case = self._random.choice(self._cases)
        stop_after = {"left": self._random.uniform(0.05, 1.0), "gone": 0.0}.get(kind)
        body = case.body | self._terms() | {"stream": kind != "whole"}
        reply = await call(self._port, CHAT, body, stop_after=stop_after)
        outcome = Outcome(kind, reply.sent, reply.status)
        if reply.status == 429:
            outcome.fault = "" if "retry-after" in reply.headers else "a 429 without Retry-After"
        elif stop_after is not None and not reply.is_whole:
            outcome.fault = "" if reply.status in (0, 200) else f"status {reply.status}"
        else:
            _judge(outcome, case, reply)
        return outcome

    async def fault(self) -> Outcome:
        """A call that has to be refused."""
        kind = self._random.choice(list(FAULTS))
        path = CHAT if kind != "unknown" else "/v1/nothing"
        body = self._random.choice(MALFORMED) if kind == "malformed" else HI
        if kind == "oversized":
            body = HI | {"user": "x" * 2 * MAX_BODY_BYTES}
        reply = await call(self._port, path, body)
        outcome = Outcome(kind, reply.sent, reply.status)
        if reply.status not in FAULTS[kind]:
            outcome.fault = f"status {reply.status} for {str(body)[:80]}"
        elif reply.status and set(reply.body() or ()) != {"error"}:
            outcome.fault = f"no envelope for {str(body)[:80]}"
        return outcome

    def _terms(self) -> dict[str, Any]:
        """How it is served, which changes no text."""
        pick = self._random.choice
        terms: dict[str, Any] = {"tag": pick("ab"), "kind": pick(["chat", "code"])}
        terms |= pick([{}, {}, {"speculative": False}, {"speculative": 3}])
        ranks = [{}, {}, {}, {"priority": 1}, {"deadline": 5.0}]
        return terms | (pick(ranks) if self._has_ranks else {})


def _judge(outcome: Outcome, case: Case, reply: Reply) -> None:
    """Compare an answer that should be whole with the text that it must have."""
    if reply.status != 200 or not reply.is_whole:
        outcome.fault = f"status {reply.status}, {'whole' if reply.is_whole else 'cut off'}"
        return
    if outcome.kind == "whole":
        text = (reply.body() or {}).get("choices", [{}])[0].get("message", {}).get("content")
    else:
        events = reply.events()
        choices = [one["choices"][0] for _, one in events if one.get("choices")]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        times = sorted({time for time, _ in events})
        outcome.first = times[0] - reply.sent if times else 0.0
        outcome.gaps = [b - a for a, b in pairwise(times)]
        if errors := [one["error"] for _, one in events if "error" in one]:
            outcome.fault = f"an error in a stream: {json.dumps(errors[0])}"
            return
    outcome.seconds = reply.pieces[-1][0] - reply.sent
    outcome.num_tokens = case.num_tokens
    if text != case.text:
        outcome.fault = f"wrong text: {text!r} instead of {case.text!r}"
