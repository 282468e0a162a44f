"""Fake peers: runners that answer at once, fail or die, and a model that is a list of words."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.peers import compare, process
from outrider.bench.peers.compare import PeerSettings
from outrider.bench.peers.spec import RUNNERS, Peer
from outrider.bench.workload import BenchPrompt, Workload

RUNNER = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(RUNNERS)!r})
answers = os.dup(1)  # as a library may keep it
from protocol import serve

def load(job):
    print("noise on standard output")
    how = job["options"]["how"]
    if how == "refuses":
        raise ValueError("no such format")
    if how == "hangs":
        time.sleep(60)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "speaks before":
        os.write(answers, b"Loading weights...\\n")
    if how == "lists before":
        os.write(answers, b"[1, 2]\\n")
    if how == "is not ready":
        os.write(answers, b'{{"ready": true}}\\n')
    if how == "leaves a child":
        child = subprocess.Popen(["sleep", "60"])
        sys.stderr.write(f"child {{child.pid}}\\n")
        sys.stderr.flush()

    def decode(prompts, max_tokens, ignore_eos):
        print("more noise")
        if how == "speaks between":
            os.write(answers, b"{{}}\\n")
        if how == "gives too few":
            return []
        if how == "gives text":
            return ["no ids"] * len(prompts)
        if how == "tells its cores":
            return [sorted(os.sched_getaffinity(0)) for _ in prompts]
        if how == "raises" and len(prompts) > 1:
            raise RuntimeError("too many")
        if how == "dies" and max_tokens == 5:
            sys.stderr.write("the last words\\n")
            sys.stderr.flush()
            os._exit(3)
        return [[len(ids)] * max_tokens for ids in prompts]

    return decode

serve(load, ("pytest", "no-such-package"))
"""
PROMPTS = [("a", "one"), ("a", "two three"), ("chat", "four five six"), ("chat", "seven")]


def use_fakes(folder: Path, monkeypatch: pytest.MonkeyPatch, context: int = 2048) -> None:
    """Every peer is a script that answers at once; the model is a tokenizer of words."""
    (folder / "runner.py").write_text(RUNNER)
    monkeypatch.setattr(process, "RUNNERS", folder)
    for module in (process, compare):
        monkeypatch.setattr(module, "python_of", lambda peer: Path(sys.executable))
    tokenizer = SimpleNamespace(chat_template=None, encode=lambda text: [1] * len(text.split()))
    config = SimpleNamespace(max_position_embeddings=context)
    loaded = SimpleNamespace(tokenizer=tokenizer, name="words", config_object=lambda: config)
    monkeypatch.setattr("outrider.target.load.load_model", lambda model: loaded)


def fake(name: str, *hows: str, largest: int | None = None) -> Peer:
    options = {} if largest is None else {"batch": largest}
    variants = {how: {"how": how, **options} for how in hows}
    return Peer(name=name, title=name.upper(), script="runner.py", model="any", variants=variants)


def workload() -> Workload:
    prompts = [BenchPrompt(kind, ({"role": "user", "content": t},)) for kind, t in PROMPTS]
    return Workload(prompts)


SETTINGS = PeerSettings(batches=(1, 2), rounds=2, max_tokens=5, num_threads=1)


def job(how: str) -> dict[str, Any]:
    return {"options": {"how": how}}
