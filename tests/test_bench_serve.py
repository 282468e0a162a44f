"""The scripts that measure what the server and its terms bring and cost: run once, on toys."""

import asyncio
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
from fakes import FakeTarget
from serving_cases import VOCAB, make_llm
from serving_cases import listening as serving_at

from outrider import SamplingParams
from outrider.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import adversarial
import deadlines
import mixed
import serve
from load import Reply

WHOLE = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"


def target() -> FakeTarget:
    return FakeTarget(VOCAB, max_model_len=512)


@pytest.mark.parametrize(
    ("config", "parsed"),
    [("none", None), ("auto", "auto"), ('{"method": "lookup"}', {"method": "lookup"})],
)
def test_both_sides_draft_as_the_option_says(monkeypatch, capsys, config, parsed):
    started = []

    @contextmanager
    def server(*options: str):
        started.append(options)
        with serving_at(make_llm(target=target(), speculative_config=parsed)) as address:
            yield SimpleNamespace(port=int(address.rstrip("/").rpartition(":")[2]))

    def llm(speculative_config):
        started.append(speculative_config)
        return make_llm(target=target(), speculative_config=speculative_config)

    chat = SimpleNamespace(conversation=[{"role": "user", "content": "the cat"}])
    monkeypatch.setattr(serve, "ServerProcess", server)
    monkeypatch.setattr(serve, "LLM", llm)
    monkeypatch.setattr(serve, "read_prompts", lambda *_: [chat])
    monkeypatch.setattr(serve, "WARM_UP", 0)
    options = ["--batch", "2", "--rounds", "1", "--max-tokens", "20"]
    monkeypatch.setattr(sys, "argv", ["serve.py", *options, "--speculative-config", config])
    serve.main()
    assert started == [("--speculative-config", config), parsed]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["2"]["ratio"] > 0
    monkeypatch.setattr(sys, "argv", ["serve.py", "--speculative-config", "{"])
    with pytest.raises(ConfigError):
        serve.main()
    assert len(started) == 2  # nothing is started for a config that is none


def test_calls_with_terms_and_without_are_the_same_otherwise(monkeypatch):
    jobs = deadlines.make_jobs(30, 1)
    urgent = [job for job in jobs if job.is_urgent]
    bodies = []

    async def call(port, path, body):
        bodies.append(body)
        late = 0.5 if body["max_tokens"] == urgent[0].max_tokens else 0.0
        return Reply(perf_counter(), [(perf_counter() + late, WHOLE)])

    monkeypatch.setattr(deadlines, "call", call)
    moments = deadlines.arrivals(len(jobs), 0.02, 1)
    found = [
        asyncio.run(deadlines.serve(1, jobs, moments, 0.25, has_terms))
        for has_terms in (True, False)
    ]
    num_late = sum(job.max_tokens == urgent[0].max_tokens for job in urgent)
    assert [one["on_time"] for one in found] == [1 - num_late / len(urgent)] * 2
    terms = {
        job.max_tokens: {"deadline": 0.25} if job.is_urgent else {"priority": 1} for job in jobs
    }
    asked = [job.body(terms[job.max_tokens]) for job in jobs], [job.body({}) for job in jobs]
    for expected, found_bodies in zip(asked, (bodies[:30], bodies[30:]), strict=True):
        assert sorted(map(str, found_bodies)) == sorted(map(str, expected))
    assert len(moments) == len(jobs) and len(set(moments)) < len(jobs)  # in bursts
    assert moments == sorted(moments) and moments[0] >= 0 and moments[-1] <= 0.02


def test_text_that_nobody_foretells(monkeypatch, capsys):
    def llm(speculative_config, **options):
        given.append(speculative_config)
        options["kv_cache_tokens"] = 8192
        return make_llm(target=target(), speculative_config={"method": "lookup"}, **options)

    given: list[object] = []
    monkeypatch.setattr(adversarial, "LLM", llm)
    options = ["--batch", "2", "--rounds", "2", "--max-tokens", "16"]
    monkeypatch.setattr(sys, "argv", ["adversarial.py", *options])
    adversarial.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["2"]
    assert given == ["auto"]
    assert found["ratio"] > 0 and found["planner"] > 0 and found["plain"] > 0


def test_another_text_on_one_side_ends_the_bench():
    bench = adversarial.Bench(VOCAB, 2, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    assert bench.rate(make_llm(target=target(), kv_cache_tokens=8192)) > 0
    other = make_llm(
        target=FakeTarget(VOCAB, max_model_len=512, sharpness=0.5), kv_cache_tokens=8192
    )
    with pytest.raises(AssertionError, match="another text"):
        bench.rate(other)


@pytest.mark.parametrize("script", [adversarial, deadlines, mixed])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", ""])
def test_options_that_cannot_be_measured_are_refused_at_once(monkeypatch, capsys, script, value):
    names = {"--rounds"} | ({"--jobs"} if script is deadlines else {"--batch"})
    for name in names:
        monkeypatch.setattr(sys, "argv", [script.__name__, name, value])
        with pytest.raises(SystemExit, match="2"):
            script.main()
        assert "expected a whole number of at least 1" in capsys.readouterr().err
    if script is deadlines and value != "1.5":
        monkeypatch.setattr(sys, "argv", ["deadlines", f"--load={value}"])
        with pytest.raises(SystemExit, match="2"):
            script.main()
        assert "expected a number above 0" in capsys.readouterr().err
