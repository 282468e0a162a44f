"""Everything that a client can get wrong, or do on purpose: a 4xx in OpenAI's envelope, always."""

import json

import pytest
from fakes import FakeTarget
from serving_cases import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    USER,
    asked,
    loop_with,
    make_llm,
    refusal,
    serving,
)
from toy_models import toy_tokenizer

from outrider.serving.app import create_app
from outrider.tokenizer import Tokenizer

DEEP = "[" * 100_000 + "]" * 100_000
BODIES = {
    "nothing": b"",
    "no JSON": b"{prompt: the}",
    "half a JSON": b'{"prompt": "the"',
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "the"}'.encode("utf-16"),
    "NaN": b'{"prompt": "the", "temperature": NaN}',
    "infinity": b'{"prompt": "the", "temperature": -Infinity}',
    "overflow": b'{"prompt": "the", "temperature": 1e999}',
    "digits": b'{"prompt": "the", "max_tokens": ' + b"9" * 10_000 + b"}",
    "deep": b'{"prompt": ' + DEEP.encode() + b"}",
    "a key twice": b'{"prompt": "the", "prompt": "a"}',
    "a key twice inside": b'{"prompt": "the", "metadata": {"a": [{"b": 1, "b": 1}]}}',
    "deep tools": b'{"messages": [], "tools": ' + DEEP.encode() + b"}",
}
# Values that are wrong in every field of a kind.
WRONG = {
    "integer": ["3", 1.5, True, [], {}, 10**400, -(10**400)],
    "number": ["0.5", True, [], {}, 1e308, -1e308],
    "boolean": ["true", 1, 0, [], {}],
    "text": [5, True, [1], {}],
    "object": [5, "x", [1], True],
}
FIELDS = {
    "integer": (*("n", "max_tokens", "top_k", "seed", "min_tokens", "priority"),),
    "number": (
        *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "deadline"),
    ),
    "boolean": (
        *("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("return_token_ids", "include_metrics", "return_token_sources", "store"),
    ),
    "text": ("model", "user", "tag", "kind", "service_tier"),
    "object": ("logit_bias", "prediction", "stream_options", "metadata", "response_format"),
}
# Of the right type and all the same impossible.
IMPOSSIBLE = [
    {"logit_bias": {"028": 5, "28": -5}}, {"logit_bias": {"1": 1e400}},
    {"n": 0}, {"n": -1}, {"n": 1025}, {"max_tokens": 0}, {"max_tokens": -5}, {"seed": 2**64},
    {"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 2},
    {"presence_penalty": 3}, {"repetition_penalty": 0}, {"min_tokens": 30, "max_tokens": 20},
    {"stop": ["a"] * 1000}, {"stop": [""]}, {"stop": [5]}, {"stop_token_ids": [-1]},
    {"stop_token_ids": [10**6]}, {"logit_bias": {"a": 1}}, {"logit_bias": {"-1": 1}},
    {"logit_bias": {"3": 101}}, {"logit_bias": {"999999": 1}}, {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"3": "1"}}, {"allowed_token_ids": []}, {"allowed_token_ids": [96]},
    {"banned_token_ids": list(range(96))}, {"deadline": 0}, {"deadline": -1},
    {"speculative": ["nobody"]}, {"speculative": -1}, {"speculative": "lookup"},
    {"speculative": [["lookup"]]}, {"speculative": {}}, {"prediction": {"type": "content"}},
    {"prediction": {"type": "other", "content": "x"}},
    {"prediction": {"type": "content", "content": [{"type": "image"}]}},
    {"prediction": {"type": "content", "content": [5]}},
    {"response_format": {"type": "xml"}}, {"structured_outputs": {"json": 5}},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"what": 1}}, {"grammar": "x"}, {"guided_json": {}},
    {"best_of": 2}, {"suffix": "x"}, {"functions": []}, {"": 1}, {"\ud800": 1}, {"__class__": 1},
]  # fmt: skip
CHATS = [
    {}, {"messages": []}, {"messages": "hi"}, {"messages": [5]}, {"messages": [{}]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": 5, "content": "x"}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": USER, "top_logprobs": 3}, {"messages": USER, "logprobs": 5},
    {"messages": USER, "logprobs": True, "top_logprobs": 21},
    {"messages": USER, "logprobs": True, "top_logprobs": -1},
    {"messages": USER, "max_tokens": 5, "max_completion_tokens": 6},
    {"messages": USER, "tools": [{}]}, {"messages": USER, "tools": "x"},
    {"messages": USER, "tools": [{"type": "function", "function": {"name": None}}]},
    {"messages": USER, "tool_choice": "required"}, {"messages": USER, "tool_choice": {"a": 1}},
    {"messages": USER, "modalities": ["audio"]}, {"messages": USER, "prompt": "x"},
    {"messages": USER, "chat_template_kwargs": {"messages": []}},
    {"messages": USER, "chat_template_kwargs": {"self": 1}},
    {"messages": [*USER, {"role": "assistant", "content": None}]},
    {"messages": [*USER, {"role": "assistant"}]},
    {"messages": [*USER, {"role": "assistant", "tool_calls": 5}]},
    {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
    {"messages": [*USER, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]},
]  # fmt: skip
# Faults that the engine finds, which knows them by other names: they are told by the client's.
NAMED = [
    ({"speculative": ["nobody"]}, "speculative"), ({"speculative": -1}, "speculative"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_tokens": 0}, "max_tokens"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
     "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 5}}}],
      "tool_choice": "required"}, "tools"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
    ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
]  # fmt: skip
PROMPTS = [
    None, "", [], 5, {}, True, [""], [[]], ["the", 5], [[1], "the", []], [1, 2.5], [-1], [96],
    [10**30], ["the"] * 40, "a" * 300, list(range(1, 30)) * 10, "\ud800", [[True]], [[[1]]],
]  # fmt: skip


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def client():
    tokenizer = Tokenizer.from_transformers(toy_tokenizer(TEMPLATE))
    with serving(make_llm(target=FakeTarget(96), tokenizer=tokenizer)) as found:
        yield found
        body = {"prompt": "the cat", **GREEDY}  # it still serves
        assert asked(found, COMPLETIONS, **body)["usage"]["completion_tokens"] == 24


def test_bodies_that_are_none(client):
    for path in (COMPLETIONS, CHAT):
        for name, body in BODIES.items():
            error = refusal(client.post(path, content=body))
            assert error["type"] == "invalid_request_error", name


@pytest.mark.parametrize("kind", FIELDS)
def test_wrong_types_in_every_field(client, kind):
    for field in FIELDS[kind]:
        for value in WRONG[kind]:
            body = {"prompt": "the", "max_tokens": 2, field: value}
            if (field, value) in (("temperature", 1e308), ("max_tokens", 10**400)):
                continue  # as good as any
            response = client.post(COMPLETIONS, json=body)
            status = 404 if field == "model" and isinstance(value, str) else 400
            error = refusal(response, status)
            assert field in error["message"] or error["param"] == field, (body, error)


def test_values_that_cannot_be(client):
    for changes in IMPOSSIBLE:
        for path, prompt in ((COMPLETIONS, {"prompt": "the"}), (CHAT, {"messages": USER})):
            response = client.post(path, content=json.dumps(prompt | changes))
            assert response.status_code == 400, changes
            refusal(response)


def test_conversations_that_cannot_be(client):
    for body in CHATS:
        refusal(client.post(CHAT, content=json.dumps(body)))


def test_faults_are_told_by_the_names_of_the_fields(client):
    for changes, field in NAMED:
        body = json.dumps({"messages": USER} | changes)
        error = refusal(client.post(CHAT, content=body))
        assert error["param"] == field, error
        said = error["message"].removeprefix("the ")
        assert field == "messages" or said.startswith(field), error


def test_prompts_that_cannot_be(client):
    for prompt in PROMPTS:
        refusal(client.post(COMPLETIONS, content=json.dumps({"prompt": prompt})))
    error = refusal(client.post(COMPLETIONS, json={"prompt": "a" * 256}))
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]


