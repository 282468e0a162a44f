"""Faults inside and clients that go: what is affected says so, the rest goes on, nothing leaks."""

import asyncio
import json
import re
from typing import Any

import pytest
from fakes import FakeTarget
from serving_cases import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    USER,
    VOCAB,
    Caller,
    asked,
    events,
    loop_with,
    make_llm,
    refusal,
    serving,
)

from outrider import Draft, DraftSource, SamplingParams
from outrider.engine.output import OutputBuilder
from outrider.serving.app import create_app, service_of
from outrider.serving.service import Settings
from outrider.serving.worker import EngineGone, Worker
from outrider.terms import Terms

LONG = {"prompt": "the cat", "temperature": 0, "max_tokens": 200, "ignore_eos": True}


class FaultyTarget(FakeTarget):
    """Fails in the forwards whose numbers are named, and in all that hold a named token."""

    def __init__(self, numbers: Any = (), poison: int | None = None) -> None:
        super().__init__(VOCAB)
        self.numbers, self.poison = numbers, poison

    def forward(self, batch):
        if self.num_forwards in self.numbers or self.poison in batch.token_ids.tolist():
            self.num_forwards += 1
            raise RuntimeError("out of luck")
        return super().forward(batch)


class FaultySource(DraftSource):
    """Raises whenever it is asked."""

    name = "faulty"

    def propose(self, contexts, budgets) -> list[Draft]:
        raise OSError("no such luck")


