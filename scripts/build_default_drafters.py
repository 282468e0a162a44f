"""Makes the trained drafters that ship for the default target.

    python scripts/build_default_drafters.py data WORK --problems train_prompts.jsonl
    python scripts/build_default_drafters.py train WORK dspark eagle3 dflash peagle mtp
    python scripts/build_default_drafters.py judge WORK dspark --workload gsm8k_test.jsonl
    python scripts/build_default_drafters.py ship WORK dspark

`data` lets the target answer school problems (a JSONL file with `turns`: the prompts of GSM8K's
training set, three of four with a request for a boxed answer, as it is often asked) and prompts
that it makes up itself, and keeps what its layers computed: about 28 GB, an hour on two cores.
`train` runs the recipe of each name: one to two hours each. `judge` measures what the engine
accepts, greedily and at temperature 1, over files that were not trained on. `ship` puts drafters
into `src/outrider/pretrained/` with their curve and these measurements. All but the last can be
stopped and started again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import outrider
from outrider.checkpoints import load_drafter, save_drafter
from outrider.target.load import load_model
from outrider.training.run import target_json

PRETRAINED = Path(outrider.__file__).parent / "pretrained"
NUM_PROBLEMS = 4600
PLAIN_EVERY = 4  # one problem in so many is asked as it is, the others with …
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
DATA = (
    *("--self-prompts", "10400", "--max-tokens", "384", "--seed", "1"),
    *("--temperature", "0:68,0.7:12,1:20", "--layers", "1,8,14,20,27"),
)
TEMPERATURES = (0, 1)
MAX_BYTES = 25_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for name, run in (("data", data), ("train", train), ("judge", judge), ("ship", ship)):
        command = commands.add_parser(name)
        command.add_argument("work", type=Path)
        command.set_defaults(run=run)
        if name == "data":
            command.add_argument("--problems", type=Path, required=True)
        else:
            command.add_argument("names", nargs="+")
        if name == "judge":
            command.add_argument("--workload", type=Path, nargs="+", required=True)
            command.add_argument("--limit", type=int, default=80)
            command.add_argument("--category", action="append", default=[])
    given = parser.parse_args()
    given.run(given)


def data(given: argparse.Namespace) -> None:
    """Texts of the target, and its features on them."""
    given.work.mkdir(parents=True, exist_ok=True)
    prompts = given.work / "math.jsonl"
    prompts.write_text("".join(map(_line, _problems(given.problems))), encoding="utf-8")
    features = given.work / "features"
    cli("data", "--prompts", prompts, *DATA, "-o", given.work / "data", "--features", features)


def _problems(path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").splitlines()[:NUM_PROBLEMS]
    for i, line in enumerate(lines):
        [problem] = json.loads(line)["turns"]
        yield problem if i % PLAIN_EVERY == PLAIN_EVERY - 1 else problem + REQUEST


def _line(problem: str) -> str:
    return json.dumps({"category": "math", "turns": [problem]}, ensure_ascii=False) + "\n"


def train(given: argparse.Namespace) -> None:
    """One run per recipe."""
    for name in given.names:
        places = ("--data", given.work / "data", "--features", given.work / "features")
        cli("run", name, *places, "-o", given.work / "runs" / name)


def judge(given: argparse.Namespace) -> None:
    """What the engine accepts of each drafter, file by file."""
    kinds = [part for category in given.category for part in ("--category", category)]
    for name in given.names:
        for workload in given.workload:
            for temperature in TEMPERATURES:
                cli(
                    *("eval", given.work / "runs" / name, "--workload", workload, *kinds),
                    *("--limit", given.limit, "--temperature", temperature),
                    *("-o", _judged(given.work, name) / f"{workload.stem}-{temperature}.json"),
                )


def ship(given: argparse.Namespace) -> None:
    """Put drafters where they are found, with all that is known of them."""
    target = target_json(load_model(None))
    for name in given.names:
        run = given.work / "runs" / name
        loaded = load_drafter(run / "drafter")
        provenance = {
            **loaded.config["provenance"],
            "reproduce": f"python scripts/build_default_drafters.py train WORK {name}",
            "texts": json.loads((given.work / "data" / "data.json").read_text()),
            "curve": list(_curve(run / "log.jsonl")),
            "evaluation": {
                path.stem: _summary(json.loads(path.read_text()))
                for path in sorted(_judged(given.work, name).glob("*.json"))
            },
        }
        directory = PRETRAINED / f"smollm2-135m-{name}"
        save_drafter(loaded.drafter, directory, target=target, provenance=provenance)
        size = sum(path.stat().st_size for path in directory.iterdir())
        if size > MAX_BYTES:
            sys.exit(f"{directory} has {size:,} bytes, more than {MAX_BYTES:,}")
        print(f"{directory}: {size:,} bytes")


def _curve(log: Path) -> Iterator[dict[str, Any]]:
    """Acceptance length on held-out texts, by the tokens seen."""
    tokens = 0
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        tokens = entry.get("num_tokens", tokens)
        if entry.get("held_out"):
            length = entry["held_out"]["acceptance_length"]
            yield {"step": entry["step"], "num_tokens": tokens, "acceptance_length": length}


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation came to, without what it was made of."""
    return {name: found[name] for name in ("kinds", "loops", "settings", "draft_tokens")}


def _judged(work: Path, name: str) -> Path:
    directory = work / "judged" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def cli(*arguments: object) -> None:
    """One command of `outrider train`."""
    command = [sys.executable, "-m", "outrider.cli.main", "train", *map(str, arguments)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
