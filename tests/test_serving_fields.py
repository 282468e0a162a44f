"""Every field of a call tells a stream what it tells a whole answer, and reaches the metrics."""

from typing import Any

import pytest
from chat_cases import TOKENIZER, WEATHER
from fakes import FakeTarget
from serving_cases import CHAT, COMPLETIONS, USER, asked, make_llm, serving, streamed
from test_serving_edge import sample

from outrider.serving.protocol import ChatCall, CompletionCall

# A value of every field that is not needed, other than what is meant without it.
VALUES: dict[str, Any] = {
    "model": "toy", "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3,
    "stop": ["zz"], "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"3": 1.0},
    "prediction": {"type": "content", "content": "the"}, "response_format": {"type": "text"},
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
    "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
    "stop_token_ids": [5], "allowed_token_ids": [3, 4, 5], "include_stop_str_in_output": True,
    "skip_special_tokens": False, "add_special_tokens": False, "priority": 1,
    "return_token_ids": True, "include_metrics": True, "banned_token_ids": [3],
    "speculative": False, "deadline": 5.0, "tag": "t", "kind": "k", "return_token_sources": True,
    "max_completion_tokens": 5, "tools": [WEATHER], "tool_choice": "none",
    "parallel_tool_calls": True, "modalities": ["text"], "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False, "echo": True, "structured_outputs": {},
}  # fmt: skip
OWN = {  # by endpoint, what the other knows otherwise
    COMPLETIONS: {"logprobs": 2},
    CHAT: {"logprobs": True, "top_logprobs": 2},
}
NEEDED = {"prompt", "messages", "stream", "stream_options"}
FORMS = {"structured_outputs"}  # told in the tests of forms: this tokenizer follows none
USAGE = {"stream_options": {"include_usage": True}}


def told(bodies: list[dict]) -> set[str]:
    """What is told at all, by its place; lists are as long as it takes to say it."""
    places: set[str] = set()

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                walk(part, f"{place}.{'message' if name == 'delta' else name}")
        elif isinstance(value, list) and place.count(".") < 4:
            for part in value:
                walk(part, place)
        elif value is not None:
            places.add(place)

    for body in bodies:
        walk({name: part for name, part in body.items() if name != "object"}, "")
    return places


@pytest.mark.parametrize(("path", "kind"), [(COMPLETIONS, CompletionCall), (CHAT, ChatCall)])
def test_a_stream_tells_what_a_whole_answer_tells(path, kind):
    values = VALUES | OWN[path]
    assert not kind.model_fields.keys() - values.keys() - NEEDED
    body = {"prompt": "the"} if path == COMPLETIONS else {"messages": USER}
    body |= {"max_tokens": 5, "temperature": 0, "seed": 1}
    llm = make_llm(
        target=FakeTarget(len(TOKENIZER.pieces), max_model_len=1024), tokenizer=TOKENIZER
    )
    with serving(llm, served_model_name="toy") as client:
        for field in kind.model_fields.keys() - NEEDED - FORMS:
            given = body | {field: values[field]}
            if field == "top_logprobs":
                given["logprobs"] = True
            whole = told([asked(client, path, **given)])
            assert told(streamed(client, path, **given, **USAGE)) == whole, field
            bare = told(streamed(client, path, **given))
            if field != "include_metrics":
                whole = {place for place in whole if not place.startswith(".usage")}
            assert bare == whole, field


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [True, False])
def test_the_tokens_that_are_asked_for_are_observed_by_either_name(field, stream):
    name = "vllm:request_params_max_tokens"
    with serving() as client:
        client.post(CHAT, json={"messages": USER, field: 7, "stream": stream})
        text = client.get("/metrics").text
    assert (sample(text, f"{name}_count"), sample(text, f"{name}_sum")) == (1, 7)
