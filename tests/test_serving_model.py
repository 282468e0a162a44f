"""The real thing: `outrider serve` as a process, and OpenAI's own client in front of it."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import openai
import pytest

from outrider import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

ASKS = (
    "Name three colours.",
    'Write again: {"id": 101, "name": "Ada", "city": "London"}, {"id": 102, "name": "Alan"}',
)
GREEDY = {"temperature": 0, "max_tokens": 48}


class Server:
    """A server process, its log and its address."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "outrider.cli.main", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(200), self.log

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"running on (http://[\d.:]+)", line):
                self.url = found[1]
                self._listening.set()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        """The exit code, once the whole log has been read."""
        code = self.process.wait(60)
        self._reader.join(10)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


@pytest.fixture(scope="module")
def expected() -> list[str]:
    llm = LLM(speculative_config=None)
    conversations = [[{"role": "user", "content": ask}] for ask in ASKS]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48))
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def server(expected) -> Iterator[Server]:
    with Server("--api-key", "sesame", "--served-model-name", "smol") as found:
        yield found


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sesame", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("index", range(len(ASKS)))
def test_the_text_is_that_of_the_python_api(client, expected, index):
    messages = [{"role": "user", "content": ASKS[index]}]
    whole = client.chat.completions.create(model="smol", messages=messages, **GREEDY)
    assert whole.choices[0].message.content == expected[index]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(
        client.chat.completions.create(model="smol", messages=messages, **GREEDY, **options)
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected[index]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 8


def test_what_the_client_knows_works_unchanged(client):
    assert [model.id for model in client.models.list()] == ["smol"]
    assert client.models.retrieve("smol").id == "smol"
    found = client.completions.create(
        model="smol", prompt=["One, two,", "The sky is"], n=2, logprobs=2, seed=1, max_tokens=6
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for choice in found.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) <= 6
        assert "".join(choice.logprobs.tokens).startswith(choice.text)
    chat = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Say yes."}],
        logprobs=True,
        top_logprobs=3,
        prediction={"type": "content", "content": "Yes."},
        max_completion_tokens=8,
        extra_body={"speculative": True, "min_p": 0.1, "return_token_sources": True},
    )
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    details = chat.usage.completion_tokens_details
    assert details.accepted_prediction_tokens is not None
    assert len(chat.choices[0].model_extra["token_sources"]) == chat.usage.completion_tokens


def test_errors_are_the_clients_own(client, server):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.chat.completions.create(model="smol", messages=messages, temperature=-1)
    assert found.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=messages)
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_sigterm_lets_calls_end_and_the_second_ends_them(num_signals):
    is_whole = num_signals == 1
    reasons = []
    with (
        Server() as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        client.completions.create(
            model=client.models.list().data[0].id,
            prompt="Once upon a time",
            max_tokens=60 if is_whole else 4000,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        next(stream)
        for _ in range(num_signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        try:
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
        except Exception:  # the client has several for a connection that ends
            assert not is_whole
        assert server.end() == 0
    assert (reasons[-1:] == ["length"]) == is_whole
    levels = {json.loads(line)["level"] for line in server.log if line.startswith("{")}
    assert "error" not in levels or not is_whole


def test_a_drafter_that_cannot_be_loaded_is_known_at_the_start(tmp_path):  # X9
    config = json.dumps({"method": "dspark", "model": str(tmp_path / "nothing")})
    command = [sys.executable, "-m", "outrider.cli.main", "serve", "--speculative-config", config]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert found.returncode == 2
    assert "nothing" in found.stderr and "Traceback" not in found.stderr
