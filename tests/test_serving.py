"""The endpoints: what OpenAI's clients ask for, whole and streamed, and the engine's own text."""

import pytest
from engine_cases import exact
from fakes import ALPHABET, FakeTarget, ReplaySource
from serving_cases import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    USER,
    VOCAB,
    asked,
    events,
    make_llm,
    refusal,
    serving,
    streamed,
)

from outrider import SamplingParams
from outrider.results import StreamChunk
from outrider.serving.answers import ChatAnswer, CompletionAnswer
from outrider.serving.errors import to_event
from outrider.serving.protocol import ChatCall, CompletionCall, StreamOptions


def plain(prompt: str, **changes) -> "tuple":
    values = {"temperature": 0, "max_tokens": 24, "ignore_eos": True} | changes
    return tuple(make_llm(speculative_config=None).generate(prompt, SamplingParams(**values)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_the_text_of_the_python_api(stream):
    [expected] = plain("the cat")
    with serving() as client:
        body = {"prompt": "the cat", **GREEDY}
        if stream:
            chunks = streamed(client, COMPLETIONS, **body)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert ends[-1] == "length" and set(ends[:-1]) <= {None}
            assert {chunk["object"] for chunk in chunks} == {"text_completion"}
            assert len({chunk["id"] for chunk in chunks}) == 1
        else:
            found = asked(client, COMPLETIONS, **body)
            text = found["choices"][0]["text"]
            assert found["object"] == "text_completion" and found["id"].startswith("cmpl-")
            assert found["usage"] == {
                "prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28,
                "prompt_tokens_details": {"cached_tokens": 0},
                "completion_tokens_details": {
                    "reasoning_tokens": 0,
                    "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
                },
            }  # fmt: skip
    assert text == expected.outputs[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_the_text_of_the_python_api(stream):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [expected] = make_llm(speculative_config=None).chat(USER, params)
    with serving() as client:
        body = {"messages": USER, **GREEDY}
        if stream:
            chunks = streamed(client, CHAT, **body)
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        else:
            [choice] = asked(client, CHAT, **body)["choices"]
            assert choice["message"]["role"] == "assistant"
            assert choice["finish_reason"] == "length"
            text = choice["message"]["content"]
    assert text == expected.outputs[0].text


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context():
    with serving(make_llm(target=FakeTarget(VOCAB, max_model_len=64))) as client:
        found = asked(client, CHAT, messages=USER, temperature=0, ignore_eos=True)
        assert found["usage"]["total_tokens"] == 64
        assert found["choices"][0]["finish_reason"] == "length"
        default = asked(client, COMPLETIONS, prompt="the", temperature=0, ignore_eos=True)
        assert default["usage"]["completion_tokens"] == 16


def test_usage_of_a_stream_comes_last_and_only_when_asked_for():
    with serving() as client:
        body = {"messages": USER, **GREEDY}
        assert all("usage" not in chunk for chunk in streamed(client, CHAT, **body))
        *chunks, last = streamed(client, CHAT, **body, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 24
        assert refusal(client.post(CHAT, json={**body, "stream_options": {}}))["param"] == (
            "stream_options"
        )


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_independent_and_usage_is_their_sum(stream):  # B21
    body = {"prompt": "the cat", "n": 3, "seed": 5, "temperature": 1, "max_tokens": 12}
    params = SamplingParams(n=3, seed=5, temperature=1, max_tokens=12)
    [expected] = make_llm(speculative_config=None).generate("the cat", params)
    texts = [output.text for output in expected.outputs]
    assert len(set(texts)) == 3
    with serving() as client:
        if stream:
            chunks = streamed(client, COMPLETIONS, **body, stream_options={"include_usage": True})
            found = [
                "".join(
                    choice["text"]
                    for chunk in chunks
                    for choice in chunk["choices"]
                    if choice["index"] == index
                )
                for index in range(3)
            ]
            usage = chunks[-1]["usage"]
        else:
            whole = asked(client, COMPLETIONS, **body)
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
            found, usage = [choice["text"] for choice in whole["choices"]], whole["usage"]
    assert found == texts
    assert usage["completion_tokens"] == sum(len(o.token_ids) for o in expected.outputs)
    assert usage["prompt_tokens"] == 4


def test_many_prompts_in_one_call_keep_their_order_and_their_choices():
    prompts = ["the cat", [3, 1, 20], "a dog"]
    with serving() as client:
        body = {"prompt": prompts, "n": 2, "seed": 1, "temperature": 1, "max_tokens": 8}
        found = asked(client, COMPLETIONS, **body)
        single = [asked(client, COMPLETIONS, **(body | {"prompt": one})) for one in prompts]
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    alone = [choice["text"] for one in single for choice in one["choices"]]
    assert [choice["text"] for choice in found["choices"]] == alone
    total = sum(one["usage"]["total_tokens"] for one in single)
    assert found["usage"]["total_tokens"] == total


def test_prompts_of_ids_and_text_are_the_same_prompt():
    with serving() as client:
        ids = ALPHABET.encode("the cat")
        for prompt in (ids, [ids], ["the cat"]):
            found = asked(client, COMPLETIONS, prompt=prompt, **GREEDY)
            assert found["choices"][0]["text"] == plain("the cat")[0].outputs[0].text


def drafted(prompt: str, **changes):
    """A server whose source drafts the plain text, eight tokens at a time."""
    [expected] = plain(prompt, **changes)
    outputs = dict.fromkeys("01", expected.outputs[0].token_ids)  # of the first two calls
    source = ReplaySource(outputs, exact)
    return expected.outputs[0], make_llm(source)


def test_stop_strings_end_the_text_where_plain_decoding_ends_it():  # B05, B06
    whole = plain("the cat", max_tokens=40)[0].outputs[0].text
    for start, length in ((3, 1), (5, 2), (6, 3), (12, 4), (9, 6)):
        stop = whole[start : start + length]
        end = whole.index(stop)
        source = ReplaySource({"0": plain("the cat", max_tokens=40)[0].outputs[0].token_ids}, exact)
        with serving(make_llm(source)) as client:
            body = {"prompt": "the cat", **GREEDY, "max_tokens": 40, "stop": ["zzzz", stop]}
            chunks = streamed(client, COMPLETIONS, **body)
            assert "".join(c["choices"][0]["text"] for c in chunks) == whole[:end]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert chunks[-1]["choices"][0]["stop_reason"] == stop


@pytest.mark.parametrize("speculates", [False, True])
def test_ids_text_and_logprobs_end_at_one_place(speculates):  # B08, B20
    whole = plain("the cat")[0].outputs[0].text
    params = {"stop": whole[7:9], "logprobs": 2}
    expected, llm = drafted("the cat", **params)
    if not speculates:
        llm = make_llm(speculative_config=None)
    body = {"prompt": "the cat", **GREEDY, **params, "return_token_ids": True}
    with serving(llm) as client:
        chunks = streamed(client, COMPLETIONS, **body)
        [choice] = asked(client, COMPLETIONS, **body, speculative=False)["choices"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert expected.logprobs is not None
    ids = [i for part in parts for i in part["token_ids"]]
    assert ids == choice["token_ids"] == expected.token_ids
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [one for part in parts for one in part["logprobs"][name]]
        assert joined == choice["logprobs"][name]
        assert len(joined) == len(ids)
    told = [entry[i].logprob for entry, i in zip(expected.logprobs, ids, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(told)
    assert all(value < 0 for value in told)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"]} <= {2, 3}


def test_logprobs_of_a_chat_have_the_likeliest_in_order():
    with serving() as client:
        body = {"messages": USER, "seed": 3, "max_tokens": 12, "ignore_eos": True}
        body |= {"logprobs": True, "top_logprobs": 3, "temperature": 2}
        [choice] = asked(client, CHAT, **body)["choices"]
        chunks = streamed(client, CHAT, **body)
        bare = asked(client, CHAT, **(body | {"top_logprobs": 0}))["choices"][0]["logprobs"]
    found = choice["logprobs"]["content"]
    assert len(found) == 12
    assert [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    for entry in found:
        top = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        assert entry["logprob"] <= top[0]
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    assert all(entry["top_logprobs"] == [] for entry in bare["content"])


def test_every_parameter_of_the_sampling_reaches_the_engine():
    settings = {
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 12,
        "min_p": 0.01,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "max_tokens": 20,
        "stop": ["q"],
        "stop_token_ids": [5],
        "banned_token_ids": [9],
        "include_stop_str_in_output": True,
    }
    for changes in ({}, {"seed": 8}, {"logit_bias": {"3": 4.5}}, {"allowed_token_ids": [1, 2, 3]}):
        given = settings | changes
        bias = {int(k): v for k, v in given.get("logit_bias", {}).items()} or None
        params = SamplingParams(**(given | {"logit_bias": bias}))
        [expected] = make_llm(speculative_config=None).generate("the cat", params)
        with serving() as client:
            [choice] = asked(client, COMPLETIONS, prompt="the cat", **given)["choices"]
        assert choice["text"] == expected.outputs[0].text
        assert choice["finish_reason"] == expected.outputs[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_before_every_choice(stream):
    with serving() as client:
        body = {"prompt": ["the cat", "a dog"], "n": 2, "echo": True, **GREEDY}
        if stream:
            chunks = streamed(client, COMPLETIONS, **body)
            texts = [""] * 4
            for chunk in chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            texts = [choice["text"] for choice in asked(client, COMPLETIONS, **body)["choices"]]
    expected = [one + plain(one)[0].outputs[0].text for one in ("the cat", "a dog")]
    assert texts == [expected[0], expected[0], expected[1], expected[1]]


def test_halves_of_characters_never_show():  # B29
    bias = dict.fromkeys(ALPHABET.encode("€🙂é"), 100.0)
    changes = {"logit_bias": bias, "temperature": 1.0, "seed": 2}
    expected, llm = drafted("user, the cat\n", **changes)
    assert len(set(expected.token_ids)) > 2
    with serving(llm) as client:
        body = {"messages": USER, **GREEDY, **changes}
        body["logit_bias"] = {str(token): value for token, value in bias.items()}
        [choice] = asked(client, CHAT, **body)["choices"]
        chunks = streamed(client, CHAT, **body)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == choice["message"]["content"] == expected.text
    for delta in deltas:  # what is no character stays none, but none is cut in two
        assert delta.count("\ufffd") <= expected.text.count("\ufffd")


def test_the_model_list_and_unknown_models():
    with serving(served_model_name="toy") as client:
        [model] = client.get("/v1/models").json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 256)
        assert client.get("/v1/models/toy").json() == model
        assert asked(client, COMPLETIONS, prompt="the", model="toy")["model"] == "toy"
        for response in (
            client.post(COMPLETIONS, json={"prompt": "the", "model": "gpt-4"}),
            client.get("/v1/models/gpt-4"),
        ):
            assert refusal(response, 404)["code"] == "model_not_found"


def test_without_a_chat_template_chats_are_refused_and_completions_work():  # X7
    from toy_models import toy_tokenizer

    from outrider.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_transformers(toy_tokenizer())
    llm = make_llm(target=FakeTarget(96), tokenizer=tokenizer)
    with serving(llm) as client:
        error = refusal(client.post(CHAT, json={"messages": USER}))
        assert "no chat template" in error["message"]
        assert (
            asked(client, COMPLETIONS, prompt="the", **GREEDY)["usage"]["completion_tokens"] == 24
        )


def test_the_first_event_says_what_a_late_event_says():
    with serving() as client:
        response = client.post(COMPLETIONS, json={"prompt": "the", "stream": True})
        first, *rest = events(response.text)
        assert all(chunk["id"] == first["id"] for chunk in rest)
        assert all(chunk["created"] == first["created"] for chunk in rest)


ODD = [
    "word",
    '"quoted" \\ and\n',
    "日本 🙂",
    "\ud83d",
    "\0\x1f\u2028",
    "</script>",
    "data: x\n\n",
    "e\u0301",
]


@pytest.mark.parametrize("usage", [False, True])
def test_events_of_text_alone_are_those_that_are_made_from_whole_bodies(usage):
    options = StreamOptions(include_usage=usage)
    calls = [
        (CompletionAnswer, CompletionCall(prompt="x", stream_options=options)),
        (ChatAnswer, ChatCall(messages=[], stream_options=options)),
    ]
    for kind, call in calls:
        fast, slow = (kind(call, 'm"\\', "id", 5) for _ in range(2))
        assert fast.says_only_text
        for index in (0, 3):
            for number, text in enumerate([*ODD, "", *ODD, "end"]):
                chunk = StreamChunk("1", index, text, [5], ["target"])
                chunk.finish_reason = "stop" if text == "end" else None
                bodies = slow.chunk(index, chunk)
                assert fast.events(index, chunk) == b"".join(map(to_event, bodies)), number
        assert set(fast._frames) == {0, 3} and not slow._frames


@pytest.mark.parametrize(
    "more",
    [{"return_token_ids": True}, {"return_token_sources": True}, {"logprobs": True},
     {"tools": [{"type": "function", "function": {"name": "f"}}]}],
)  # fmt: skip
def test_events_that_say_more_are_always_made_whole(more):
    assert not ChatAnswer(ChatCall(messages=[], **more), "m", "id").says_only_text
    if "logprobs" in more:
        more = {"logprobs": 0}
    if "tools" not in more:
        assert not CompletionAnswer(CompletionCall(prompt="x", **more), "m", "id").says_only_text
