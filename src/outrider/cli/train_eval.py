"""`outrider train eval` and `calibrate`: how good a drafter is, and how well it knows it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.bench_options import WorkloadOptions
from outrider.cli.train_options import DataPath, FeaturesPath, TargetOptions, about, bar
from outrider.errors import ConfigError, DataError

if TYPE_CHECKING:
    from outrider.bench.workload import Workload
    from outrider.checkpoints import LoadedDrafter
    from outrider.llm import LLM
    from outrider.training.rollouts import Rollouts

BATCH = 8


def evaluate(
    target: TargetOptions,
    workload: WorkloadOptions,
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="A run, a drafter, or a speculative config as JSON.",
        ),
    ],
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of every draft; default: all it can.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = BATCH,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the numbers as JSON.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Show them as JSON.")] = False,
) -> None:
    """Measure what the engine accepts: tokens per step by category, and the chance of each depth.

    Every draft has the same length, whether it pays or not; what would pay is `outrider bench`'s
    question.
    """
    from outrider.bench.provenance import check_writable, write_whole
    from outrider.bench.workload import check_room, read_workload
    from outrider.cli.console import output as stdout
    from outrider.cli.train_show import print_rollouts
    from outrider.training.dataset import check_made_for

    config, loaded = _config(drafter)
    if output is not None:
        check_writable(output)
    prompts = read_workload(workload.workload or (), workload.category or (), workload.limit)
    threads = target.set_threads()
    llm = _load(target, config, draft_tokens, batch)
    if loaded is not None:
        check_made_for(loaded, config["model"], llm.target.name, llm.tokenizer)
    check_room(llm.engine.max_model_len, workload.max_tokens, workload.input_tokens)
    found = _roll_out(llm, prompts, workload, batch, draft_tokens)
    result = {
        **found.as_json(),
        "config": config,
        "draft_tokens": draft_tokens,
        "workload": prompts.as_json(),
        "settings": {
            name: getattr(workload, name) for name in ("max_tokens", "temperature", "top_p", "seed")
        },
        "provenance": about(threads),
    }
    text = json.dumps(result, indent=1) + "\n"
    if json_output:
        sys.stdout.write(text)
    else:
        print_rollouts(stdout(), found)
    if output is not None:
        write_whole(output, text)


def _config(given: str) -> "tuple[dict[str, Any], LoadedDrafter | None]":
    """The config of the one source that the argument means, and the drafter where it is one."""
    from outrider.checkpoints import load_drafter
    from outrider.cli.options import parse_speculative_config
    from outrider.training.run import drafter_at

    is_json = given.lstrip().startswith(("{", "["))
    if not is_json and Path(given).exists():
        path = drafter_at(Path(given))
        loaded = load_drafter(path)
        return {"method": loaded.drafter.config.algorithm, "model": str(path)}, loaded
    config = parse_speculative_config(given, "DRAFTER") if is_json else None
    if isinstance(config, list) and len(config) == 1:
        [config] = config
    if not isinstance(config, dict):
        raise ConfigError(
            "DRAFTER must be the directory of a run or a drafter, or the JSON of one source, as "
            f'{{"method": "dspark"}}, got {given!r:.80}'
        )
    return config, None


def _load(
    target: TargetOptions, config: dict[str, Any], draft_tokens: int | None, batch: int
) -> "LLM":
    from outrider.cli.progress import start_up
    from outrider.llm import LLM
    from outrider.policy.fixed import FixedLength

    with start_up():
        llm = LLM(
            target.model,
            speculative_config=config,
            max_num_seqs=batch,
            device=target.device,
            policy=FixedLength(draft_tokens),
        )
    names = [source.name for source in llm.engine.speculation.sources]
    if len(names) != 1:
        raise ConfigError(f"DRAFTER must be one source, {config} makes {len(names)}: {names}")
    return llm


def _roll_out(
    llm: "LLM",
    prompts: "Workload",
    options: WorkloadOptions,
    batch: int,
    draft_tokens: int | None,
) -> "Rollouts":
    from outrider.bench.drive import Pass, drive
    from outrider.bench.workload import encoded
    from outrider.engine.times import StepTimes
    from outrider.sampling_params import SamplingParams
    from outrider.training.rollouts import acceptance

    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )
    asked = encoded(llm, prompts, options.max_tokens, options.input_tokens)
    total = Pass([], 0.0, StepTimes())
    with bar("answers", len(asked)) as advance:
        for first in range(0, len(asked), 4 * batch):
            part = asked[first : first + 4 * batch]
            total += drive(llm, part, params, batch)
            advance(len(part))
    categories = [prompt.category for prompt in prompts.prompts]
    [source] = llm.engine.speculation.sources  # `_load` has seen to it
    most = source.max_draft_tokens
    return acceptance(total, categories, most if draft_tokens is None else min(most, draft_tokens))


def calibrate(
    target: TargetOptions,
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_DRAFTER", help="A run, or a drafter.")],
    data: DataPath,
    features: FeaturesPath = None,
) -> None:
    """Calibrate a drafter's confidences: a temperature and a shift per depth, stored in it.

    Of the data that it was trained on, the texts that were held out are taken; of data that it has
    never seen all.
    """
    from outrider.checkpoints import OURS, load_drafter
    from outrider.cli.console import messages
    from outrider.training.calibrate import recalibrate
    from outrider.training.dataset import Data
    from outrider.training.run import drafter_held

    target.set_threads()
    with drafter_held(path) as directory:
        loaded = load_drafter(directory)
        if loaded.format != OURS:
            raise DataError(
                f"{directory} has the format {loaded.format}, which keeps no calibration"
            )
        found = recalibrate(loaded, directory, Data(data), target.find(), features)
    before, after = found.mean_errors
    temperatures, shifts = (
        " ".join(f"{value:.2f}" for value in values)
        for values in (found.temperatures, found.shifts)
    )
    messages().print(
        f"{directory}: temperatures {temperatures}; shifts {shifts}; calibration error of "
        f"survival {before:.1%}, now {after:.1%}",
        soft_wrap=True,
    )
