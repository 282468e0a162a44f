"""Forms of answers, alone, beside tools and behind thoughts: refused alike, followed alike."""

import json

import numpy as np
import pytest
from chat_cases import TOY, USER, WEATHER, asked, toy_server
from serving_cases import CHAT, COMPLETIONS, events, refusal

from outrider.grammar import Grammars
from outrider.serving.structure import Signature, answer_rules, behind_thoughts, call_rules, whole

pytest.importorskip("llguidance")

HOSTILE = [
    {}, {"json": {"type": "object"}, "regex": "a"}, {"jsn": {"type": "object"}}, {"": 1},
    *({"json": value} for value in (5, [1], True, False, "5", "[1]", "true", "{", "", "\ud800")),
    {"json": "[" * 100_000}, {"json": '{"a":' * 3000 + "1" + "}" * 3000},
    {"json": '{"type": "nonsense"}'}, {"json_object": False}, {"json_object": {}},
    *({"choice": value} for value in ("abc", 5, [], [""], [5], [["a"]], {"a": 1}, ["\ud800"])),
    *({"regex": value} for value in (5, ["a"], {}, "(", "[", "\ud800")),
    *({"grammar": value} for value in (5, [], "start: nothing", "\ud800")),
]  # fmt: skip
WAYS = {"plain": {}, "tools": {"tools": [WEATHER], "parallel_tool_calls": False}}


@pytest.mark.parametrize("settings", [{}, {"reasoning_parser": "think"}], ids=["", "thoughts"])
def test_what_is_no_form_is_refused_whatever_stands_beside_it(settings):
    with toy_server(**settings) as client:
        for form in HOSTILE:
            for way, more in WAYS.items():
                body = {"messages": USER, "max_tokens": 1, "structured_outputs": form, **more}
                response = client.post(CHAT, content=json.dumps(body))
                assert response.status_code == 400, (way, str(form)[:80], response.text)
                assert refusal(response)["param"] == "structured_outputs"


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b/c"]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORMS = [
    *({"regex": one} for one in ("a/b", r"a\/b", r"a\\/b", r"a\\\/b", "/", "", "a\nb", r"a\nb")),
    *({"regex": one} for one in ("\\", "a\\", r"a\\", "a\\\nb", 'a"b', "a#b", "a|b")),
    *({"regex": one} for one in ("[/]", "[^/a]+", "(?i)ab")),
    {"choice": ["a/b", "a\\/b", 'a"b', "a\nb"]}, {"choice": ["//", "a#b"]},
    {"json": SCHEMA}, {"json": json.dumps(SCHEMA)}, {"json": {}}, {"json_object": True},
]  # fmt: skip
TEXTS = [
    *("a/b", "a\\/b", "/", "//", "", "a\nb", "a\\", 'a"b', "a#b", "AB", "a", "b", "bc"),
    *('{"a": "b/c"}', "{" + 40 * " " + '"a": "b/c"}', "{" + 41 * " " + '"a": "b/c"}', "{}", "5"),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOY, 96, [2])


def followed(grammars: Grammars, form, before: str = "") -> list[str]:
    """The texts that have the form."""
    found = []
    for text in TEXTS:
        state = grammars.follow(form)
        ids = np.array(TOY.encode(before + text, add_special_tokens=False), np.int32)
        if state._read(ids) and state._matcher.is_accepting():
            found.append(text)
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_is_the_same_alone_behind_thoughts_and_beside_tools(grammars, form):
    expected = followed(grammars, form)
    rules = answer_rules(form)
    assert rules is not None and expected
    assert followed(grammars, whole(rules)) == expected
    assert followed(grammars, behind_thoughts(rules, True), "</think>") == expected
    tools = call_rules([Signature("f", None, False)], False, False, form, False)
    assert followed(grammars, whole(tools)) == expected


def test_a_schema_as_text_has_as_few_blanks_behind_thoughts():
    text = "{" + 60 * " " + '"a": "b/c"}'
    body = {"messages": USER, "temperature": 0, "max_tokens": 120}
    with toy_server(text, reasoning_parser="think") as client:
        for schema in (SCHEMA, json.dumps(SCHEMA)):
            form = {"structured_outputs": {"json": schema}}
            [choice] = asked(client, CHAT, **body, **form)["choices"]
            assert json.loads(choice["message"]["content"]) == {"a": "b/c"}
            assert 41 * " " not in choice["message"]["content"]


HALF = {"regex": "[a-c]{6}é"}  # the toy has the first byte of the last letter, and no second one


@pytest.mark.parametrize(
    ("param", "form"),
    [
        ("structured_outputs", {"structured_outputs": HALF}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "string", "pattern": "^[a-c]{6}é$"}}}}),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_go_on_is_an_error_and_no_answer(param, form):
    with toy_server() as client:
        for path, ask in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "hi"})):
            body = ask | {"max_tokens": 40, "n": 2, "seed": 1} | form
            error = refusal(client.post(path, json=body))
            assert error["param"] == param and error["type"] == "invalid_request_error"
            assert error["message"].startswith(f"{param} cannot be followed any further: ")
            *parts, last = events(client.post(path, json=body | {"stream": True}).text)
            assert last == {"error": error}
            assert all(choice["finish_reason"] is None for p in parts for choice in p["choices"])
