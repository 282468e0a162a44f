"""The script that sets the server beside the Python API: run once, on a toy."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import FakeTarget
from serving_cases import VOCAB, make_llm
from serving_cases import listening as serving_at

from outrider.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import serve


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
