"""Peers: turns with runners that work, fail and die; what is made of their answers."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from peer_cases import PROMPTS, RUNNER, SETTINGS, fake, job, use_fakes, workload
from typer.testing import CliRunner

from outrider.bench.peers import compare, install, models, process
from outrider.bench.peers.compare import (
    Call,
    Comparison,
    Decoded,
    batches_of,
    compare_peers,
    mixed,
)
from outrider.bench.peers.process import PeerFailed, Runner
from outrider.bench.peers.report import (
    best_peer,
    columns,
    headline,
    our_side,
    rates,
    ratio,
    ratios,
    speeds,
    write_peer_report,
)
from outrider.bench.peers.runners import protocol
from outrider.bench.peers.spec import RUNNERS, Peer, Side, find_peer, peers
from outrider.bench.plots import can_plot
from outrider.bench.provenance import provenance
from outrider.bench.workload import BenchPrompt
from outrider.cli.main import app
from outrider.errors import ConfigError, PromptError


@pytest.fixture
def fake_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(tmp_path, monkeypatch)


def test_every_described_peer_has_its_script_and_variants() -> None:
    assert next(iter(peers())) == "outrider" and len(peers()) == 6
    for peer in peers().values():
        assert (RUNNERS / peer.script).is_file() and peer.variants
        assert peer.is_ours or peer.steps
        assert "plain" in peer.variants
    with pytest.raises(ConfigError, match=r"one of transformers, openvino, vllm.*, got 'tgi'"):
        find_peer("tgi")


def test_the_end_of_text_is_left_out() -> None:
    assert protocol.until_end([5, 6, 2, 7, 3], [3, 2]) == [5, 6]
    assert protocol.until_end([5, 6], [2]) == [5, 6]


def test_kinds_are_mixed_and_batches_are_full() -> None:
    prompts = [
        BenchPrompt(kind, ({"role": "user", "content": str(i)},)) for i, kind in enumerate("aaabbc")
    ]
    assert "".join(p.category for p in mixed(prompts)) == "abcaba"
    assert batches_of(7, 3) == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]
    assert batches_of(6, 6) == [[0, 1, 2, 3, 4, 5]]


def test_a_runner_is_stopped_between_calls_and_ended_in_the_end(
    fake_peers: None, tmp_path: Path
) -> None:
    side = Side(fake("x", "works"), "works")
    runner = Runner(side, job("works"), 1, tmp_path / "log")
    pid = runner._process.pid
    try:
        assert set(runner.about["versions"]) == {"pytest"} and runner.about["load_seconds"] > 0
        if Path("/proc").is_dir():
            assert _state(pid) == "T"
        seconds, token_ids = runner.decode([[1, 1], [1]], 3, True)
        assert token_ids == [[2, 2, 2], [1, 1, 1]] and 0 < seconds < 5
    finally:
        runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _state(pid: int) -> str:
    state = ""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
        if state == "T":
            break
        time.sleep(0.01)
    return state


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_stopped_runner_ends_with_its_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text(RUNNER)
    parent = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, {str(tmp_path / "runner.py")!r}],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
child.stdin.write(b'{{"options": {{"how": "works"}}}}\\n')
child.stdin.flush()
child.stdout.readline()
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rsplit(") ", 1)[1][0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"the runner lives: {stat.read_text()}")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("refuses", "X, refuses: ValueError: no such format"),
        pytest.param("hangs", "no answer within 1 s", marks=pytest.mark.slow),
    ],
)
def test_a_runner_that_does_not_get_ready_says_why(
    fake_peers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    monkeypatch.setattr(process, "LOAD_SECONDS", 1 if how == "hangs" else 60)
    with pytest.raises(PeerFailed, match=reason):
        Runner(Side(fake("x", how), how), job(how), 1, tmp_path / "log")


def test_a_runner_that_dies_leaves_its_last_words(fake_peers: None, tmp_path: Path) -> None:
    runner = Runner(Side(fake("x", "dies"), "dies"), job("dies"), 1, tmp_path / "log")
    with pytest.raises(PeerFailed, match="X, dies ended with exit code 3: the last words"):
        runner.decode([[1]], 5, True)
    runner.close()


def test_who_fails_is_noted_and_the_others_go_on(
    fake_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [fake("a", "works"), fake("b", "dies"), fake("c", "raises"), fake("d", "refuses")]
    absent = fake("e", "works")
    monkeypatch.setattr(
        compare, "python_of", lambda peer: None if peer is absent else Path(sys.executable)
    )
    finished: list[tuple[int, int]] = []
    result = compare_peers(
        [*chosen, absent], None, workload(), SETTINGS, done=lambda *pair: finished.append(pair)
    )
    assert [one.side.name for one in result.decoded] == ["A, works"]
    joined = "\n".join(result.notes)
    for reason in (
        "B, dies ended with exit code 3: the last words",
        "C, raises: RuntimeError: too many",
        "D, refuses: ValueError: no such format",
        "E is not installed: `outrider bench peers --install e`",
    ):
        assert reason in joined
    rounds = result.decoded[0].rounds
    assert {batch: [len(calls) for calls in each] for batch, each in rounds.items()} == {
        1: [4, 4],
        2: [2, 2],
    }
    assert [call.indices for call in rounds[2][0]] == [[0, 1], [2, 3]]
    assert rounds[1][0][0].token_ids == [[1] * 5]
    assert finished[-1][0] == len(finished)


def test_a_side_that_takes_no_batches_is_not_asked_for_them(fake_peers: None) -> None:
    result = compare_peers([fake("a", "works", largest=1)], None, workload(), SETTINGS)
    assert set(result.decoded[0].rounds) == {1}


def test_nothing_measured_is_an_error_with_the_reasons(fake_peers: None) -> None:
    with pytest.raises(PromptError, match="nothing was measured: D, refuses: ValueError"):
        compare_peers([fake("d", "refuses")], None, workload(), SETTINGS)


def decoded(
    peer: str, variant: str, seconds: float, dtype: str = "bfloat16", token: int = 1
) -> Decoded:
    """Four tokens per prompt; open text takes twice as long."""
    side = Side(peers()[peer], variant, dtype)
    calls = [
        Call([i], seconds * (2 if PROMPTS[i][0] == "chat" else 1), [[token] * 4]) for i in range(4)
    ]
    batch = [Call([0, 1], seconds, [[token] * 4] * 2)]
    return Decoded(side, {"x": "1"}, 2.0, {1: [calls, calls], 2: [batch, batch]})


def comparison() -> Comparison:
    result = Comparison(
        SETTINGS,
        "words",
        workload().prompts,
        workload().as_json(),
        [
            decoded("outrider", "plain", 0.5),
            decoded("outrider", "default", 0.25),
            decoded("transformers", "plain", 1.0),
            decoded("openvino", "plain", 0.4, token=2),
            decoded("llama-cpp", "plain", 0.1, "Q4_1"),
        ],
        ["vLLM is not installed"],
    )
    result.provenance = provenance(1)
    result.finished_rounds = 2
    return result


def test_rates_and_ratios() -> None:
    result = comparison()
    other, chat, both = columns(result)
    assert [c.name for c in (other, chat, both)] == [
        "batch 1, all but chat",
        "batch 1, chat",
        "batch 2",
    ]
    ours = our_side(result)
    assert ours is not None and ours.side.variant == "default"
    assert rates(ours, other) == [16.0, 16.0] and rates(ours, chat) == [8.0, 8.0]
    assert rates(ours, both) == [32.0, 32.0]
    best = best_peer(result, other)
    assert best is not None and best.side.peer.name == "openvino", "Q4_1 is not bf16"
    found = ratio(ours, best, other)
    assert found is not None and found.median == pytest.approx(1.6)
    assert headline(result).startswith(
        "outrider over the fastest bf16 peer. batch 1, all but chat: 1.60× (OpenVINO GenAI, plain)"
    )
    table = ratios(result)
    assert table is not None and [row[0] for row in table.rows] == [
        "outrider, plain",
        "transformers, plain",
        "OpenVINO GenAI, plain",
        "llama.cpp Q4_1, plain",
    ]
    assert speeds(result).rows[4] == ["llama.cpp Q4_1, plain", "40", "20", "80"]


@pytest.mark.slow
@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_the_peer_report(tmp_path: Path) -> None:
    write_peer_report(comparison(), tmp_path / "peers.html")
    page = (tmp_path / "peers.html").read_text()
    assert page.count("<svg") == 3 and "vLLM is not installed" in page
    assert "<td>0 of 4</td>" in page, "OpenVINO's text is not ours"
    write_peer_report(comparison(), tmp_path / "peers.md")
    assert "| OpenVINO GenAI, plain | 4 of 4 | 0 of 4 |" in (tmp_path / "peers.md").read_text()


def test_libraries_and_variables_reach_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "cache_dir", lambda kind: tmp_path / kind)
    home = tmp_path / "peers" / "vllm"
    (home / "lib").mkdir(parents=True)
    assert install.python_of(find_peer("vllm")) is None
    assert "libiomp5.so" in install.missing_libraries(find_peer("vllm"))
    (home / "lib" / "libiomp5.so").touch()
    (home / install.DONE).touch()
    assert install.python_of(find_peer("vllm")) == home / "bin" / "python"
    monkeypatch.setattr(install, "cores_for", lambda count: [4, 5, 6, 7][:count])
    values = install.runtime_environment(find_peer("vllm"), 3)
    assert values["VLLM_CPU_OMP_THREADS_BIND"] == "4,5,6" and values["OMP_NUM_THREADS"] == "3"
    assert str(home / "lib" / "libiomp5.so") in values["LD_PRELOAD"]


def test_a_missing_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "cache_dir", lambda kind: tmp_path / kind)
    broken = tmp_path / "python3.99"  # as pyenv's are that are not switched on
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    peer = Peer(name="z", title="Z", script="", model="any", variants={}, python="3.99")
    with pytest.raises(ConfigError, match=r"Z needs python3\.99, which was not found"):
        install.install(peer, lambda line: None)


@pytest.mark.slow
def test_an_environment_is_complete_or_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "cache_dir", lambda kind: tmp_path / kind)
    good = Peer(name="g", title="G", script="", model="any", variants={})
    shown: list[str] = []
    install.install(good, shown.append)
    assert install.python_of(good) is not None and "venv" in shown[0]
    bad = Peer(
        name="g",
        title="G",
        script="",
        model="any",
        variants={},
        steps=[["install", "--no-index", "no-such-package-at-all"]],
    )
    with pytest.raises(ConfigError, match=r"failed: .*no-such-package-at-all"):
        install.install(bad, shown.append)
    assert install.python_of(bad) is None


@pytest.mark.slow
@pytest.mark.model
def test_the_bf16_gguf_holds_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from outrider.target.gguf import GGUFFile, state_dict

    monkeypatch.setattr(models, "cache_dir", lambda kind: tmp_path)
    made, original = models.model_gguf(None), models.gguf_of(None)
    assert made is not None and original is not None
    assert (models.gguf_type(original), models.gguf_type(made)) == ("Q4_1", "BF16")
    ours, theirs = (state_dict(GGUFFile(path), torch.bfloat16) for path in (original, made))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_command_refuses_before_it_starts_anything() -> None:
    for arguments, message in (
        (["--peer", "tgi"], "a peer must be one of"),
        (["--batch", "x"], "--batch must be numbers"),
        (["--workload", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
    ):
        result = CliRunner().invoke(app, ["bench", "peers", *arguments])
        assert message in str(result.exception)
