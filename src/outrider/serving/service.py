"""What the endpoints do: read a call, submit it, answer whole or in events."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from outrider.checks import integer, shown
from outrider.errors import ConfigError, MissingDependency, UserError
from outrider.grammar import TRIAL
from outrider.llm import LLM
from outrider.policy.live import PolicyFile
from outrider.prompts import Submission
from outrider.results import RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.serving import chat, policy
from outrider.serving.answers import Answer, ChatAnswer, CompletionAnswer, new_id
from outrider.serving.cores import spread_threads
from outrider.serving.errors import ApiError, failed, out_of_order, refused, to_event
from outrider.serving.http import (
    EventStream,
    JSONBody,
    gone,
    parse_json,
    read_body,
    while_wanted,
)
from outrider.serving.limits import Keys, Limits
from outrider.serving.metrics import Metrics, Watch
from outrider.serving.numbers import request_metrics, usage
from outrider.serving.parsers import REASONING_PARSERS
from outrider.serving.protocol import Call, ChatCall, CompletionCall, parse
from outrider.serving.snapshot import shown_decision, snapshot
from outrider.serving.structure import behind_thoughts
from outrider.serving.trace import Trace
from outrider.serving.worker import EngineFailure, Item, Ticket, Worker
from outrider.target.base import PAGE_SIZE
from outrider.terms import Terms

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

NUM_FORM_READERS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server serves.

    Raises:
        ConfigError: a value that cannot be; the message names it.
    """

    api_keys: Sequence[str] = ()
    served_model_name: str | None = None  # default: the model's own
    max_body_bytes: int = 8 << 20
    max_waiting: int | None = None  # choices; default: as many as may run
    max_calls_per_key: int | None = None
    reasoning_parser: str | None = None
    includes_metrics: bool = False  # also for calls that do not ask for them
    trace: Path | None = None  # of steps, in Chrome's format
    admin_keys: Sequence[str] = ()  # that may change the policy, default: all; and see all requests
    policy: Path | None = None  # reloaded when it changes
    owns_cpus: bool = False  # threads may be bound to CPUs, also those of the kernels

    def __post_init__(self) -> None:
        integer("max_body_bytes", self.max_body_bytes, 1)
        if self.max_waiting is not None:
            integer("max_waiting", self.max_waiting, 0)
        if self.max_calls_per_key is not None:
            integer("max_calls_per_key", self.max_calls_per_key, 1)
        for key in (*self.api_keys, *self.admin_keys):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key must be printable ASCII without spaces")
        if self.reasoning_parser not in (None, *REASONING_PARSERS):
            raise ConfigError(
                f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, "
                f"got {shown(self.reasoning_parser)}"
            )


