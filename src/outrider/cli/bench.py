"""`outrider bench`: plain against speculative decoding, as honestly as one machine allows."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

import typer

from outrider.cli.bench_options import (
    MOST_REQUESTS,
    BenchModelOptions,
    MeasureOptions,
    ReportOptions,
    SpeedOnlyOptions,
    WorkloadOptions,
    check_combination,
    cpu_threads,
    given_options,
    numbers,
)
from outrider.cli.bench_peers import peers as peers
from outrider.cli.console import messages, output
from outrider.cli.interrupts import already_told
from outrider.cli.options import ModelOptions
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.study import Settings, Study

SPEED_ONLY_INPUT = 128  # tokens of a prompt without meaning


def bench(
    context: typer.Context,
    model: BenchModelOptions,
    workload: WorkloadOptions,
    measure: MeasureOptions,
    speed_only: SpeedOnlyOptions,
    report: ReportOptions,
) -> None:
    """Measure plain against speculative decoding: speed, acceptance, losslessness, where time goes.

    All sides run the same prompts with the same seeds in the same process, in alternating rounds
    after a warm-up: plain decoding, and every --speculative-config. `outrider bench peers` runs the
    prompts through other engines.
    """
    is_random = speed_only.speed_only is not None
    check_combination(given_options(context), is_random, context.invoked_subcommand)
    if context.invoked_subcommand is not None:
        return
    settings = _settings(workload, measure)
    report.check()
    _pin(model)
    try:
        study = (
            _random_model(model, settings, speed_only)
            if is_random
            else _real_model(model, settings, workload)
        )
    except (KeyboardInterrupt, SystemExit) as end:
        messages().print("interrupted: nothing was measured")
        raise already_told(end) from None
    _show_and_write(study, report)
    if study.stopped is not None:
        raise already_told(study.stopped)


def _real_model(
    model: BenchModelOptions, settings: "Settings", options: WorkloadOptions
) -> "Study":
    from outrider.bench.configs import parse_configs
    from outrider.bench.provenance import provenance
    from outrider.bench.study import bench_model, num_answers
    from outrider.bench.workload import check_room, read_workload

    configs = parse_configs(model.speculative_config or ("auto",))
    if model.max_model_len is not None:
        check_room(
            model.max_model_len, settings.max_tokens, settings.input_tokens, settings.contexts
        )
    workload = read_workload(options.workload or (), options.category or (), options.limit)
    llm = model.plain(max(settings.batches)).load()
    about = provenance(cpu_threads())
    with _progress(num_answers(settings, len(configs), len(workload.prompts))) as done:
        study = bench_model(llm, configs, workload, settings, done)
    study.provenance = about
    return study


def _random_model(model: ModelOptions, settings: "Settings", options: SpeedOnlyOptions) -> "Study":
    from outrider.bench.provenance import provenance
    from outrider.bench.speed_only import MAX_MODEL_LEN, random_target
    from outrider.bench.study import bench_speed_only
    from outrider.bench.workload import check_room
    from outrider.cli.progress import start_up
    from outrider.llm import LLM

    assert options.speed_only is not None
    rates = numbers(options.acceptance, float, "--acceptance", most=1.0)
    settings = replace(
        settings, input_tokens=settings.input_tokens or SPEED_ONLY_INPUT, ignore_eos=True
    )
    check_room(MAX_MODEL_LEN, settings.max_tokens, settings.input_tokens)
    with start_up():
        llm = LLM(
            target=random_target(options.speed_only, model.dtype, settings.seed),
            speculative_config=None,
            max_num_seqs=max(settings.batches),
        )
    about = provenance(cpu_threads())
    with _progress(2 * settings.rounds * len(rates) * sum(settings.batches)) as done:
        study = bench_speed_only(llm, settings, rates, options.draft_tokens, done)
    study.provenance = about
    return study


def _settings(workload: WorkloadOptions, measure: MeasureOptions) -> "Settings":
    from outrider.bench.study import Settings

    settings = Settings(
        batches=tuple(numbers(measure.batch, int, "--batch", most=MOST_REQUESTS)),
        rounds=measure.rounds,
        max_tokens=workload.max_tokens,
        input_tokens=workload.input_tokens,
        ignore_eos=workload.ignore_eos,
        temperature=workload.temperature,
        top_p=workload.top_p,
        seed=workload.seed,
        contexts=tuple(numbers(measure.context_lengths, int, "--context-lengths", True)),
    )
    settings.params()  # refuses values out of range before anything is loaded
    return settings


def _pin(model: ModelOptions) -> None:
    from outrider.bench.timing import pin

    pin(model.num_threads)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, to be told how many answers were just finished."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = messages()
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda count: bar.advance(task, count)


def _show_and_write(study: "Study", report: ReportOptions) -> None:
    """The terminal comes first: a full disk shall not take the results with it."""
    from outrider.bench.terminal import show

    try:
        with _while_read(sys.stdout):
            show(output(), study)
    finally:
        _write(study, report)


@contextmanager
def _while_read(stream: TextIO) -> Iterator[None]:
    """Write for as long as somebody reads; that `head` has seen enough is no failure."""
    try:
        yield
        stream.flush()
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != 1:  # rich's, when nobody reads on
            raise
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(study: "Study", report: ReportOptions) -> None:
    from outrider.bench.provenance import write_whole
    from outrider.bench.report import json_text, write_report

    try:
        write_whole(report.files[0], json_text(study))
        for path in report.files[1:]:
            write_report(study, path)
    except ConfigError as error:
        raise ConfigError(f"{error}; the results are shown above") from error
    with _while_read(sys.stderr):
        messages().print("\nwritten: " + ", ".join(map(str, report.files)), style="dim")
