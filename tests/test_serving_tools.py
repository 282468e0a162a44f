"""Calls that are forced, limited, or bound to a schema: by grammar, not by what is asked for."""

import json

import pytest
from chat_cases import both, functions, tools_text, toy_server
from serving_cases import CHAT, asked, refusal, serving

from outrider import LLM
from outrider.drafting.forced import ForcedSource

pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "pattern": "^[a-z]{1,5}$"}},
}


def tool(name: str, parameters: dict | None = None, **more) -> dict:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters}) | more
    return {"type": "function", "function": function}


WEATHER, CLOCK = tool("weather", CITY), tool("clock")
TOOLS = [WEATHER, CLOCK]
ASK = {
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 400,
    "logit_bias": {"93": -100},
}  # half of a character that the toy cannot end


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD = call_text("weather", '{"city": "bonn", "days": 3}')
TIME = call_text("clock", "{}")


def answers(text: str, tools: list[dict], thinks: bool = False, **body) -> tuple[dict, list[dict]]:
    """(message, functions called) of a model that would say the text, whole and streamed alike."""
    settings = {"reasoning_parser": "think"} if thinks else {}
    with toy_server(text, tools_text(*tools) + "hi", **settings) as client:
        choice, stream, _ = both(client, **ASK, tools=tools, **body)
    calls = functions(choice["message"].get("tool_calls", []))
    assert functions(stream["calls"]) == calls
    assert choice["finish_reason"] == stream["finish_reason"]
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    return choice["message"], calls


def check_weather(call: dict) -> None:
    assert call["name"] == "weather"
    found = json.loads(call["arguments"])
    assert list(found) == ["city", "days"] and found["days"] <= 9
    assert found["city"].isalpha() and len(found["city"]) <= 5


@pytest.mark.parametrize("said", ["no calls from me", GOOD, call_text("weather", '{"town": 5}')])
def test_a_call_can_be_required(said):
    message, calls = answers(said, [WEATHER], tool_choice="required")
    assert message["content"] is None and calls
    for call in calls:
        check_weather(call)
    if said == GOOD:
        assert [json.loads(call["arguments"]) for call in calls] == [{"city": "bonn", "days": 3}]


def test_several_calls_may_be_required_and_one_alone():
    _, calls = answers(f"{GOOD}\n{TIME}", TOOLS, tool_choice="required")
    assert [call["name"] for call in calls] == ["weather", "clock"]
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    _, calls = answers(f"{GOOD}\n{TIME}", TOOLS, **one)
    assert [call["name"] for call in calls] == ["weather"]


@pytest.mark.parametrize("said", [GOOD, TIME, "the time"])
def test_a_named_function_is_called_once(said):
    _, calls = answers(said + GOOD, TOOLS, tool_choice=named("clock"))
    assert calls == [{"name": "clock", "arguments": "{}"}]
    _, [call] = answers(said + TIME, TOOLS, tool_choice=named("weather"))
    check_weather(call)


def test_without_parallel_calls_there_is_one_at_most_and_words_stay_free():
    body = {"parallel_tool_calls": False}
    message, calls = answers(f"let me see. {GOOD}{TIME} then", TOOLS, **body)
    assert [call["name"] for call in calls] == ["weather"]
    assert message["content"] == "let me see."
    message, calls = answers("a <tool_cal or </tool_call> or so", TOOLS, **body)
    assert not calls and message["content"] == "a <tool_cal or </tool_call> or so"
    loose = call_text("weather", '{"town": 5}')  # not strict: any object
    _, [call] = answers(loose, TOOLS, **body)
    assert json.loads(call["arguments"]) == {"town": 5}


def test_strict_functions_are_called_by_their_schema_and_words_stay_free():
    strict = [tool("weather", CITY, strict=True), CLOCK]
    said = f"so: {GOOD} and {call_text('clock', '{}')} done"
    message, calls = answers(said, strict)
    assert [call["name"] for call in calls] == ["weather", "clock"]
    assert message["content"] == "so:anddone"  # blanks beside a call mean nothing
    message, [call] = answers(call_text("weather", '{"town": 5}')[:-15], strict)
    check_weather(call)
    message, calls = answers("no call", strict)
    assert message["content"] == "no call" and not calls
    empty = [tool("clock", strict=True)]  # no parameters, no arguments
    _, [call] = answers(call_text("clock", '{"a": 1}')[:-14], empty)
    assert call == {"name": "clock", "arguments": "{}"}


