"""Puts a finished drafter where it is found: its files, what is known of it, a line in the list."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.bench.provenance import write_whole
from outrider.checkpoints import load_drafter, save_drafter
from outrider.checkpoints.files import CONFIG, WEIGHTS
from outrider.target.load import load_model
from outrider.training.build import attach_target
from outrider.training.dataset import unlike
from outrider.training.log import read_log
from outrider.training.run import target_json

PRETRAINED = Path(outrider.__file__).parent / "pretrained"
PREFIX = "smollm2-135m-"
LIST = "DRAFTERS.md"
MAX_BYTES = 25_000_000
COLUMNS = (
    *("drafter", "MB", "tokens trained on", "tokens per step, greedy", "at temperature 1"),
    "calibration error of survival, before and after",
)
LIST_HEAD = (
    *("# Trained drafters that ship", ""),
    "Written by `scripts/build_default_drafters.py`. Each `config.json` says how it was made and",
    "judged: texts, commands of all stages, hardware, learning curve, evaluations, calibration.",
    *("", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"),
)
HARDWARE = ("cpu", "cores", "threads", "memory_bytes", "machine", "system")


@dataclass(frozen=True, slots=True)
class Finished:
    """A drafter with all that its making left behind."""

    name: str
    command: str  # that makes it again
    runs: Sequence[Path]  # of its stages, in order
    texts: Mapping[str, dict[str, Any]]  # headers of data directories, by name
    judged: Mapping[str, Path]  # what `outrider train eval` wrote, by "workload-temperature"


def ship_drafter(finished: Finished, into: Path) -> None:
    """Write it to its directory in `into`, and the list of all that are there.

    Ends the process where it is too large, is of another target than the default one, or holds a
    matrix of that target.
    """
    source = finished.runs[-1] / "drafter"
    loaded, target = load_drafter(source), load_model(None)
    about = target_json(target)
    if unlike(loaded.target, about):
        sys.exit(f"{source} was made for {loaded.target}, expected the default target {about}")
    attach_target(loaded.drafter, target.state_dict())  # its own embedding and head go, if equal
    shared = shared_matrices(loaded.drafter.state_dict(), target.state_dict())
    if shared:
        sys.exit(f"{source} holds what its target has: {', '.join(shared)}")
    provenance = provenance_of(finished, loaded.config["provenance"])
    size = (source / WEIGHTS).stat().st_size + len(json.dumps(provenance, indent=1))
    if size > MAX_BYTES:
        sys.exit(f"{source} would ship with {size:,} bytes, expected at most {MAX_BYTES:,}")
    directory = into / f"{PREFIX}{finished.name}"
    save_drafter(loaded.drafter, directory, target=about, provenance=provenance)
    write_whole(into / LIST, "\n".join(listed(into)) + "\n")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {size:,} bytes")


def shared_matrices(
    drafter: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names in the drafter's state of matrices that are the target's, bit by bit in bf16."""
    theirs: dict[torch.Size, list[torch.Tensor]] = {}
    for tensor in target.values():
        theirs.setdefault(tensor.shape, []).append(tensor)
    return [
        name
        for name, ours in drafter.items()
        if ours.dim() > 1
        and any(
            torch.equal(ours.bfloat16(), each.bfloat16()) for each in theirs.get(ours.shape, [])
        )
    ]


def provenance_of(finished: Finished, last: dict[str, Any]) -> dict[str, Any]:
    """What the last run said, and: how to make it again, data, stages, curve, evaluation.

    What the last run said stays where `outrider train calibrate` looks for it.
    """
    return {
        **last,
        "command": _command(last),
        "shipped": datetime.now(UTC).isoformat(timespec="seconds"),
        "reproduce": finished.command,
        "texts": {name: _texts(header) for name, header in finished.texts.items()},
        "stages": [_stage(run) for run in finished.runs],
        "curve": list(_curve(finished.runs)),
        "evaluation": {
            name: _evaluation(json.loads(path.read_text()))
            for name, path in finished.judged.items()
        },
    }


def _command(about: Mapping[str, Any]) -> str:
    return about["command"].replace("main.py ", "outrider ", 1)


def _texts(header: dict[str, Any]) -> dict[str, Any]:
    """What they are, and the command and machine that made them."""
    about = header["provenance"]
    kept = {key: value for key, value in header.items() if key not in ("kind", "provenance")}
    return {**kept, "command": _command(about), "date": about["date"], **_machine(about)}


def _stage(run: Path) -> dict[str, Any]:
    """One run by its drafter's own words."""
    about = load_drafter(run / "drafter").config["provenance"]
    said = ("date", "commit", "recipe", "data", "num_texts", "step", "num_tokens", "held_out")
    kept = {key: about.get(key) for key in said}
    return {"run": run.name, "command": _command(about), **kept, **_machine(about)}


def _machine(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: about.get(key) for key in (*HARDWARE, "python", "versions")}


def _curve(runs: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Acceptance length on held-out texts, by the tokens seen over all stages."""
    before = 0
    for run in runs:
        tokens = before
        for line in read_log(run):
            tokens = before + line["num_tokens"] if "num_tokens" in line else tokens
            if line.get("held_out"):
                yield {
                    "run": run.name,
                    "step": line["step"],
                    "num_tokens": tokens,
                    "acceptance_length": line["held_out"]["acceptance_length"],
                }
        before = tokens


def _evaluation(found: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation came to, of which prompts."""
    kept = ("kinds", "loops", "settings", "draft_tokens", "workload")
    return {name: found[name] for name in kept}


def listed(directory: Path) -> Iterator[str]:
    """The drafters of a directory as a Markdown page."""
    yield from LIST_HEAD
    for path in sorted(directory.glob(f"{PREFIX}*/{CONFIG}")):
        yield _row(path.parent, json.loads(path.read_text())["provenance"])


def _row(directory: Path, about: dict[str, Any]) -> str:
    size = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
    tokens = sum(stage["num_tokens"] for stage in about["stages"])
    before, after = (
        sum(errors) / len(errors)
        for errors in (about["calibration"][f"ece_{when}"] for when in ("before", "after"))
    )
    cells = (
        *(f"`{directory.name}`", f"{size:.1f}", f"{tokens / 1e6:.1f} M"),
        *(_lengths(about["evaluation"], temperature) for temperature in (0, 1)),
        f"{before:.1%}, {after:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _lengths(evaluation: dict[str, Any], temperature: int) -> str:
    """Tokens per step with 95 % intervals, by workload; its last kind is all of it."""
    parts = []
    for name, found in evaluation.items():
        if found["settings"]["temperature"] == temperature:
            length = found["kinds"][-1]["length"]
            what = name.removesuffix(f"-{temperature}")
            parts.append(f"{what} {length['value']:.2f} ({length['low']:.2f}–{length['high']:.2f})")
    return " · ".join(parts)
