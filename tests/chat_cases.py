"""Chats with targets that say what a test wants, and their answers taken apart."""

import json

import numpy as np
import pytest
from fakes import ROOT, FakeTarget, FakeTokenizer, ReplaySource, path_hash
from serving_cases import CHAT, asked, make_llm, serving, streamed
from toy_models import toy_tokenizer

from outrider import Draft, DraftSource, ScriptedSource
from outrider.serving.chat import TOOLS_PROMPT
from outrider.tokenizer import Tokenizer

BYTES = [b"<eos>", *(bytes([c]) for c in range(1, 256))]
WORDS = [b"<tool_call>", b"</tool_call>", b"</thi", b"nk>", b'"name": ', b'{"', "日本".encode()[:4]]
TOKENIZER = FakeTokenizer([*BYTES, *WORDS], special=[0])
TOY = Tokenizer.from_transformers(toy_tokenizer())
USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "of a city", "parameters": {"type": "object"}}}  # fmt: skip


class SayTarget(FakeTarget):
    """Says one text after one prompt, and then ends."""

    def __init__(self, prompt: str, text: str, tokenizer=TOKENIZER, eos: int = 0) -> None:
        super().__init__(96 if eos else len(TOKENIZER.pieces), max_model_len=2048)
        self.says: dict[int, int] = {}
        path = ROOT
        for token in tokenizer.encode(prompt):
            path = path_hash(path, token)
        for token in [*tokenizer.encode(text), eos]:
            self.says[path] = token
            path = path_hash(path, token)

    def logits_of(self, path: int) -> np.ndarray:
        logits = super().logits_of(path)
        if path in self.says:
            logits[self.says[path]] = 1000.0
        return logits


def server_that_says(text: str, prompt: str = "user, hi\n", drafts: int = 7, **settings):
    """Drafts come in blocks, so that tags and characters are divided anyhow."""
    outputs = {str(call): [*TOKENIZER.encode(text), 0] for call in range(9)}
    source = ReplaySource(outputs, num_tokens=drafts)
    target = SayTarget(prompt, text)
    return serving(make_llm(source, target=target, tokenizer=TOKENIZER), **settings)


def both(client, **body) -> tuple[dict, dict, list[dict]]:
    """(choice, the same put together from a stream, its deltas)."""
    [choice] = asked(client, CHAT, **body)["choices"]
    chunks = streamed(client, CHAT, **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = {"role": deltas[0]["role"]}
    for key in ("content", "reasoning_content"):
        joined = "".join(delta.get(key) or "" for delta in deltas)
        if key in choice["message"]:
            message[key] = joined or choice["message"][key]
            assert joined == (choice["message"][key] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    end = chunks[-1]["choices"][0]["finish_reason"]
    found = {"message": message, "finish_reason": end, "calls": calls}
    return choice, found, deltas


def functions(calls: list[dict]) -> list[dict]:
    assert len({call["id"] for call in calls}) == len(calls)
    assert {call["type"] for call in calls} <= {"function"}
    return [call["function"] for call in calls]


def tools_text(*tools: dict) -> str:
    """The words for the tools, as a template that does not know of them is given them."""
    told = "\n".join(json.dumps(tool) for tool in tools)
    return TOOLS_PROMPT.format(tools=told)


def toy_server(text: str = "", prompt: str = "hi", source: DraftSource | None = None, **settings):
    """Says a text where the grammar lets it, else random letters; drafts cross every border."""
    pytest.importorskip("llguidance")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = Tokenizer.from_transformers(toy_tokenizer(template))
    target = SayTarget(prompt, text, TOY, 2) if text else FakeTarget(96, max_model_len=2048)
    source = source or ScriptedSource(
        lambda context: Draft(
            TOY.encode(text)[len(context.token_ids) - context.num_prompt_tokens :][:7]
        )
    )
    llm = make_llm(source, target=target, tokenizer=tokenizer, eos_token_ids=2)
    return serving(llm, **settings)
