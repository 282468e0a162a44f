"""Makes the trained drafters that ship for the default target, from nothing to the package.

    python scripts/build_default_drafters.py WORK --prompts DIR --only dspark
    python scripts/build_default_drafters.py WORK --only dspark --part ship
    python scripts/build_default_drafters.py WORK --prompts DIR --tiny

For each drafter, the parts `data`, `train`, `calibrate`, `judge` and `ship` follow each other;
`--part` picks some. WORK keeps all that they make: a part that is done is skipped, one that was
stopped or killed goes on, so that the same command is given until it ends. What is made of what
stands in default_drafters.py, DIR is described there too.

`data` has the target answer prompts and keeps what its layers compute: 28 GB for the first texts,
an hour and a half on two cores. `train` makes a run per stage, one to two hours each. `calibrate`
sets confidences by texts that were never trained on, `judge` measures what the engine accepts,
greedily and at temperature 1. `ship` puts the drafter into `src/outrider/pretrained/` (or --into)
with everything that is known of it. The last line is its directory and size.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

from default_drafters import PROBLEMS, TEMPERATURES, WHOLE, Plan, Stage, Texts, tiny
from drafter_shipping import PRETRAINED, Finished, ship_drafter

from outrider.bench.provenance import write_whole
from outrider.errors import OutriderError
from outrider.training.dataset import difference
from outrider.training.recipe import recipe_of

HERE = Path(__file__).resolve().parent
PLAIN_EVERY = 4  # one problem in so many is asked as it is, the others with …
AGAIN = "python scripts/build_default_drafters.py WORK --prompts DIR"
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LAYERS = "1,8,14,20,27"  # all that the recipes read
SHARES = "0:68,0.7:12,1:20"  # temperatures of answers
HELD_OUT_EVERY = 250  # steps


@dataclass(frozen=True, slots=True)
class Build:
    """What is asked for, and where."""

    plan: Plan
    work: Path
    prompts: Path | None
    into: Path
    most_stages: int | None = None

    def stages(self, name: str) -> tuple[Stage, ...]:
        return self.plan.drafters[name][: self.most_stages]

    def given(self, file: str) -> Path:
        """A file of prompts."""
        if self.prompts is None or not (self.prompts / file).is_file():
            where = "no --prompts" if self.prompts is None else f"{self.prompts}"
            sys.exit(f"expected --prompts with a directory that holds {file}, got {where}")
        return self.prompts / file

    def run(self, stage: Stage) -> Path:
        return self.work / "runs" / stage.run

    def judged(self, name: str) -> dict[str, Path]:
        """Where each evaluation of a drafter is, made or not."""
        directory = self.run(self.stages(name)[-1]) / "judged"
        return {
            f"{each.name}-{temperature}": directory / f"{each.name}-{temperature}.json"
            for each in self.plan.evaluations
            for temperature in TEMPERATURES
        }

    def header(self, texts: Texts) -> dict[str, Any]:
        """What a data directory says of itself; empty where it does not exist yet."""
        path = self.work / texts.name / "data.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def provenance(self, stage: Stage) -> dict[str, Any] | None:
        """What the drafter of a stage says of itself; None: it is not finished."""
        path = self.run(stage) / "drafter" / "config.json"
        return json.loads(path.read_text())["provenance"] if path.exists() else None

    def is_calibrated(self, name: str) -> bool:
        """Whether the confidences were set by the texts that nothing was trained on."""
        about = self.provenance(self.stages(name)[-1]) or {}
        on = (about.get("calibration") or {}).get("data")
        return on is not None and on == self.header(self.plan.unseen).get("id")


def data(build: Build, name: str) -> None:
    """Texts of the target, and its features on them."""
    for texts in dict.fromkeys([*(each.texts for each in build.stages(name)), build.plan.unseen]):
        if build.header(texts).get("complete"):
            continue
        lines = build.given(PROBLEMS).read_text(encoding="utf-8").splitlines()
        if len(lines) < texts.problems.stop:
            sys.exit(f"{PROBLEMS} holds {len(lines)} lines, expected {texts.problems.stop} or more")
        asked = (_line(lines[i], i) for i in texts.problems)
        write_whole(build.work / texts.prompts, "".join(asked))
        kept = ("--features", texts.features, "--layers", LAYERS) if texts.features else ()
        begun: tuple[str, ...] = ()
        if texts.beginnings:
            begun = ("--beginnings", texts.beginnings)
            copyfile(HERE / texts.beginnings, build.work / texts.beginnings)
        run_command(
            *(build, "data", "--prompts", texts.prompts, "--self-prompts", texts.self_prompts),
            *("--max-tokens", texts.max_tokens, "--temperature", SHARES, "--seed", texts.seed),
            *("-o", texts.name, *kept, *begun),
        )


def _line(line: str, number: int) -> str:
    """A problem as it is asked."""
    [problem] = json.loads(line)["turns"]
    turn = problem if number % PLAIN_EVERY == PLAIN_EVERY - 1 else problem + REQUEST
    return json.dumps({"category": "math", "turns": [turn]}, ensure_ascii=False) + "\n"


def train(build: Build, name: str) -> None:
    """One run per stage, each from the drafter of the one before."""
    start: tuple[object, ...] = ()
    for stage in build.stages(name):
        if not _is_trained(build, stage):
            features = ("--features", stage.texts.features) if stage.texts.features else ()
            changes = [part for change in stage.changes for part in ("--set", change)]
            run_command(
                *(build, "run", stage.recipe, "--data", stage.texts.name, *features, *start),
                *("-o", f"runs/{stage.run}", "--held-out-every", HELD_OUT_EVERY, *changes),
            )
        start = ("--init-from", f"runs/{stage.run}/drafter")


def _is_trained(build: Build, stage: Stage) -> bool:
    """Whether a stage is finished; one that was trained otherwise ends everything."""
    about = build.provenance(stage)
    if about is None:
        return False
    header = build.header(stage.texts)
    found = {"recipe": recipe_of(about["recipe"]).as_json(), "data": about["data"]}
    asked = {"recipe": stage.whole_recipe().as_json(), "data": header.get("id", about["data"])}
    differs = difference(found, asked)
    if differs:
        sys.exit(f"{build.run(stage)} was trained otherwise; move it away: {differs}")
    return True


def calibrate(build: Build, name: str) -> None:
    """Confidences by texts that were never trained on."""
    if not build.is_calibrated(name):
        run = build.stages(name)[-1].run
        run_command(build, "calibrate", f"runs/{run}", "--data", build.plan.unseen.name)


def judge(build: Build, name: str) -> None:
    """What the engine accepts of the drafter."""
    places = build.judged(name)
    for each in build.plan.evaluations:
        kinds = [part for category in each.categories for part in ("--category", category)]
        for temperature in TEMPERATURES:
            output = places[f"{each.name}-{temperature}"]
            if output.exists():
                continue
            run_command(
                *(build, "eval", f"runs/{build.stages(name)[-1].run}", *kinds),
                *("--workload", build.given(each.file), "--limit", each.limit),
                *("--max-tokens", each.max_tokens, "--temperature", temperature),
                *("-o", output.relative_to(build.work)),
            )


def ship(build: Build, name: str) -> None:
    """Put the drafter where it is found, with all that is known of it."""
    stages = build.stages(name)
    waiting = [stage.run for stage in stages if not _is_trained(build, stage)]
    missing = [key for key, path in build.judged(name).items() if not path.exists()]
    if waiting or missing or not build.is_calibrated(name):
        left = f"stages to train: {waiting}, calibrated: {build.is_calibrated(name)}"
        sys.exit(f"{name} is not finished; {left}, evaluations to make: {missing}")
    texts = dict.fromkeys([*(stage.texts for stage in stages), build.plan.unseen])
    cut = f" --stages {build.most_stages}" if build.most_stages else ""
    finished = Finished(
        name=name,
        command=f"{AGAIN} --only {name}{cut}",
        runs=[build.run(stage) for stage in stages],
        texts={each.name: build.header(each) for each in texts},
        judged=build.judged(name),
    )
    ship_drafter(finished, build.into)


PARTS = {"data": data, "train": train, "calibrate": calibrate, "judge": judge, "ship": ship}


def run_command(build: Build, *arguments: object) -> None:
    """One command of `outrider train`, in the directory of the work; the first that fails is the
    last."""
    words = ["train", *map(str, arguments)]
    print("$ outrider", *words, flush=True)
    command = [sys.executable, "-m", "outrider.cli.main", *words]
    process = subprocess.Popen(command, cwd=build.work)
    with _signals_left_to(process):
        code = process.wait()
    if code:
        sys.exit(f"`outrider train {words[1]}` ended with {code}; the same command goes on")


@contextmanager
def _signals_left_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """It saves before it ends: a terminal's Ctrl-C reaches it too, SIGTERM is handed on."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("work", type=Path, help="directory that keeps everything")
    parser.add_argument("--prompts", type=Path, help="directory of the files of prompts")
    names = list(WHOLE.drafters)
    parser.add_argument("--only", action="append", choices=names, help="drafter; may be repeated")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be repeated")
    parser.add_argument("--stages", type=int, help="at most so many of each drafter")
    parser.add_argument("--into", type=Path, help="directory to ship to")
    parser.add_argument("--tiny", action="store_true", help="minutes, worthless: WORK/shipped")
    given = parser.parse_args()
    if given.stages is not None and given.stages < 1:
        parser.error(f"--stages must be 1 or more, got {given.stages}")
    build = Build(
        tiny(WHOLE) if given.tiny else WHOLE,
        given.work,
        given.prompts and given.prompts.resolve(),
        given.into or (given.work / "shipped" if given.tiny else PRETRAINED),
        given.stages,
    )
    build.work.mkdir(parents=True, exist_ok=True)
    parts = given.part or list(PARTS)
    try:
        for name in given.only or names:
            for part in (each for each in PARTS if each in parts):
                PARTS[part](build, name)
    except OutriderError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
