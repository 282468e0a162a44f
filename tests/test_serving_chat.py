"""Tools, thoughts, predictions and switches, with a target that says what the test wants."""

import json

import numpy as np
import pytest
from chat_cases import (
    TOKENIZER,
    USER,
    WEATHER,
    SayTarget,
    both,
    functions,
    server_that_says,
    tools_text,
    toy_server,
)
from fakes import FakeTarget
from serving_cases import CHAT, COMPLETIONS, asked, make_llm, refusal, serving, streamed
from toy_models import toy_tokenizer

from outrider.serving.parsers import ChatParser, Said
from outrider.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
TOOLS = f"system, {tools_text(WEATHER)}\nuser, hi\n"


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_tool_calls_are_read_from_text_and_stream(drafts):  # B29
    with server_that_says(f"Let me see. \n{CALL}{OTHER}", TOOLS, drafts) as client:
        body = {"messages": USER, "tools": [WEATHER], "temperature": 0}
        choice, stream, _ = both(client, **body)
    expected = [
        {"name": "weather", "arguments": '{"city": "Köln 🙂"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert functions(choice["message"]["tool_calls"]) == functions(stream["calls"]) == expected
    assert choice["message"]["content"] == "Let me see."
    assert choice["finish_reason"] == stream["finish_reason"] == "tool_calls"


def test_one_block_may_close_a_call_and_open_the_next():  # B29
    with server_that_says(OTHER + OTHER, TOOLS, 64) as client:
        body = {"messages": USER, "tools": [WEATHER], "temperature": 0}
        choice, stream, deltas = both(client, **body)
    assert len(functions(choice["message"]["tool_calls"])) == 2
    assert choice["message"]["content"] is None
    assert len(functions(stream["calls"])) == 2 and len(deltas) <= 6


def test_without_tools_the_text_stays_text():
    with server_that_says(OTHER) as client:
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            choice, stream, _ = both(client, messages=USER, temperature=0, **body)
            assert choice["message"]["content"] == OTHER == stream["message"]["content"]
            assert choice["finish_reason"] == "stop"


def test_what_only_looks_like_a_call_is_content():
    text = "<tool_call>{no json}</tool_call> and <tool_call> 5"
    with server_that_says(text, TOOLS) as client:
        choice, stream, _ = both(client, messages=USER, tools=[WEATHER], temperature=0)
    assert choice["message"]["content"] == text == stream["message"]["content"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("drafts", [1, 4, 32])
def test_thoughts_are_told_apart(drafts):
    text = "<think>\nIs 日本 < 本?\n</think>\n\n日本 & </think>"
    with server_that_says(text, drafts=drafts, reasoning_parser="think") as client:
        choice, stream, deltas = both(client, messages=USER, temperature=0)
        usage = asked(client, CHAT, messages=USER, temperature=0)["usage"]
    assert choice["message"] == stream["message"]
    assert choice["message"]["reasoning_content"] == "Is 日本 < 本?\n"
    assert choice["message"]["content"] == "日本 & </think>"
    thoughts = len(TOKENIZER.encode(text.partition("\n\n")[0]))
    assert thoughts < usage["completion_tokens"] and usage["prompt_tokens"] > 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == thoughts
    assert not any("\ufffd" in str(delta) for delta in deltas)
    with server_that_says(text) as client:
        choice, *_ = both(client, messages=USER, temperature=0)
        assert choice["message"]["content"] == text


def test_thoughts_that_the_prompt_has_opened():
    prompt = [{"role": "user", "content": "hi<think>"}]
    with server_that_says("hm</think>yes", "user, hi<think>\n", reasoning_parser="think") as client:
        choice, *_ = both(client, messages=prompt, temperature=0)
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("prompt", "thoughts", "rest"),
    [("hi", "<think>hm", ""), ("hi<think>", "hm", ""), ("hi<think>", "hm</think>", "a"),
     ("hi", "", "a<think>hm</think>"), ("hi", "", "")],
)  # fmt: skip
def test_tokens_of_thoughts_are_counted(prompt, thoughts, rest):
    text, count = thoughts + rest, len(TOKENIZER.encode(thoughts))
    messages = [{"role": "user", "content": prompt}]
    body = {"messages": messages, "temperature": 0, "max_tokens": len(TOKENIZER.encode(text)) or 1}
    with server_that_says(text, f"user, {prompt}\n", reasoning_parser="think") as client:
        for usage in (
            asked(client, CHAT, **body)["usage"],
            streamed(client, CHAT, **body, stream_options={"include_usage": True})[-1]["usage"],
        ):
            assert usage["completion_tokens_details"]["reasoning_tokens"] == count


def test_earlier_calls_and_their_results_are_told_to_the_model():
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "f", "arguments": '{"a": 1}'}  # type: ignore[assignment]
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "developer", "content": "be brief"},
    ]
    told = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    prompt = f"user, hi\nassistant, {told}\ntool, 7\nsystem, be brief\n"
    with server_that_says("seven", prompt) as client:
        [choice] = asked(client, CHAT, messages=messages, temperature=0)["choices"]
    assert choice["message"]["content"] == "seven"


