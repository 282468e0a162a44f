"""`outrider bench`: plain against speculative decoding, as honestly as one machine allows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import ModelOptions
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.study import Settings, Study

WORKLOAD_PANEL = "Workload"
MEASURE_PANEL = "Measuring"
SPEED_PANEL = "Speed only"
REPORT_PANEL = "Report"
SPEED_ONLY_INPUT = 128  # tokens of a prompt without meaning
FORMATS = {"html": ".html", "markdown": ".md", "none": ""}


@dataclass(slots=True)
class WorkloadOptions:
    """What is decoded."""

    workload: Annotated[
        list[Path] | None,
        typer.Option(
            "--workload",
            "-w",
            help="JSONL whose lines have 'prompt', 'turns' or 'messages', and perhaps 'category';"
            " may be repeated. Default: 16 prompts of five kinds that come with outrider.",
            rich_help_panel=WORKLOAD_PANEL,
        ),
    ] = None
    category: Annotated[
        list[str] | None,
        typer.Option(help="Only this kind; may be repeated.", rich_help_panel=WORKLOAD_PANEL),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="At most so many prompts.", rich_help_panel=WORKLOAD_PANEL),
    ] = None
    input_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Exact length of every prompt: longer ones are cut, shorter ones left out.",
            rich_help_panel=WORKLOAD_PANEL,
        ),
    ] = None
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Longest answer.", rich_help_panel=WORKLOAD_PANEL)
    ] = 128
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Every answer has exactly --max-tokens tokens.",
            rich_help_panel=WORKLOAD_PANEL,
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=WORKLOAD_PANEL)
    ] = 0.0
    top_p: Annotated[
        float, typer.Option(help="With a temperature.", rich_help_panel=WORKLOAD_PANEL)
    ] = 1.0
    seed: Annotated[
        int, typer.Option(help="The same on both sides.", rich_help_panel=WORKLOAD_PANEL)
    ] = 0


@dataclass(slots=True)
class MeasureOptions:
    """How often, and at which sizes."""

    batch: Annotated[
        str,
        typer.Option(
            help="Batch sizes: requests under way at the same time.",
            metavar="N,N,…",
            rich_help_panel=MEASURE_PANEL,
        ),
    ] = "1,8"
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Both sides take turns so often; medians are shown.",
            rich_help_panel=MEASURE_PANEL,
        ),
    ] = 3
    context_lengths: Annotated[
        str,
        typer.Option(
            help="Also sweep over these prompt lengths in tokens, at batch 1.",
            metavar="N,N,…",
            rich_help_panel=MEASURE_PANEL,
        ),
    ] = ""


@dataclass(slots=True)
class SpeedOnlyOptions:
    """A model of random weights instead of a real one."""

    speed_only: Annotated[
        str | None,
        typer.Option(
            help="Random weights of this size (135m, 360m, 1b, 3b or 8b) and forced acceptance:"
            " what would verification cost, and what would an acceptance bring?",
            metavar="SIZE",
            rich_help_panel=SPEED_PANEL,
        ),
    ] = None
    acceptance: Annotated[
        str,
        typer.Option(
            help="Chance of a draft token to be right, given those before it.",
            metavar="X,X,…",
            rich_help_panel=SPEED_PANEL,
        ),
    ] = "0.6,0.8"
    draft_tokens: Annotated[
        int,
        typer.Option(min=1, help="Length of a forced draft.", rich_help_panel=SPEED_PANEL),
    ] = 8


@dataclass(slots=True)
class ReportOptions:
    """Where the numbers go."""

    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Writes OUTPUT.json with every round and its provenance, and a report beside it.",
            rich_help_panel=REPORT_PANEL,
        ),
    ] = Path("results/bench")
    report: Annotated[
        str,
        typer.Option(
            help="html (one file), markdown (with plots beside it) or none.",
            rich_help_panel=REPORT_PANEL,
        ),
    ] = "html"

    def check(self) -> None:
        """Refuse what could not be written in the end, before anything is measured."""
        from outrider.cli.console import messages

        if self.report not in FORMATS:
            raise ConfigError(f"--report must be one of {', '.join(FORMATS)}, got {self.report!r}")
        if self.output.suffix in (".json", ".html", ".md"):
            self.output = self.output.with_suffix("")
        if self.output.parent.exists() and not self.output.parent.is_dir():
            raise ConfigError(f"--output: {self.output.parent} is no directory")
        if self.report != "none":
            from outrider.bench.plots import INSTALL, can_plot

            if not can_plot():
                messages().print(f"The report will have no plots; for them: {INSTALL}")

    def beside(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)


def bench(
    context: typer.Context,
    model: ModelOptions,
    workload: WorkloadOptions,
    measure: MeasureOptions,
    speed_only: SpeedOnlyOptions,
    report: ReportOptions,
) -> None:
    """Measure plain against speculative decoding: speed, acceptance, losslessness, where time goes.

    Both sides run the same prompts with the same seeds in the same process, in alternating rounds
    after a warm-up. `outrider bench peers` runs the prompts through other engines.
    """
    if context.invoked_subcommand is not None:
        return
    report.check()
    settings = _settings(workload, measure)
    _pin(model)
    study = (
        _random_model(model, settings, speed_only)
        if speed_only.speed_only is not None
        else _real_model(model, settings, workload)
    )
    _write(study, report)


def _real_model(model: ModelOptions, settings: "Settings", options: WorkloadOptions) -> "Study":
    from outrider.bench.provenance import provenance
    from outrider.bench.study import bench_model, num_answers
    from outrider.bench.workload import read_workload
    from outrider.cli.options import parse_speculative_config

    config = parse_speculative_config(model.speculative_config)
    if config is None:
        raise ConfigError("bench needs drafts: --speculative-config is 'none', expected another")
    workload = read_workload(options.workload or (), options.category or (), options.limit)
    llm = replace(model, max_num_seqs=max(settings.batches)).load()
    about = provenance(_threads())
    with _progress(num_answers(settings, len(workload.prompts))) as done:
        study = bench_model(llm, config, workload, settings, done)
    study.provenance = about
    return study


def _random_model(model: ModelOptions, settings: "Settings", options: SpeedOnlyOptions) -> "Study":
    from outrider.bench.provenance import provenance
    from outrider.bench.speed_only import random_target
    from outrider.bench.study import bench_speed_only
    from outrider.cli.progress import start_up
    from outrider.llm import LLM

    assert options.speed_only is not None
    rates = _list_of(options.acceptance, float, "--acceptance")
    settings = replace(
        settings, input_tokens=settings.input_tokens or SPEED_ONLY_INPUT, ignore_eos=True
    )
    with start_up():
        llm = LLM(
            target=random_target(options.speed_only, model.dtype, settings.seed),
            speculative_config=None,
            max_num_seqs=max(settings.batches),
        )
    about = provenance(_threads())
    with _progress(2 * settings.rounds * len(rates) * sum(settings.batches)) as done:
        study = bench_speed_only(llm, settings, rates, options.draft_tokens, done)
    study.provenance = about
    return study


def _settings(workload: WorkloadOptions, measure: MeasureOptions) -> "Settings":
    from outrider.bench.study import Settings

    settings = Settings(
        batches=tuple(_list_of(measure.batch, int, "--batch")),
        rounds=measure.rounds,
        max_tokens=workload.max_tokens,
        input_tokens=workload.input_tokens,
        ignore_eos=workload.ignore_eos,
        temperature=workload.temperature,
        top_p=workload.top_p,
        seed=workload.seed,
        contexts=tuple(_list_of(measure.context_lengths, int, "--context-lengths", True)),
    )
    settings.params()  # refuses values out of range before anything is loaded
    return settings


def _list_of(text: str, kind: type, name: str, may_be_empty: bool = False) -> list[Any]:
    """The numbers of ``1,2,4``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [kind(part) for part in parts]
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers with commas between, got {text!r}") from error
    if any(value < 0 or (kind is int and value < 1) for value in values):
        raise ConfigError(f"{name} must be positive numbers, got {text!r}")
    if not values and not may_be_empty:
        raise ConfigError(f"{name} needs at least one number")
    return values


def _pin(model: ModelOptions) -> None:
    from outrider.bench.timing import pin

    pin(model.num_threads or _threads())


def _threads() -> int:
    import torch

    return torch.get_num_threads()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, to be told how many answers were just finished."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from outrider.cli.console import messages

    console = messages()
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda count: bar.advance(task, count)


def _write(study: "Study", options: ReportOptions) -> None:
    import json

    from outrider.bench.provenance import write_whole
    from outrider.bench.report import write_report
    from outrider.bench.terminal import show
    from outrider.cli.console import messages, output

    written = [options.beside(".json")]
    write_whole(written[0], json.dumps(study.as_json(), indent=1, ensure_ascii=False))
    if options.report != "none":
        written.append(options.beside(FORMATS[options.report]))
        write_report(study, written[-1])
    show(output(), study)
    messages().print("\nwritten: " + ", ".join(map(str, written)), style="dim")
