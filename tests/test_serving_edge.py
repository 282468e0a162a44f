"""Keys, limits, logs, metrics, the live policy, draining: what an operator relies on."""

import asyncio
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import ReplaySource
from serving_cases import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    USER,
    Caller,
    asked,
    events,
    loop_with,
    make_llm,
    refusal,
    serving,
    streamed,
)

import outrider.serving as serving_package
from outrider import LLM, SamplingParams
from outrider.cli.serve import key_list, serve
from outrider.errors import ConfigError
from outrider.serving.app import create_app, service_of
from outrider.serving.limits import Limits
from outrider.serving.logs import JSONLines
from outrider.serving.service import Settings

LONG = {"prompt": "the cat", "temperature": 0, "max_tokens": 200, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_its_key_nobody_is_answered():
    with serving(api_keys=["alpha", "beta"]) as client:
        for headers in ({}, bearer(""), bearer("gamma"), {"Authorization": "alpha"},
                        {"Authorization": "Basic alpha"}, bearer("alphabeta")):  # fmt: skip
            for method, path in (("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/v1/models"),
                                 ("GET", "/policy"), ("PUT", "/policy")):  # fmt: skip
                response = client.request(method, path, headers=headers, content=b"{")
                error = refusal(response, 401)
                assert error["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("alpha", "beta"):
            assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert client.get(path).status_code == 200


def test_who_may_change_the_policy():
    with serving(api_keys=["user"], admin_keys=["root"]) as client:
        refusal(client.put("/policy", headers=bearer("user"), json={}), 401)
        assert client.get("/policy", headers=bearer("root")).status_code == 200
        assert client.get("/v1/models", headers=bearer("root")).status_code == 200


@pytest.mark.parametrize("keys", [[""], ["a b"], ["ä"], ["a\nb"]])
def test_keys_that_cannot_be_sent_are_refused(keys):
    with pytest.raises(ConfigError, match="API key"):
        Settings(api_keys=keys)


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_no_key_where_one_was_to_be_opens_no_server(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(content)
    for given in (content, f"@{path}"):
        with pytest.raises(ConfigError, match="--api-key expects a key"):
            key_list(["sesame", given], "--api-key")
    path.write_text(" a\n\nb\n")
    assert key_list([f"@{path}", "c"], "--api-key") == ["a", "b", "c"]


def test_texts_of_one_key_are_drafted_to_no_other():
    llm = make_llm()
    seen = []
    add = llm.engine.add_request

    def spy(request_id, ids, params, **more):
        seen.append(params.owner)
        add(request_id, ids, params, **more)

    with pytest.MonkeyPatch.context() as patch, serving(llm, api_keys=["a", "b"]) as client:
        patch.setattr(llm.engine, "add_request", spy)
        for key in ("a", "b", "a"):
            client.post(COMPLETIONS, json={"prompt": "the"}, headers=bearer(key))
    assert seen[0] == seen[2] != seen[1]
    assert all(re.fullmatch(r"key-[0-9a-f]{12}", owner) for owner in seen)


def crowd(settings: Settings, headers: list[str | None], llm=None) -> list[Caller]:
    """Calls that come at once, each with its key."""
    llm = llm or make_llm(max_num_seqs=2)
    app = create_app(llm, settings)

    async def calls():
        callers = [Caller(app, COMPLETIONS, LONG, key=key) for key in headers]
        await asyncio.gather(*(caller.task for caller in callers))
        return callers

    with loop_with(app) as runner:
        callers = runner.run(calls())
    assert service_of(app).limits.num_choices == 0
    assert not service_of(app).limits.num_calls
    return callers


def test_more_than_can_wait_are_told_when_to_come_again():
    callers = crowd(Settings(max_waiting=1), [None] * 8)
    statuses = [caller.sent[0]["status"] for caller in callers]
    assert sorted(statuses) == [200] * 3 + [429] * 5
    for caller in callers:
        if caller.sent[0]["status"] == 429:
            headers = {name.decode().lower(): v for name, v in caller.sent[0]["headers"]}
            assert 1 <= int(headers["retry-after"]) <= 60
            assert json.loads(caller.text)["error"]["code"] == "rate_limit_exceeded"


def test_one_key_cannot_take_all_seats():
    settings = Settings(api_keys=["a", "b"], max_waiting=10, max_calls_per_key=2)
    callers = crowd(settings, ["a"] * 4 + ["b"] * 2)
    statuses = [caller.sent[0]["status"] for caller in callers]
    assert sorted(statuses[:4]) == [200, 200, 429, 429]
    assert statuses[4:] == [200, 200]


def test_more_choices_than_there_are_seats_are_refused_for_good():
    with serving(make_llm(max_num_seqs=2), max_waiting=2) as client:
        error = refusal(client.post(COMPLETIONS, json={"prompt": "the", "n": 5}))
        assert error["param"] == "n"
        refusal(client.post(COMPLETIONS, json={"prompt": ["a"] * 3, "n": 2}))
        assert len(asked(client, COMPLETIONS, prompt=["a", "b"], n=2)["choices"]) == 4


def test_the_wait_that_is_told_is_half_a_call_when_all_seats_are_taken():
    waits = []
    for running in (1, 8):
        limits = Limits(running, 0)
        limits.num_choices = running
        limits._seconds = 30.0
        with pytest.raises(Exception, match="try again in") as found, limits.slot("", 1):
            pass
        waits.append(int(found.value.headers["Retry-After"]))  # type: ignore[attr-defined]
    assert waits == [15, 15]


def test_clients_that_hang_up_do_not_make_calls_look_short():
    app = create_app(llm := make_llm(), Settings())
    with loop_with(app) as runner:

        async def hang_up() -> None:
            caller = Caller(app, COMPLETIONS, {"prompt": "the", "max_tokens": 900, "stream": True})
            await caller.arrived.wait()
            caller.gone.set()
            await caller.task

        before = service_of(app).limits._seconds
        for _ in range(5):
            with llm.engine.lock:  # nobody gets a token
                runner.run(hang_up())
        assert service_of(app).limits._seconds == before
        assert service_of(app).limits.num_choices == 0


def logged(caplog) -> list[dict]:
    lines = [JSONLines().format(record) for record in caplog.records]
    return [line for line in map(json.loads, lines) if line["event"] == "call"]


def test_a_call_is_one_line_of_the_log_and_no_secret_is_in_it(caplog):
    with caplog.at_level(logging.INFO, "outrider"), serving(api_keys=["sesame"]) as client:
        headers = bearer("sesame") | {"X-Request-Id": "id-1"}
        client.post(COMPLETIONS, json={"prompt": "the cat", **GREEDY}, headers=headers)
        client.post(CHAT, json={"messages": USER, **GREEDY, "stream": True}, headers=headers)
        client.post(COMPLETIONS, json={"prompt": 5}, headers=headers)
        client.post(COMPLETIONS, json={"prompt": "the"})
    first, second, third, fourth = logged(caplog)
    assert first["request_id"] == "id-1" and first["status"] == 200
    assert (first["prompt_tokens"], first["completion_tokens"]) == (4, 24)
    assert first["finish_reasons"] == second["finish_reasons"] == ["length"]
    assert first["owner"].startswith("key-") and first["seconds"] > 0
    assert (third["status"], fourth["status"]) == (400, 401)
    text = json.dumps([first, second, third, fourth])
    assert "sesame" not in text and "the cat" not in text


def test_a_poll_that_goes_well_is_no_line_of_the_log(caplog):
    paths = ("/live", "/metrics", "/health", "/ready")
    with caplog.at_level(logging.DEBUG, "outrider"), serving() as client:
        for path in (*paths, "/decisions", "/live?since=x"):
            client.get(path)
    calls = [r for r in caplog.records if r.getMessage() == "call"]
    assert [r.levelno for r in calls] == [logging.DEBUG] * 4 + [logging.INFO] * 2
    assert [line["status"] for line in logged(caplog)] == [200] * 5 + [400]


def sample(text: str, name: str, **labels: str) -> float:
    """The value of one series of Prometheus' text format."""
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} {labels}")


def test_metrics_are_what_the_answers_said():
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [plain] = make_llm(speculative_config=None).generate("the cat", params)
    llm = make_llm(ReplaySource(dict.fromkeys("01", plain.outputs[0].token_ids)))
    with serving(llm) as client:
        one = asked(client, COMPLETIONS, prompt="the cat", **GREEDY, include_metrics=True)
        streamed(client, COMPLETIONS, prompt="the cat", **GREEDY)
        client.get("/nowhere")
        text = client.get("/metrics").text
    told = one["metrics"]["speculative_decoding"]
    total = llm.metrics
    assert sample(text, "vllm:prompt_tokens_total") == 8
    assert sample(text, "vllm:generation_tokens_total") == 48
    assert sample(text, "vllm:request_success_total", finished_reason="length") == 2
    assert sample(text, "vllm:num_requests_running") == 0
    assert sample(text, "vllm:num_requests_waiting") == 0
    assert 0 <= sample(text, "vllm:kv_cache_usage_perc") < 1
    assert sample(text, "vllm:spec_decode_num_drafts_total") == 2 * told["num_spec_steps"]
    drafted = sample(text, "vllm:spec_decode_num_draft_tokens_total")
    assert drafted == total.num_draft_tokens == 2 * told["num_draft_tokens"]
    accepted = sample(text, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted == total.num_accepted_draft_tokens > 20
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    positions = [sample(text, name, position=str(i)) for i in range(8)]
    assert sum(positions) == accepted and positions == sorted(positions, reverse=True)
    rate = sample(text, "speculative_accept_rate", source="replay")
    assert rate == pytest.approx(accepted / drafted)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert sample(text, f"vllm:{name}_seconds_count") == 2
    assert sample(text, "vllm:inter_token_latency_seconds_count") >= 2
    assert sample(text, "outrider_http_requests_total", path=COMPLETIONS, status="200") == 2
    assert sample(text, "outrider_http_requests_total", path="other", status="404") == 1
    assert sample(text, "outrider_steps_total") == llm.engine.times.steps


def test_the_metrics_block_is_vllms_and_comes_when_asked_for():
    with serving() as client:
        body = {"prompt": "the cat", **GREEDY}
        assert "metrics" not in asked(client, COMPLETIONS, **body)
        found = asked(client, COMPLETIONS, **body, include_metrics=True)["metrics"]
        assert set(found) == {
            *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
            *("tokens_per_second", "speculative_decoding"),
        }
        assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 23)
        told = found["speculative_decoding"]
        histogram = told["acceptance_histogram"]
        assert sum(histogram) == told["num_spec_steps"]
        kept = sum(count * steps for count, steps in enumerate(histogram))
        assert kept == told["num_accepted_draft_tokens"]
        assert len(histogram) == told["num_spec_tokens"] + 1
        assert asked(client, COMPLETIONS, **body, n=2, include_metrics=True)["metrics"] is None
        usage = {"stream_options": {"include_usage": True}}
        *_, last = streamed(client, COMPLETIONS, **body, **usage, include_metrics=True)
        assert last["metrics"]["tokens_per_second"] > 0
    with serving(includes_metrics=True) as client:
        assert asked(client, COMPLETIONS, **body)["metrics"] is not None


def test_a_trace_is_json_with_a_slice_per_phase(tmp_path):
    path = tmp_path / "trace.json"
    llm = make_llm()
    with serving(llm, trace=path) as client:
        asked(client, COMPLETIONS, prompt="the cat", **GREEDY)
    found = json.loads(path.read_text())
    steps = [event for event in found if event["name"] == "step"]
    assert len(steps) == llm.engine.times.steps
    forwards = [event for event in found if event["name"] == "forward"]
    assert sum(one["dur"] for one in forwards) == pytest.approx(1e6 * llm.engine.times.forward)
    ends = [step["ts"] + step["dur"] for step in steps]
    for end, after in zip(ends, steps[1:], strict=False):
        assert after["ts"] >= end - 1.0
    for event in found:
        assert event["ph"] in ("X", "C", "M")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else():
    with serving(trace=Path("/dev/full")) as client:
        for _ in range(3):
            asked(client, COMPLETIONS, prompt="the cat", **GREEDY)


def test_the_policy_knows_no_queries():
    with serving() as client:
        before = client.get("/policy").json()
        for method, path in (("put", ""), ("post", "/back"), ("post", "/explain"), ("get", "")):
            response = client.request(method, f"/policy{path}?dry_run=true", content=b"{}")
            assert "dry_run" in refusal(response)["message"]
        assert client.get("/policy").json() == before


def test_the_policy_is_read_replaced_and_called_back():
    llm = make_llm()
    none = {
        "version": 1,
        "rules": [{"name": "quiet", "when": {"tag": "slow"}, "then": {"off": []}}],
    }
    with serving(llm) as client:
        first = client.get("/policy").json()
        assert first["version"] == 1 and len(first["versions"]) == 1
        error = refusal(client.put("/policy", json={"rules": [{"when": {"no": 1}}]}))
        assert error["message"]
        refusal(client.put("/policy", json=none | {"nothing": 1}))
        for data in (b"{", b'{"version": 1, "version": 1, "rules": []}', b"[" * 10**5, b"\xff"):
            refusal(client.put("/policy", content=data))
            refusal(client.post("/policy/explain", content=data))
        refusal(client.post("/policy/back"))
        second = client.put("/policy", json=first["policy"]).json()
        assert second["version"] == 2 and len(second["versions"]) == 2
        assert client.post("/policy/back").json()["version"] == 1
        assert client.get("/policy/schema").json()["type"] == "object"
        explained = client.post("/policy/explain", json={"facts": {"context_len": 9}}).json()
        assert set(explained) == {"rules", "allowed"}
        refusal(client.post("/policy/explain", json={"facts": {"nonsense": 9}}))
        refusal(client.post("/policy/explain", json=[1]))
        nobody = {"version": 1, "rules": [{"then": {"sources": ["nobody"]}}]}
        error = refusal(client.post("/policy/explain", json={"policy": nobody}))
        assert "no source is called 'nobody'" in error["message"]
        assert error == refusal(client.put("/policy", json=nobody))


def test_a_file_of_the_policy_is_in_force_from_the_start(tmp_path):
    path = tmp_path / "policy.json"
    documents = [{"version": 1, "rules": [{"then": {"num_draft_tokens": n}}]} for n in range(3)]
    path.write_text(json.dumps(documents[0]))
    with serving(policy=path) as client:
        assert client.get("/policy").json()["policy"] == documents[0]
    found = []

    def load() -> LLM:  # takes seconds, in which the file changes
        path.write_text(json.dumps(documents[1]))
        return make_llm()

    def run(llm: LLM, settings: Settings, *_: object) -> None:
        with serving(llm, policy=settings.policy) as client:
            found.append(client.get("/policy").json()["policy"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.serving.server.serve", run)
        model: Any = SimpleNamespace(model=None, load=load)
        serve(model, policy=path)
        path.write_text("{")
        with pytest.raises(ConfigError, match="no JSON"):
            create_app(make_llm(), Settings(policy=path))
        with pytest.raises(ConfigError, match="no JSON"):
            serve(model, policy=path)
    assert found == [documents[1]]


def test_the_newest_decisions_of_the_planner_are_told():
    with serving() as client:
        assert client.get("/decisions").json() == []
        asked(client, COMPLETIONS, prompt="the end. the end. the", **GREEDY)
        found = client.get("/decisions").json()
    assert [one["step"] for one in found] == sorted(one["step"] for one in found) != []
    for one in found:
        assert one["expected_speedup"] > 0 and one["plain_seconds"] > 0
        [choice] = one["choices"]
        assert choice["shape"] in ("none", "one", "chain", "tree")


def test_a_draining_server_ends_what_it_has_and_takes_no_more():
    llm = make_llm()
    app = create_app(llm)

    async def calls():
        running = Caller(app, COMPLETIONS, {**LONG, "stream": True})
        await running.arrived.wait()
        service_of(app).drain()
        late = [Caller(app, COMPLETIONS, LONG), Caller(app, "/ready", {}, "GET")]
        late.append(Caller(app, "/health", {}, "GET"))
        await asyncio.gather(running.task, *(caller.task for caller in late))
        assert running.text.endswith("data: [DONE]\n\n")
        return [caller.sent[0]["status"] for caller in late]

    with loop_with(app) as runner:
        assert runner.run(calls()) == [503, 503, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_a_shutdown_cuts_off_are_told(stream):
    llm = make_llm()
    app = create_app(llm)

    async def call():
        caller = Caller(app, COMPLETIONS, {**LONG, "stream": stream})
        if stream:
            await caller.arrived.wait()
        else:
            await asyncio.sleep(0)
        caller.task.cancel()  # as uvicorn does when the time is over
        await caller.task
        return caller

    with loop_with(app) as runner:
        caller = runner.run(call())
    *_, last = events(caller.text) if stream else [json.loads(caller.text)]
    assert "shut down" in last["error"]["message"]
    assert caller.sent[0]["status"] == (200 if stream else 503)
    assert not caller.sent[-1].get("more_body")
    assert service_of(app).limits.num_choices == 0


def test_the_dashboard_asks_for_what_there_is():
    with serving() as client:
        text = client.get("/metrics").text
    known = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        known |= {f"{name}_bucket"} if kind == "histogram" else {name}
    dashboard = json.loads((Path(serving_package.__file__).parent / "grafana.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    asked_for = {name for q in queries for name in re.findall(r"([a-z0-9_:]+)\{", q)}
    assert len(asked_for) > 15
    assert asked_for <= known, asked_for - known