async def until(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def idle(llm) -> bool:
    engine = llm.engine
    return not engine.has_work and engine.arena.num_free_pages == engine.arena.num_pages


def test_a_failed_forward_is_a_500_and_the_next_call_is_answered():
    with serving(make_llm(target=FaultyTarget([2]))) as client:
        error = refusal(client.post(COMPLETIONS, json=LONG), 500)
        assert error["code"] == "engine_failure" and error["type"] == "server_error"
        assert "out of luck" in error["message"]
        assert asked(client, COMPLETIONS, **LONG)["usage"]["completion_tokens"] == 200
        assert client.get("/health").status_code == 200


def test_a_stream_that_fails_says_so_in_its_last_event():
    with serving(make_llm(target=FaultyTarget([3]))) as client:
        response = client.post(COMPLETIONS, json={**LONG, "stream": True})
        *events, error, done, rest = response.text.split("\n\n")
        assert response.status_code == 200 and len(events) >= 1
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_failure"
        assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_submitted_says_so(monkeypatch, stream):
    llm = make_llm()
    add, calls = llm.engine.add_request, []

    def fail(*given: Any, **more: Any) -> None:
        calls.append(given)
        if len(calls) == 2:  # the second of two prompts
            raise MemoryError("no room")
        add(*given, **more)

    monkeypatch.setattr(llm.engine, "add_request", fail)
    with serving(llm) as client:
        body = {**LONG, "prompt": ["the cat", "a dog"], "stream": stream}
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == (200 if stream else 500)
        told = (events(response.text)[-1] if stream else response.json())["error"]
        assert told["code"] == "engine_failure" and "MemoryError: no room" in told["message"]
        assert asked(client, COMPLETIONS, **LONG)["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize(("n", "stream"), [(1, False), (2, False), (1, True)])
def test_a_fault_while_an_ended_answer_is_told_is_a_500(monkeypatch, n, stream):
    llm = make_llm()
    emit, faults = llm.engine._emit, iter([MemoryError("no room")])

    def fail(request, *given: Any) -> None:
        if request.output.finish_reason == "length" and (fault := next(faults, None)):
            raise fault
        emit(request, *given)

    monkeypatch.setattr(llm.engine, "_emit", fail)
    with serving(llm) as client:
        body = {**GREEDY, "prompt": "the cat", "n": n, "stream": stream}
        response = client.post(COMPLETIONS, json=body)
        assert response.status_code == (200 if stream else 500)
        told = (events(response.text)[-1] if stream else response.json())["error"]
        assert told["code"] == "engine_failure"
        assert not llm.engine._groups and not llm.engine._names
        assert asked(client, COMPLETIONS, **LONG)["usage"]["completion_tokens"] == 200


def test_a_text_that_cannot_be_ended_takes_nobody_with_it(monkeypatch):
    llm = make_llm()
    finish = OutputBuilder.finish

    def fail(self, reason: str, *more: Any) -> None:
        self.finish_reason = reason
        if reason == "abort":
            raise MemoryError("no room")
        finish(self, reason, *more)

    monkeypatch.setattr(OutputBuilder, "finish", fail)
    llm.engine.add_request("a", [1, 2], SamplingParams(max_tokens=9))
    llm.engine.add_request("b", [1, 2], SamplingParams(max_tokens=9))
    llm.engine.step()
    llm.engine.abort("a", "b")
    assert {chunk.finish_reason for chunk in llm.engine.step()} == {"abort"}
    assert not llm.engine.has_work and not llm.engine._groups
    llm.engine.check_integrity()


def test_only_the_requests_of_the_failed_step_fail():
    llm = make_llm(target=FaultyTarget(poison=7), max_num_seqs=1)
    app = create_app(llm, Settings(max_waiting=8))

    async def calls():
        poisoned, healthy = {**LONG, "prompt": [7, 8]}, {**LONG, "banned_token_ids": [7]}
        callers = [Caller(app, COMPLETIONS, body) for body in (poisoned, healthy, healthy)]
        await asyncio.gather(*(caller.task for caller in callers))
        return [caller.sent[0]["status"] for caller in callers]

    with loop_with(app) as runner:
        assert runner.run(calls()) == [500, 200, 200]
    assert idle(llm)


def test_a_source_that_raises_ends_no_server():
    with serving(make_llm(FaultySource())) as client:
        found = asked(client, COMPLETIONS, **LONG)
        assert found["choices"][0]["text"] == asked_plainly()
        text = client.get("/metrics").text
        assert re.search(r'outrider_source_failures_total\{.*source="faulty".*\} [1-9]', text)
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_everything_within_one_step(path, stream):  # B28
    llm = make_llm()
    app = create_app(llm)
    body = {**GREEDY, "max_tokens": 200, "stream": stream, "n": 2}
    body |= {"prompt": "the cat"} if path == COMPLETIONS else {"messages": USER}

    async def call():
        caller = Caller(app, path, body)
        await until(lambda: llm.engine.times.steps >= 3)
        caller.gone.set()
        await caller.task
        sent = llm.engine.times.steps
        await until(lambda: idle(llm))
        assert llm.engine.times.steps <= sent + 2
        again = Caller(app, COMPLETIONS, LONG)  # the next request is right
        await again.task
        return json.loads(again.text)

    with loop_with(app) as runner:
        found = runner.run(call())
    whole = asked_plainly()
    assert found["choices"][0]["text"] == whole
    assert service_of(app).limits.num_choices == 0
    llm.engine.check_integrity()


@pytest.mark.parametrize("stuck_at", [1, 2])  # before the first piece, and behind it
def test_a_client_that_reads_no_more_gives_its_seat_back(monkeypatch, stuck_at):
    monkeypatch.setattr("outrider.serving.http.READ_SECONDS", 0.02)
    llm = make_llm()
    app = create_app(llm)

    async def call():
        caller = Caller(app, COMPLETIONS, {**LONG, "stream": True}, num_read=stuck_at)
        await caller.task
        await until(lambda: idle(llm))
        assert len(caller.sent) == stuck_at

    with loop_with(app) as runner:
        runner.run(call())
    assert service_of(app).limits.num_choices == 0


def plain_params(max_tokens: int = 200) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def asked_plainly() -> str:
    llm = make_llm(speculative_config=None)
    return llm.generate("the cat", plain_params())[0].outputs[0].text


def test_a_client_that_is_gone_before_its_answer_begins_costs_nothing():
    llm = make_llm()
    app = create_app(llm)

    async def call():
        for stream in (False, True):
            caller = Caller(app, COMPLETIONS, {**LONG, "stream": stream})
            caller.gone.set()
            await caller.task
        await until(lambda: idle(llm))

    with loop_with(app) as runner:
        runner.run(call())
    assert service_of(app).limits.num_choices == 0


def test_cancelling_twice_and_after_the_end_does_nothing():
    llm = make_llm()
    app = create_app(llm)
    service = service_of(app)

    async def call():
        params = llm.prompts.read_prompt("the cat", plain_params())
        ticket = service.worker.submit([params], Terms())
        parts = [item.chunk async for items in ticket for item in items]
        for _ in range(2):
            service.worker.cancel(ticket)
        other = service.worker.submit([params], Terms())
        for _ in range(3):
            service.worker.cancel(other)
        await until(lambda: idle(llm))
        return "".join(part.text for part in parts)

    with loop_with(app) as runner:
        assert runner.run(call()) == asked_plainly()


def test_an_engine_that_cannot_let_go_is_told_and_not_asked_again():
    class Stuck(FaultyTarget):
        def forward(self, batch):
            raise RuntimeError("stuck")

    llm = make_llm(target=Stuck())

    def abort(*_: str) -> None:
        raise RuntimeError("cannot")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "abort", abort)
        app = create_app(llm)

        async def calls():
            first = Caller(app, COMPLETIONS, LONG)
            await first.task
            await until(lambda: not service_of(app).worker.is_alive)
            second = Caller(app, COMPLETIONS, LONG)
            health = Caller(app, "/health", {}, "GET")
            await asyncio.gather(second.task, health.task)
            return [caller.sent[0]["status"] for caller in (first, second, health)]

        with loop_with(app) as runner:
            assert runner.run(calls()) == [500, 503, 503]


WAYS_TO_ASK = [
    *(("GET", path) for path in ("/live", "/decisions", "/policy", "/policy/schema")),
    *(("GET", path) for path in ("/v1/models", "/health", "/ready")),
    *(("POST", path) for path in (COMPLETIONS, CHAT, "/policy/back", "/policy/explain")),
    ("PUT", "/policy"),
]


def test_a_dead_engine_is_a_503_everywhere_and_nobody_waits_for_it():
    llm = make_llm(max_num_seqs=1)
    app = create_app(llm, Settings(max_waiting=4))

    def die() -> Any:
        raise SystemExit("the thread ends")

    async def calls():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine, "step", die)
            under_way = [Caller(app, COMPLETIONS, {**LONG, "stream": i > 0}) for i in range(3)]
            await asyncio.gather(*(caller.task for caller in under_way))
        late = [Caller(app, path, {}, method) for method, path in WAYS_TO_ASK]
        late.append(Caller(app, COMPLETIONS, LONG))
        await asyncio.gather(*(caller.task for caller in late))
        with pytest.raises(EngineGone):
            await service_of(app).worker.ask(lambda: 1)
        prompt = llm.prompts.read_prompt("the cat", plain_params())
        ticket = service_of(app).worker.submit([prompt], Terms())
        with pytest.raises(EngineGone):
            async for _ in ticket:
                pass
        return under_way, late

    with loop_with(app) as runner:
        under_way, late = runner.run(asyncio.wait_for(calls(), 20))
    assert under_way[0].sent[0]["status"] in (500, 503)
    assert all("error" in caller.text for caller in under_way)
    assert {caller.sent[0]["status"] for caller in late} == {503}
    assert service_of(app).limits.num_choices == 0
    assert not llm.engine.scheduler.has_work
    llm.engine.check_integrity()