def test_templates_that_know_tools_are_given_them():
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}{{ m['content'] }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.a }}{% endfor %}{% endfor %}{{ shout }}"
    )
    llm = make_llm(
        target=FakeTarget(96), tokenizer=Tokenizer.from_transformers(toy_tokenizer(template))
    )
    call = {"function": {"name": "f", "arguments": '{"a": 57}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    with serving(llm) as client:
        body = {"messages": messages, "tools": [WEATHER], "max_tokens": 1}
        body |= {"chat_template_kwargs": {"shout": "HEY"}, "return_token_ids": True}
        found = asked(client, CHAT, **body)
    assert found["usage"]["prompt_tokens"] == len(llm.tokenizer.encode("weatherhi57HEY"))


def test_a_prediction_is_drafted_and_counted():
    text = "def f(x):\n    return x + 1\n" * 4
    target = SayTarget("user, hi\n", text)
    llm = make_llm(target=target, tokenizer=TOKENIZER, speculative_config="auto")
    body = {"messages": USER, "temperature": 0, "max_tokens": 200}
    with serving(llm) as client:
        bare = asked(client, CHAT, **body)
        details = bare["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
        for content in (
            text,
            [{"type": "text", "text": text[:30]}, {"type": "text", "text": text[30:]}],
        ):
            prediction = {"type": "content", "content": content}
            found = asked(client, CHAT, **body, prediction=prediction)
            details = found["usage"]["completion_tokens_details"]
            assert found["choices"][0]["message"]["content"] == text
            assert details["accepted_prediction_tokens"] > len(text) // 2
            assert details["rejected_prediction_tokens"] >= 0
        wrong = {"type": "content", "content": "something else, at length, " * 9}
        found = asked(client, CHAT, **body, prediction=wrong)
        assert found["choices"][0]["message"]["content"] == text
        details = found["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= len(text) // 2


def test_speculation_is_switched_per_request_and_the_text_stays():
    text = "one two three one two three one two three"
    bodies = {
        "default": {}, "true": {"speculative": True}, "false": {"speculative": False},
        "none": {"speculative": []}, "zero": {"speculative": 0}, "two": {"speculative": 2},
        "named": {"speculative": ["replay"]},
    }  # fmt: skip
    found = {}
    with server_that_says(text, drafts=5) as client:
        for name, body in bodies.items():
            body |= {"messages": USER, "temperature": 0, "return_token_sources": True}
            body |= {"include_metrics": True, "tag": "t", "kind": "chat", "priority": 3}
            found[name] = asked(client, CHAT, **body, deadline=9.5)
        refusal(client.post(CHAT, json={"messages": USER, "speculative": ["lookup"]}))
    sources = {}
    for name, answer in found.items():
        [choice] = answer["choices"]
        assert choice["message"]["content"] == text
        sources[name] = choice["token_sources"]
        assert len(sources[name]) == answer["usage"]["completion_tokens"]
    for name in ("default", "true", "named", "two"):
        assert "replay" in sources[name], name
    for name in ("false", "none", "zero"):
        assert set(sources[name]) == {"target"}, name
        assert found[name]["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    histogram = found["two"]["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert sum(histogram[3:]) == 0 < histogram[2]


def test_tokens_and_their_sources_are_streamed_when_asked_for():
    text = "one two three one two three"
    with server_that_says(text, drafts=4) as client:
        body = {"messages": USER, "temperature": 0, "return_token_sources": True}
        chunks = streamed(client, CHAT, **body, return_token_ids=True)
    parts = [chunk["choices"][0] for chunk in chunks if "token_ids" in chunk["choices"][0]]
    ids = [i for part in parts for i in part["token_ids"]]
    assert TOKENIZER.decode(ids) == text
    assert len([s for part in parts for s in part["token_sources"]]) == len(ids)
    given = [c for part in parts for c in part["token_confidences"]]
    assert given == [None] * len(ids)  # by a source that gives none


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(stream):
    with toy_server() as client:
        for seed in range(4):
            body = {"messages": USER, "response_format": FORMAT, "seed": seed, "max_tokens": 200}
            if stream:
                deltas = [c["choices"][0]["delta"] for c in streamed(client, CHAT, **body)]
                text = "".join(delta.get("content", "") for delta in deltas)
            else:
                text = asked(client, CHAT, **body)["choices"][0]["message"]["content"]
            found = json.loads(text)
            assert list(found) == ["ok", "n"] and found["n"] <= 99
        body = {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}}
        assert asked(client, COMPLETIONS, **body)["choices"][0]["text"] in ("yes", "no")


ANSWER = '{"ok": true, "n": 7}'


@pytest.mark.parametrize("given", [{"response_format": FORMAT}, {"structured_outputs": {
    "json_object": True}}, {"structured_outputs": {"regex": r"\{.+/?.*\}"}},
    {"structured_outputs": {"choice": [ANSWER, "no"]}}])  # fmt: skip
def test_thoughts_come_before_the_form(given):  # X2: they may end inside a draft
    thought = "<think>a {b} is </c>, no</think>"
    for text, prompt in ((thought + "\n" + ANSWER, "hi"), (thought[7:] + ANSWER, "hi<think>")):
        with toy_server(text, prompt, reasoning_parser="think") as client:
            messages = [{"role": "user", "content": prompt}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 200, **given}
            choice, stream, _ = both(client, **body)
        assert choice["message"] == stream["message"]
        assert choice["message"]["reasoning_content"] == "a {b} is </c>, no"
        assert choice["message"]["content"] == ANSWER


def test_what_has_no_form_is_not_said_behind_thoughts():
    text = "<think>a</think>so it is 7"
    with toy_server(text, reasoning_parser="think") as client:
        body = {"messages": USER, "temperature": 0, "max_tokens": 300, "response_format": FORMAT}
        [choice] = asked(client, CHAT, **body)["choices"]
    assert choice["message"]["reasoning_content"] == "a"
    assert choice["finish_reason"] == "stop"
    assert list(json.loads(choice["message"]["content"])) == ["ok", "n"]


def test_formats_that_cannot_be_followed_are_refused():
    forms = [
        *({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}),
        *({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}, {}),
        *({"type": "json_object", "more": 1}, {"type": "grammar"}),
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "what": 1}},
        *(
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, name: value}}
            for name, value in {"strict": "yes", "name": 5, "description": []}.items()
        ),
    ]
    with toy_server() as client:
        for form in forms:
            refusal(client.post(CHAT, json={"messages": USER, "response_format": form}))
        body = {"messages": USER, "structured_outputs": {"regex": "a("}}
        assert "unclosed group" in refusal(client.post(CHAT, json=body))["message"]
        both_of = {"response_format": FORMAT, "structured_outputs": {"json_object": True}}
        for body in (both_of, {"response_format": FORMAT, "min_tokens": 3},
                     {"structured_outputs": {"xml": 1}}, {"structured_outputs": {}}):  # fmt: skip
            refusal(client.post(CHAT, json={"messages": USER, **body}))


