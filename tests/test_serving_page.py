"""The page's files with what guards them, and what the live view is told."""

import asyncio
import json
import re
from importlib import resources

import pytest
from engine_cases import exact
from fakes import ReplaySource, make_engine
from serving_cases import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    Caller,
    asked,
    loop_with,
    make_llm,
    refusal,
    serving,
)

from outrider import SamplingParams
from outrider.drafting.source import DraftSource
from outrider.serving.app import create_app
from outrider.serving.service import Settings
from outrider.serving.snapshot import snapshot
from outrider.terms import Terms

WEB = resources.files("outrider.serving") / "web"
NAMES = sorted(path.name for path in WEB.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".js")]


@pytest.fixture(scope="module")
def client():
    with serving(api_keys=["sesame"]) as client:
        yield client


def test_the_page_is_open_to_everybody_and_what_it_shows_is_not(client):
    page = client.get("/")
    assert page.status_code == 200 and "<h1>" in page.text
    refusal(client.get("/live"), 401)
    found = client.get("/live", headers={"Authorization": "Bearer sesame"})
    assert found.json()["requests"]["max_running"] == 16
    assert found.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_with_its_type_and_a_strict_policy(client, name):
    found = client.get(f"/web/{name}")
    assert found.content == (WEB / name).read_bytes()
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    expected = types.get(name.split(".")[-1], "image/svg+xml")
    assert found.headers["content-type"].split(";")[0] == expected
    assert found.headers["x-content-type-options"] == "nosniff"
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