@pytest.mark.parametrize("choice", ["required", named("weather"), "auto"])
def test_calls_come_behind_thoughts(choice):
    strict = [tool("weather", CITY, strict=True)]
    thought = "<think>should i <tool_call> or so</think>\n"
    message, [call] = answers(thought + GOOD, strict, True, tool_choice=choice)
    assert message["reasoning_content"] == "should i <tool_call> or so"
    assert json.loads(call["arguments"]) == {"city": "bonn", "days": 3}


def test_an_answer_has_its_form_or_calls():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
    message, calls = answers(GOOD, TOOLS, response_format=form)
    assert message["content"] is None and len(calls) == 1
    message, calls = answers("words", TOOLS, response_format=form)
    assert not calls or message["content"] is None
    message, calls = answers('{"a": 1}', TOOLS, response_format=form)
    assert json.loads(message["content"]) == {"a": 1} and not calls
    message, [call] = answers('{"a": 1}', TOOLS, response_format=form, tool_choice=named("clock"))
    assert message["content"] is None and call["name"] == "clock"


def test_what_a_call_is_made_of_is_drafted_where_it_is_forced():
    with toy_server("", source=ForcedSource()) as client:
        body = {**ASK, "tools": [CLOCK], "return_token_sources": True}
        found = asked(client, CHAT, **body, tool_choice="required", parallel_tool_calls=False)
    [choice] = found["choices"]
    assert functions(choice["message"]["tool_calls"]) == [{"name": "clock", "arguments": "{}"}]
    sources = choice["token_sources"]
    assert found["usage"]["completion_tokens"] == len(sources)
    assert sources.count("forced") > 0.8 * len(sources)


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": named("clock"), "tools": [WEATHER]},
        {"tool_choice": named("clock")},
        *({"tools": TOOLS, "tool_choice": choice} for choice in ("any", 5, {}, [], named(""))),
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": 5}}},
        {"tools": TOOLS, "tool_choice": named("clock") | {"more": 1}},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
    ],
)
def test_choices_that_cannot_be_are_refused(body):
    with toy_server() as client:
        assert refusal(client.post(CHAT, json={**ASK, **body}))["param"] == "tool_choice"


def test_schemas_that_cannot_be_followed_are_refused_where_they_would_have_to_be():
    wrong = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    with toy_server() as client:
        for tools, body in (
            ([tool("f", wrong)], {"tool_choice": "required"}),
            ([tool("f", wrong, strict=True)], {}),
            (TOOLS, {"tool_choice": "required", "ignore_eos": True}),
        ):
            refusal(client.post(CHAT, json={**ASK, "tools": tools, **body}))
        for tools in ([tool("f", wrong)], [tool("f", wrong, strict=False)]):
            asked(client, CHAT, **ASK | {"max_tokens": 3}, tools=tools)


@pytest.mark.parametrize(
    ("tools", "param", "said"),
    [
        ([tool("")], "tools.0.function.name", "at least 1 character"),
        ([WEATHER, CLOCK, tool("clock", CITY)], "tools", "two functions have the name 'clock'"),
        ([tool("f", {"type": "string"})], "tools.0.function.parameters", 'of type "object"'),
        ([CLOCK, tool("f", {"type": 5})], "tools.1.function.parameters", 'of type "object"'),
        ([tool("f", {"type": ["object", "null"]})], "tools.0.function.parameters", "of type"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(tools, param, said):
    with toy_server() as client:
        for choice in ("auto", "required", "none"):
            body = {**ASK, "tools": tools, "tool_choice": choice}
            error = refusal(client.post(CHAT, json=body))
            assert error["param"] == param and said in error["message"]


@pytest.mark.model
@pytest.mark.parametrize("name", ["<|im_start|>", "a<|im_end|>b", "<|endoftext|>"])
def test_names_of_functions_are_no_special_tokens(name):
    llm = LLM(speculative_config=None)
    body = {"messages": [{"role": "user", "content": "What time is it?"}], "temperature": 0}
    body |= {"tools": [tool(name)], "tool_choice": "required", "parallel_tool_calls": False}
    with serving(llm) as client:
        [choice] = asked(client, CHAT, **body, max_tokens=60)["choices"]
    assert functions(choice["message"]["tool_calls"]) == [{"name": name, "arguments": "{}"}]
