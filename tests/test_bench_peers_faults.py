"""What goes wrong in a comparison of peers is a sentence, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peer_cases import SETTINGS, fake, job, use_fakes, workload
from typer.testing import CliRunner

from outrider.bench.peers import compare, cores, group, models, process, spec
from outrider.bench.peers.compare import SPARE_TOKENS, as_json, compare_peers
from outrider.bench.peers.process import PeerFailed, Runner
from outrider.bench.peers.report import machine, remarks, sections, speed, speed_range, speeds
from outrider.bench.peers.spec import Peer, Side, find_peer, find_peers
from outrider.bench.provenance import provenance
from outrider.bench.timing import spread
from outrider.cli.main import app
from outrider.errors import ConfigError, ModelError, PromptError

pytestmark = pytest.mark.slow


@pytest.fixture
def fake_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(tmp_path, monkeypatch)


def ours(*hows: str) -> Peer:
    return fake("outrider", *hows)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("speaks before", "answered 'Loading weights...', which is not what a runner answers"),
        ("lists before", r"answered '\[1, 2\]', which is not"),
        ("is not ready", "which is not what a runner answers"),
        ("is killed", r"was ended by SIGKILL \(perhaps the memory ran out\): noise"),
        ("speaks between", "answered '{}', which is not"),
        ("gives too few", "which is not what a runner answers"),
        ("gives text", "which is not what a runner answers"),
    ],
)
def test_who_breaks_the_protocol_is_noted(fake_peers: None, how: str, reason: str) -> None:
    result = compare_peers([ours("works"), fake("x", how)], None, workload(), SETTINGS)
    assert [one.side.name for one in result.decoded] == ["OUTRIDER, works"]
    assert len([note for note in result.notes if note.startswith(f"X, {how}")]) == 1
    with pytest.raises(PeerFailed, match=reason):
        raise PeerFailed("; ".join(result.notes))


def test_damaged_environments_are_noted(
    fake_peers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent = tmp_path / "bin" / "python"
    for module in (process, compare):
        monkeypatch.setattr(
            module, "python_of", lambda peer: absent if peer.name == "x" else Path(sys.executable)
        )
    monkeypatch.setattr(models, "cache_dir", lambda kind: tmp_path)
    monkeypatch.setattr(compare, "model_directory", lambda model: tmp_path / "model")
    exporter = Peer(
        name="y",
        title="Y",
        script="runner.py",
        model="directory",
        variants={"works": {"how": "works"}},
        convert=["{venv}/bin/no-such-exporter", "{model}"],
    )
    result = compare_peers(
        [ours("works"), fake("x", "works"), exporter], None, workload(), SETTINGS
    )
    assert [one.side.peer.name for one in result.decoded] == ["outrider"]
    first, second = sorted(note for note in result.notes if "environment anew" in note)
    assert first.startswith(f"X, works could not be started: {absent}: No such file")
    assert "Y could not convert the model" in second and "--install y`" in second


@pytest.mark.parametrize("error", [OSError(28, "No space left"), NotImplementedError("IQ1_S")])
def test_a_model_that_cannot_be_made_is_noted(
    fake_peers: None, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(model: str | None) -> None:
        raise error

    monkeypatch.setattr(compare, "model_directory", fail)
    other = Peer(name="y", title="Y", script="runner.py", model="directory", variants={"a": {}})
    result = compare_peers([ours("works"), other], None, workload(), SETTINGS)
    (note,) = [note for note in result.notes if note.startswith("Y is left out")]
    assert str(error.args[-1]) in note


@pytest.mark.parametrize("how", ["refuses", "dies"])
def test_there_is_no_comparison_without_outrider(fake_peers: None, how: str) -> None:
    with pytest.raises(PeerFailed, match=r"outrider itself could not be measured: OUTRIDER, "):
        compare_peers([ours("works", how), fake("x", "works")], None, workload(), SETTINGS)


def test_prompts_beyond_the_context_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fakes(tmp_path, monkeypatch, context=SPARE_TOKENS + SETTINGS.max_tokens + 2)
    result = compare_peers([ours("works")], None, workload(), SETTINGS)
    assert [prompt.text for prompt in result.prompts] == ["one", "two three", "seven"]
    assert "only 3 of 4 prompts are of at most 2 tokens" in result.workload["notes"]
    assert "only 3 of 4 prompts are of at most 2 tokens" in remarks_of(result)

    use_fakes(tmp_path, monkeypatch, context=SPARE_TOKENS + SETTINGS.max_tokens)
    with pytest.raises(PromptError, match=r"--max-tokens must be at most 4 .*, got 5"):
        compare_peers([ours("works")], None, workload(), SETTINGS)

    long = workload()
    long.prompts = [prompt for prompt in long.prompts if " " in prompt.text]
    use_fakes(tmp_path, monkeypatch, context=SPARE_TOKENS + SETTINGS.max_tokens + 1)
    with pytest.raises(PromptError, match="no prompt is left: only 0 of 2"):
        compare_peers([ours("works")], None, long, SETTINGS)


def remarks_of(result: compare.Comparison) -> list[str]:
    result.provenance = provenance(1) | {"load_average": (9.0, 9.0, 9.0)}
    assert "busy" in remarks(result)[0]
    return remarks(result)


def test_a_model_without_tokenizer_is_refused(
    fake_peers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    bare = SimpleNamespace(tokenizer=None, name="bare")
    monkeypatch.setattr("outrider.target.load.load_model", lambda model: bare)
    with pytest.raises(ModelError, match="bare has no tokenizer"):
        compare_peers([ours("works")], None, workload(), SETTINGS)


def test_batches_are_full_or_smaller(fake_peers: None) -> None:
    from dataclasses import replace

    settings = replace(SETTINGS, batches=(3, 8, 8))
    result = compare_peers(
        [ours("works"), fake("x", "works", largest=1)], None, workload(), settings
    )
    assert result.settings.batches == (3, 4)
    calls = result.decoded[0].rounds
    assert [call.indices for call in calls[3][0]] == [[0, 1, 2], [3, 0, 1]]
    assert [call.indices for call in calls[4][0]] == [[0, 1, 2, 3]]
    notes = [*result.workload["notes"], *result.notes]
    assert "batch 3: the first 2 prompts count twice, to fill up the last batch" in notes
    assert "batch 8 became batch 4: there are no more prompts" in notes
    assert "X, works takes at most batch 1, which was not asked for" in notes


def test_names_are_checked_and_taken_once() -> None:
    assert [peer.name for peer in find_peers(["vllm", "openvino", "vllm"])] == ["vllm", "openvino"]
    with pytest.raises(ConfigError, match=r"outrider is measured in every run: .*transformers"):
        find_peer("outrider")


def test_slow_speeds_keep_their_digits() -> None:
    shown = [speed(value) for value in (1234.4, 160.2, 16.2, 9.96, 1.61, 0.163, 0.0121, 0.0)]
    assert shown == ["1234", "160", "16", "10.0", "1.6", "0.16", "0.012", "0"]
    assert speed_range(spread([1.42, 1.61, 1.74])) == "1.6 (1.4–1.7)"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux holds threads")
def test_a_runner_is_held_on_as_many_cores_as_threads(fake_peers: None, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    how = "tells its cores"
    runner = Runner(Side(fake("x", how), how), job(how), 1, tmp_path / "log")
    try:
        assert runner.decode([[1]], 5, True)[1] == [[min(before)]]
    finally:
        runner.close()
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ConfigError, match=f"--num-threads must be at most {len(before)}"):
        cores.cores_for(len(before) + 1)


def test_an_interrupt_keeps_the_whole_rounds(fake_peers: None) -> None:
    def stop_at(number: int) -> Callable[[int, int], None]:
        def done(finished: int, total: int) -> None:
            if finished == number:
                raise KeyboardInterrupt

        return done

    chosen = [ours("works"), fake("x", "works")]
    result = compare_peers(chosen, None, workload(), SETTINGS, done=stop_at(2 * 6 + 1))
    assert isinstance(result.interrupted, KeyboardInterrupt)
    assert result.label == "incomplete: 1 of 2 rounds"
    assert [len(rounds) for one in result.decoded for rounds in one.rounds.values()] == [1] * 4
    written = as_json(result)
    assert written["incomplete"] and written["finished_rounds"] == 1
    with pytest.raises(KeyboardInterrupt):
        compare_peers(chosen, None, workload(), SETTINGS, done=stop_at(12 - 1))


def test_a_child_of_a_runner_ends_with_it(fake_peers: None, tmp_path: Path) -> None:
    how = "leaves a child"
    runner = Runner(Side(fake("x", how), how), job(how), 1, tmp_path / "log")
    child = int((tmp_path / "log").read_text().split("child ")[1].split()[0])
    os.kill(child, 0)
    runner.close()
    wait_for_end(child)


def test_a_killed_runner_is_noticed_while_its_child_holds_the_pipe(
    fake_peers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.1)
    how = "leaves a child"
    runner = Runner(Side(fake("x", how), how), job(how), 1, tmp_path / "log")
    os.kill(runner._process.pid, signal.SIGKILL)
    with pytest.raises(PeerFailed, match="was ended by SIGKILL"):
        runner.decode([[1]], 5, True)
    runner.close()


def test_a_command_ends_with_its_children_when_we_are_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "child"

    def interrupt(self: Any, *_: Any) -> None:
        while not (note.exists() and note.read_text().strip()):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        group.run_in_group(["sh", "-c", f"sleep 60 & echo $! > {note}; wait"], dict(os.environ))
    wait_for_end(int(note.read_text()))


def wait_for_end(pid: int) -> None:
    """Until it is gone, or dead and only waits for its parent."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} lives")