@pytest.mark.parametrize("name", ["nothing.js", "../page.py", "%2e%2e/page.py", "", "page.py"])
def test_nothing_else_is_served(client, name):
    assert refusal(client.get(f"/web/{name}"), 404)["code"] == "not_found"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup(name):
    text = (WEB / name).read_text()
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
    assert not hosts
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    if name == "index.html":  # what the policy would refuse anyway
        assert not re.findall(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text)
        used = set(re.findall(r'(?:src|href)="web/([^"]+)"', text))
        assert used == {"icon.svg", "style.css", "main.js"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_import_is_there(name):
    text = (WEB / name).read_text()
    for names, file in re.findall(r"import \{([^}]+)\} from \"\./([^\"]+)\"", text):
        exported = set(
            re.findall(
                r"export (?:const|(?:async )?function\*?|class) (\w+)", (WEB / file).read_text()
            )
        )
        assert {one.strip() for one in names.split(",")} - {""} <= exported, file


def test_every_id_that_a_script_asks_for_is_in_the_page():
    page = (WEB / "index.html").read_text()
    known = set(re.findall(r'\sid="([^"]+)"', page))
    asked_for = {
        name
        for script in SCRIPTS
        for name in re.findall(r'(?:byId|put)\("([\w-]+)"', (WEB / script).read_text())
    }
    assert len(asked_for) > 20
    assert asked_for <= known, asked_for - known


def drafting():
    """An LLM whose source drafts the chat's plain text, and that text's number of tokens."""
    messages = [{"role": "user", "content": "the cat"}]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [expected] = make_llm(speculative_config=None).chat(messages, params)
    ids = expected.outputs[0].token_ids
    return make_llm(ReplaySource({str(i): ids for i in range(9)}, exact)), messages, len(ids)


def test_the_live_view_is_told_what_the_engine_did():
    llm, messages, num_tokens = drafting()
    with serving(llm) as client:
        before = client.get("/live").json()
        asked(client, CHAT, messages=messages, **GREEDY)
        found = client.get("/live").json()
    assert before["speculation"]["num_output_tokens"] == before["steps"] == 0
    told = found["speculation"]
    assert told["num_output_tokens"] == num_tokens == 24
    assert told["num_accepted_draft_tokens"] == 24 - told["num_target_steps"] > 15
    [source] = found["sources"]
    assert source["name"] == "replay" and source["num_failures"] == 0
    assert sum(source["drafted"]) == told["num_draft_tokens"]
    assert sum(source["accepted"]) == told["num_accepted_draft_tokens"]
    assert source["health"] == 1.0
    assert found["kv"] | {"zones": 0} == {
        "page_size": 16, "num_pages": 256, "num_held": 0, "num_known": 1, "zones": 0,
    }  # fmt: skip
    assert found["requests"]["listed"] == [] and found["time"] > before["time"]
    assert sum(found["phases"].values()) > 0
    assert found["started"] == before["started"]


def test_only_newer_decisions_are_told():
    with serving() as client:
        asked(client, COMPLETIONS, prompt="the end. the end. the", **GREEDY)
        all_of_them = client.get("/live").json()["decisions"]
        steps = [one["step"] for one in all_of_them]
        assert len(steps) > 1 and steps == sorted(steps)
        since = client.get(f"/live?since={steps[0]}").json()["decisions"]
        assert since == all_of_them[1:]
        assert client.get(f"/live?since={steps[-1]}").json()["decisions"] == []
        for wrong in ("x", "-1", "1.5", "", "9" * 30, "²"):
            assert refusal(client.get("/live", params={"since": wrong}))["param"] == "since"


def seen(live: dict) -> tuple[int, list[int], int]:
    """What is told of all requests, and which single ones, by the lengths of their prompts."""
    lengths = [one["num_prompt_tokens"] for one in live["requests"]["listed"]]
    return live["requests"]["num_running"], sorted(lengths), sum(
        len(one["choices"]) for one in live["decisions"]
    )  # fmt: skip


def test_a_single_request_is_shown_to_its_own_key_and_to_those_who_keep_the_policy():
    llm = make_llm()
    app = create_app(llm, Settings(api_keys=["a", "b"], admin_keys=["root"]))
    prompts = {"a": "the end. the end. the", "b": "a dog. a"}
    of_a, of_b = (len(llm.tokenizer.encode(prompt)) for prompt in prompts.values())
    body = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}

    step = llm.engine.step
    llm.engine.step = lambda: step() if llm.engine.times.steps < 40 else []  # none ends before

    async def calls():
        running = [Caller(app, COMPLETIONS, {**body, "prompt": prompts[key]}, key=key)
                   for key in ("a", "b", "b")]  # fmt: skip
        while llm.engine.times.steps < 40:
            await asyncio.sleep(0.002)
        found = {}
        for path in ("/live", "/decisions"):
            for key in ("a", "b", "root"):
                caller = Caller(app, path, {}, "GET", key=key)
                await caller.task
                found[path, key] = json.loads(caller.text)
        for caller in running:
            caller.gone.set()
        await asyncio.gather(*(caller.task for caller in running))
        return found

    with loop_with(app) as runner:
        found = runner.run(calls())
    a, b, root = (seen(found["/live", key]) for key in ("a", "b", "root"))
    assert a[:2] == (3, [of_a]) and b[:2] == (3, [of_b, of_b])
    assert root[:2] == (3, [of_b, of_b, of_a])
    assert min(a[2], b[2]) > 0 and root[2] > max(a[2], b[2])
    for key, most in (("a", 1), ("b", 2), ("root", 3)):
        shown = [len(one["choices"]) for one in found["/decisions", key]]
        assert 0 < max(shown) <= most
    text = json.dumps(list(found.values()))
    assert "key-" not in text and "the end" not in text and "dog" not in text


class Broken(DraftSource):
    """Fails at everything."""

    name = "broken"

    def propose(self, contexts, budgets):
        raise RuntimeError("no drafts today")

    def held_tokens(self, request_id):
        raise RuntimeError("nor this")


def test_running_requests_are_shown_beside_a_source_that_fails():
    engine = make_engine([Broken()], strict_sources=False)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request("one", [3, 4, 5], params, terms=Terms(priority=2, deadline=60))
    engine.add_request("two", [3, 4, 5], params)
    for _ in range(6):
        engine.step()
    found = snapshot(engine, 0)
    two, one = found["requests"]["listed"]
    assert (one["id"], one["status"], one["priority"]) == ("one", "running", 2)
    assert (one["num_prompt_tokens"], one["num_output_tokens"], one["max_tokens"]) == (3, 6, 40)
    assert 0 < one["age"] < 60 and one["age"] + one["due"] == pytest.approx(60)
    assert two["id"] == "two" and two["due"] is None
    assert found["kv"]["zones"] == {"target": 2 * (3 + 6 - 1)}
    assert found["kv"]["num_held"] == 2
    [source] = found["sources"]
    assert source["num_failures"] > 0 and source["health"] < 1