def test_a_call_that_the_end_cuts_off_is_read_once_its_json_is_whole():
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for end in range(len(text) + 1):
        parser = ChatParser(False, True)
        parts = [parser.push(text[:end]), parser.finish()]
        calls = [call.name for part in parts for call in part.calls]
        content = "".join(part.content for part in parts)
        is_whole = end > text.rindex("}")
        assert (calls, content) == ((["f"], "") if is_whole else ([], text[:end]))


def test_any_division_of_a_text_is_read_alike():
    tag = '<tool_call>{"name": "say", "arguments": {"a": "\\"</tool_call>", "b": 5}}</tool_call>'
    words = '<tool_call>it"s</tool_call> <tool_call>{"a": "</tool_call>'  # no calls, nor one string
    text = f" <think>a</thi>b</think> \n c <tool {CALL} {OTHER}{tag}\n d {words} {OTHER} <to"

    def read(parts: list[str]) -> Said:
        parser, said = ChatParser(True, True), Said()
        for one in [*map(parser.push, parts), parser.finish()]:
            said.reasoning += one.reasoning
            said.content += one.content
            said.calls += one.calls
        return said

    whole = read([text])
    assert whole.reasoning == "a</thi>b"
    assert [call.name for call in whole.calls] == ["weather", "clock", "say", "clock"]
    assert json.loads(whole.calls[2].arguments) == {"a": '"</tool_call>', "b": 5}
    assert words in whole.content
    random = np.random.default_rng(1)
    for _ in range(300):
        cuts = sorted(random.integers(0, len(text) + 1, random.integers(1, 40)).tolist())
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(parts) == whole