def test_no_log_is_left_behind(
    fake_peers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(logs))

    def stop(finished: int, total: int) -> None:
        raise SystemExit(143)  # as a request to end arrives

    with pytest.raises(SystemExit):
        compare_peers([ours("works")], None, workload(), SETTINGS, done=stop)
    assert not list(logs.iterdir())


def test_the_report_tells_the_machine_and_options_as_json(fake_peers: None) -> None:
    result = compare_peers([ours("works")], None, workload(), SETTINGS)
    result.provenance = provenance(1)
    text = machine(result.provenance)
    for part in (sys.version.split()[0], "outrider ", "load average", "Linux" * (os.name != "nt")):
        assert part in text
    rows = sections(result)[-1].table
    assert rows is not None
    assert '; {"how": "works"}' in next(row[1] for row in rows.rows if row[0] == "OUTRIDER, works")
    assert speeds(result).rows[0][0] == "OUTRIDER, works"


@pytest.fixture
def command(
    fake_peers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs `outrider bench peers` with outrider and two peers, one of which refuses."""
    known = {peer.name: peer for peer in (ours("works"), fake("x", "works"), fake("y", "refuses"))}
    monkeypatch.setattr(spec, "peers", lambda: known)
    lines = [{"prompt": "one two"}, {"prompt": "three"}]
    (tmp_path / "w.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["-w", str(tmp_path / "w.jsonl"), "--max-tokens", "5", "--rounds", "2"]
    arguments += ["--report", "none", "-o", str(tmp_path / "out"), "--num-threads", "1"]

    def run(*more: str) -> Any:
        return CliRunner().invoke(app, ["bench", "peers", *arguments, *more])

    return run


def test_named_peers_without_figures_are_a_failure(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    result = command("--peer", "y")
    assert isinstance(result.exception, PeerFailed), result.exception
    assert "no figures of Y" in str(result.exception)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [side["peer"] for side in written["sides"]] == ["outrider"]
    assert "Y, refuses: ValueError: no such format" in result.output

    assert command().exit_code == 0, "nobody asked for Y in particular"
    twice = command("--peer", "x", "--peer", "x")
    assert twice.exit_code == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert [side["peer"] for side in written["sides"]] == ["outrider", "x"]


def test_without_a_terminal_there_are_lines(command: Callable[..., Any]) -> None:
    errors = command("--batch", "1").stderr.splitlines()
    for line in (
        "loading X, works …",
        "Y, refuses: ValueError: no such format",
        "round 1 of 2 is finished",
    ):
        assert f"outrider: {line}" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "outrider"], "outrider is measured in every run"),
        (["--install", "outrider"], "outrider is measured in every run"),
        (["--peer", "tgi"], "a peer must be one of x, y, got 'tgi'"),
        (["--num-threads", "100000"], "--num-threads must be at most"),
        (["--max-tokens", "2000"], "--max-tokens must be at most 1983"),
    ],
)
def test_what_cannot_be_is_refused(
    command: Callable[..., Any], arguments: list[str], message: str
) -> None:
    result = command(*arguments)
    assert message in str(result.exception)


def test_an_interrupt_writes_the_whole_rounds(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = compare.compare_peers

    def stopped(*arguments: Any) -> Any:
        def done(finished: int, total: int) -> None:
            if finished == total - 1:
                raise KeyboardInterrupt

        return real(*arguments[:-1], done)

    monkeypatch.setattr(compare, "compare_peers", stopped)
    result = command("--peer", "x", "--batch", "1")
    assert result.exit_code in (1, 130)
    assert "incomplete: 1 of 2 rounds" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text())["incomplete"]


def test_a_disk_that_is_full_does_not_take_the_figures(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise ConfigError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("outrider.bench.provenance.write_whole", fail)
    result = command("--peer", "x", "--batch", "1")
    assert "X, works" in result.stdout
    assert "No space left on device; the results are shown above" in str(result.exception)