class Service:
    """One model behind the endpoints.

    Raises:
        ConfigError: the file of the policy cannot be read or holds none.
    """

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self.model = settings.served_model_name or llm.target.name
        self.created = int(time.time())
        self.keys = Keys([*settings.api_keys, *settings.admin_keys] if settings.api_keys else [])
        self.admin_keys = Keys(settings.admin_keys or settings.api_keys)
        self._overseers = Keys(settings.admin_keys)
        path = settings.policy
        self.policy_file = None if path is None else PolicyFile(path, llm.rules)
        if self.policy_file is not None:
            self.policy_file.reload()
        self._watching: asyncio.Task[None] | None = None
        running = llm.engine.scheduler.max_requests
        waiting = running if settings.max_waiting is None else settings.max_waiting
        self.limits = Limits(running, waiting, settings.max_calls_per_key)
        self.metrics = Metrics(llm.engine, self.model)
        self.trace = None if settings.trace is None else Trace(settings.trace, llm.engine)
        self.worker = Worker(
            llm.engine,
            None if self.trace is None else self.trace.step,
            spread_threads if settings.owns_cpus else None,
        )
        # Grammars take seconds in the worst case: calls without one never wait for them.
        self._form_readers = ThreadPoolExecutor(NUM_FORM_READERS, "forms")
        self.is_draining = False

    def start(self) -> None:
        """Begin to serve, in the event loop that does."""
        self.worker.start()
        if self.policy_file is not None:
            self._watching = asyncio.create_task(policy.watch(self.policy_file))
        logger.info("serving", extra={"record": self._about()})

    def _about(self) -> dict[str, Any]:
        """What an operator wants to see of it at the start."""
        engine = self.llm.engine
        return {
            "model": self.model,
            "sources": [source.name for source in engine.speculation.sources],
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.scheduler.max_requests,
            "kv_cache_tokens": engine.arena.num_pages * PAGE_SIZE,
        }

    def drain(self) -> None:
        """Take no more calls; those under way go on."""
        self.is_draining = True

    def stop(self) -> None:
        """End; what is unfinished is aborted."""
        if self._watching is not None:
            self._watching.cancel()
        TRIAL.interrupt()
        self._form_readers.shutdown(wait=False, cancel_futures=True)
        self.worker.stop()
        if self.trace is not None:
            self.trace.close()

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        call = parse(CompletionCall, await self._body(request))
        answer = CompletionAnswer(call, self.model, new_id("cmpl"))
        return await self._answer(request, call, answer, len(_read(lambda: call.listed, call)))

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        call = parse(ChatCall, await self._body(request))
        answer = ChatAnswer(call, self.model, new_id("chatcmpl"))
        answer.reads_thoughts = self.settings.reasoning_parser is not None
        return await self._answer(request, call, answer, 1)

    def models(self) -> dict[str, Any]:
        """`/v1/models`."""
        model = {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "outrider",
            "max_model_len": self.llm.engine.max_model_len,
        }
        return {"object": "list", "data": [model]}

    async def decisions(self, owner: str) -> list[dict[str, Any]]:
        """The planner's newest decisions, oldest first; none from a policy that keeps none."""
        planner, viewer = self.llm.engine.planner, self._viewer(owner)
        found = await self.worker.ask(lambda: getattr(planner, "decisions", []))
        return [shown_decision(one, viewer) for one in found]

    async def live(self, owner: str, since: int) -> dict[str, Any]:
        """What the live view shows to this owner, with the decisions after a step."""
        engine, viewer = self.llm.engine, self._viewer(owner)
        found = await self.worker.ask(lambda: snapshot(engine, since, viewer))
        return found | {"started": self.created}

    def _viewer(self, owner: str) -> str:
        """Whose requests this owner may see: those of everybody with a key for the policy."""
        return "" if owner in self._overseers else owner

    def check_model(self, name: str | None) -> None:
        """Raise a 404 for a model that is not the one served; None is that one."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"the model {shown(name)} is not served here, {self.model} is",
                code="model_not_found",
                param="model",
            )

    def check_alive(self) -> None:
        """Raise a 503 where there is no engine any more."""
        if not self.worker.is_alive:
            raise out_of_order()

    async def _body(self, request: Request) -> Any:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})
        return parse_json(await read_body(request, self.settings.max_body_bytes))

    async def _answer(
        self, request: Request, call: Call, answer: Answer, num_prompts: int
    ) -> Response:
        self.check_model(call.model)
        owner: str = request.state.owner
        params = _read(lambda: call.params(owner), call)
        terms = _read(call.terms, call)
        with ExitStack() as stack:
            stack.enter_context(self.limits.slot(owner, num_prompts * call.num_choices))
            # Tokenising a long prompt takes longer than others should wait for a token.
            has_form = params.structured_outputs is not None
            with nullcontext() if has_form else self.worker.reading():
                submissions = await asyncio.get_running_loop().run_in_executor(
                    self._form_readers if has_form else None,
                    partial(_read, lambda: self._submissions(answer, params, terms), call),
                )
            ticket = self.worker.submit(submissions, terms)
            stack.callback(self.worker.cancel, ticket)
            record = request.state.record
            if call.stream:
                held = ExitStack()
                stream = self._stream(ticket, answer, record, held)
                held.push(stack.pop_all())
                return stream
            collecting = self._collect(ticket, answer, record)
            return JSONBody(await while_wanted(collecting, gone(request.receive)))

    def _submissions(
        self, answer: Answer, params: SamplingParams, terms: Terms
    ) -> list[Submission]:
        prompts = self.llm.prompts
        if isinstance(answer, ChatAnswer):
            found = [chat.read(prompts, self.llm.tokenizer, answer.call, params)]
            answer.is_thinking = chat.is_thinking(found[0].text)
            if answer.reads_thoughts and (rules := answer.call.rules) is not None:
                params.structured_outputs = behind_thoughts(rules, answer.is_thinking)
        else:
            assert isinstance(answer, CompletionAnswer)
            special = answer.call.add_special_tokens is not False
            found = [prompts.read_prompt(one, params, special) for one in answer.call.prompts]
            if answer.call.echo:
                answer.echoes = [one.text or self._decoded(one) for one in found]
        for one in found:
            self.llm.engine.check(one.token_ids, one.params, terms)
        return found

    def _decoded(self, submission: Submission) -> str:
        return self.llm.tokenizer.decode(list(submission.token_ids))

    async def _collect(
        self, ticket: Ticket, answer: Answer, record: dict[str, Any]
    ) -> dict[str, Any]:
        seen = _Seen(answer.call, record, self.metrics.watch())
        try:
            async for items in ticket:
                seen.take(items)
        except EngineFailure as error:
            raise failed(error, answer.call.fields) from error
        return answer.whole(seen.ordered) | self._numbers(seen, answer)

    def _stream(
        self, ticket: Ticket, answer: Answer, record: dict[str, Any], held: ExitStack
    ) -> EventStream:
        seen = _Seen(answer.call, record, self.metrics.watch())
        n = answer.call.num_choices

        def events(items: list[Item]) -> bytes:
            seen.take(items)
            parts = [answer.events(one * n + chunk.index, chunk) for one, chunk, _ in items]
            return b"".join(parts)

        def last() -> bytes:
            numbers = self._numbers(seen, answer)
            return to_event(answer.last(numbers)) if answer.has_last else b""

        why = partial(failed, fields=answer.call.fields)
        return EventStream(ticket, events, last, held, why)

    def _numbers(self, seen: "_Seen", answer: Answer) -> dict[str, Any]:
        """Usage, and metrics where they are asked for; the log and the histograms learn too."""
        call, results = seen.call, seen.ordered
        predicting = self._predicting if call.prediction is not None else []
        numbers = usage(results, predicting, self._num_reasoning(answer, results))
        for result in results:
            self.metrics.ended(result, call.num_choices, call.most_tokens)
        reasons = [output.finish_reason for result in results for output in result.outputs]
        seen.record |= {
            "prompt_tokens": numbers["prompt_tokens"],
            "completion_tokens": numbers["completion_tokens"],
            "finish_reasons": reasons,
        }
        told = {"usage": numbers}
        wanted = call.include_metrics
        if self.settings.includes_metrics if wanted is None else wanted:
            told |= request_metrics(results, self._num_spec_tokens)
        return told

    def _num_reasoning(self, answer: Answer, results: Sequence[RequestOutput]) -> int:
        if not (isinstance(answer, ChatAnswer) and answer.reads_thoughts):
            return 0
        outputs = [output for result in results for output in result.outputs]
        tokenizer, is_thinking = self.llm.tokenizer, answer.is_thinking
        return sum(chat.num_thought_tokens(tokenizer, one, is_thinking) for one in outputs)

    @property
    def _num_spec_tokens(self) -> int:
        sources = self.llm.engine.speculation.sources
        return max((source.max_draft_tokens for source in sources), default=0)

    @property
    def _predicting(self) -> list[str]:
        sources = self.llm.engine.speculation.sources
        return [source.name for source in sources if source.needs_prediction]


class _Seen:
    """What has come of one call."""

    def __init__(self, call: Call, record: dict[str, Any], watch: Watch) -> None:
        self.call = call
        self.record = record  # for the log
        self._watch = watch
        self._results: dict[int, RequestOutput] = {}

    def take(self, items: Sequence[Item]) -> None:
        self._watch.see(items)
        for prompt, chunk, _ in items:
            if chunk.result is not None:
                self._results[prompt] = chunk.result

    @property
    def ordered(self) -> list[RequestOutput]:
        """Results in the order of the prompts."""
        return [self._results[prompt] for prompt in sorted(self._results)]


def _read(reading: Callable[[], Found], call: Call) -> Found:
    """What the function gives; what it refuses of the call becomes a 400."""
    try:
        return reading()
    except UserError as error:
        raise refused(error, call.fields) from error
    except MissingDependency as error:
        raise ApiError(400, str(error)) from error