def test_what_waits_when_the_engine_dies_is_told():
    llm = make_llm()
    app = create_app(llm)
    worker = service_of(app).worker

    async def calls():
        def die() -> None:
            asked.append(asyncio.run_coroutine_threadsafe(worker.ask(lambda: 1), loop))
            while worker._inbox.empty():
                pass
            raise SystemExit

        loop, asked = asyncio.get_running_loop(), []
        with pytest.raises(EngineGone):
            await worker.ask(die)
        with pytest.raises(EngineGone):
            await asyncio.wrap_future(asked[0])

    with loop_with(app) as runner:
        runner.run(asyncio.wait_for(calls(), 20))
    assert not worker.is_alive


def test_a_question_that_raises_does_so_where_it_was_asked():
    llm = make_llm()
    app = create_app(llm)

    async def calls():
        worker = service_of(app).worker
        for error in (ValueError("mine"), AssertionError("too"), KeyError(1)):

            def question(error: Exception = error) -> None:
                raise error

            with pytest.raises(type(error)) as found:
                await worker.ask(question)
            assert found.value is error
        with pytest.raises(RuntimeError, match="StopIteration"):
            await worker.ask(lambda: next(iter(())))
        assert await worker.ask(lambda: 5) == 5
        given_up = asyncio.ensure_future(worker.ask(lambda: 6))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await worker.ask(lambda: 7) == 7
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine.planner, "decisions_after", lambda *_: 1 / 0)
            live = Caller(app, "/live", {}, "GET")
            await live.task
        call = Caller(app, COMPLETIONS, LONG)
        await call.task
        return live.sent[0]["status"], json.loads(call.text)["choices"][0]["text"]

    with loop_with(app) as runner:
        assert runner.run(asyncio.wait_for(calls(), 20)) == (500, asked_plainly())