def test_texts_that_cannot_fit_are_refused_before_they_are_tokenised(client, monkeypatch):
    def encode(self, text, add_special_tokens=True):
        assert len(text) <= 2000
        return [1] * len(text)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    huge = "a" * 10**6
    for path, changes, param in (
        (COMPLETIONS, {"prompt": huge}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", huge]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": huge}]}, "messages"),
        (CHAT, {"messages": USER, "prediction": {"type": "content", "content": huge}},
         "prediction"),
    ):  # fmt: skip
        error = refusal(client.post(path, json=changes))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "more than 256 tokens can hold" in error["message"]


def test_null_is_a_field_left_out(client):
    body = dict.fromkeys(("stop", "n", "seed", "logit_bias", "suffix", "user", "top_p"))
    found = asked(client, COMPLETIONS, prompt="the cat", **GREEDY, **body)
    assert found["usage"]["completion_tokens"] == 24


def test_paths_and_methods_there_are_not(client):
    for method, path, status in (
        ("GET", COMPLETIONS, 405), ("PUT", CHAT, 405), ("DELETE", "/v1/models", 405),
        ("GET", "/health/", 404), ("GET", "/v1/engines", 404),
        ("POST", "/v1/embeddings", 404), ("GET", "/%00", 404),
    ):  # fmt: skip
        refusal(client.request(method, path), status)
    assert client.get(COMPLETIONS).headers["allow"] == "POST"


def test_a_body_that_an_upgrade_of_the_protocol_swallowed(client):
    for path in (COMPLETIONS, CHAT):
        error = refusal(client.post(path, content=b"", headers={"Upgrade": "h2c"}))
        assert "upgrade to 'h2c'" in error["message"]


def test_a_request_id_is_echoed_if_it_can_be_one(client):
    assert client.get("/health", headers={"X-Request-Id": "abc-7"}).headers["x-request-id"] == (
        "abc-7"
    )
    for wrong in ("x" * 200, ""):
        found = client.get("/health", headers={"X-Request-Id": wrong}).headers["x-request-id"]
        assert len(found) == 32


def test_bodies_that_are_too_large_are_refused_before_they_are_read():
    llm = make_llm()
    with serving(llm, max_body_bytes=1000) as client:
        refusal(client.post(COMPLETIONS, json={"prompt": "a" * 2000}), 413)
        asked(client, COMPLETIONS, prompt="the", **GREEDY)

        def endless():
            for _ in range(100):
                yield b"a" * 100

        refusal(client.post(COMPLETIONS, content=endless()), 413)


def test_a_body_that_never_comes_is_given_up(monkeypatch):
    import asyncio

    monkeypatch.setattr("outrider.serving.http.BODY_SECONDS", 0.05)
    app, sent = create_app(make_llm()), []

    async def call():
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}

        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        await app(scope, receive, send)

    with loop_with(app) as runner:
        runner.run(call())
    assert sent[0]["status"] == 408