def test_what_is_called_beside_the_steps_cannot_end_them():
    llm = make_llm()

    def fail() -> None:
        raise OSError("a full disk")

    async def call():
        worker = Worker(llm.engine, after_step=fail, at_start=fail)
        worker.start()
        prompt = llm.prompts.read_prompt("the cat", plain_params())
        texts = [i.chunk.text async for items in worker.submit([prompt], Terms()) for i in items]
        is_alive = worker.is_alive
        worker.stop()
        return is_alive, "".join(texts)

    assert asyncio.run(asyncio.wait_for(call(), 20)) == (True, asked_plainly())


def test_an_idle_engine_waits_for_calls_that_are_being_read_but_not_for_long():
    llm = make_llm()
    rows: list[int] = []
    forward = llm.engine.target.forward

    def counted(batch):
        rows.append(len(batch.row_starts) - 1)
        return forward(batch)

    llm.engine.target.forward = counted

    async def text_of(ticket) -> str:
        return "".join([i.chunk.text async for items in ticket for i in items])

    async def call():
        worker = Worker(llm.engine)
        worker.start()
        prompt = llm.prompts.read_prompt("the cat", plain_params())
        with worker.reading():
            first = worker.submit([prompt], Terms())
            await asyncio.sleep(0.003)
            second = worker.submit([prompt], Terms())
        found = [await text_of(first), await text_of(second)]
        together = rows[0]
        with worker.reading():  # as long as it likes
            found.append(await text_of(worker.submit([prompt], Terms())))
        worker.stop()
        return together, found

    together, found = asyncio.run(asyncio.wait_for(call(), 20))
    assert found == [asked_plainly()] * 3
    assert together == 2 and rows[-1] == 1


def test_calls_side_by_side_each_get_their_own_text():
    llm = make_llm(max_num_seqs=4)
    app = create_app(llm, Settings(max_waiting=100))
    prompts = [text for text in ("the cat", "a dog", "end.", "x", "the", "zz") for _ in range(2)]

    async def calls():
        bodies = [
            {**GREEDY, "prompt": prompt, "stream": bool(index % 2)}
            for index, prompt in enumerate(prompts)
        ]
        callers = [Caller(app, COMPLETIONS, body) for body in bodies]
        await asyncio.gather(*(caller.task for caller in callers))
        return [caller.text for caller in callers]

    with loop_with(app) as runner:
        texts = runner.run(calls())
    for index, prompt in enumerate(prompts):
        [expected] = make_llm(speculative_config=None).generate(prompt, plain_params(24))
        if index % 2:
            lines = [line for line in texts[index].split("\n\n") if line.startswith("data: {")]
            parts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
        else:
            parts = [json.loads(texts[index])["choices"][0]["text"]]
        assert "".join(parts) == expected.outputs[0].text
