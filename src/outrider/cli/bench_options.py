"""Options of `outrider bench`."""

import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.checks import shown
from outrider.cli.options import MODEL_PANEL, ModelOptions
from outrider.errors import ConfigError
from outrider.threads import set_num_threads

WORKLOAD_PANEL = "Workload"
MEASURE_PANEL = "Measuring"
SPEED_PANEL = "Speed only"
REPORT_PANEL = "Report"
FORMATS = {"html": ".html", "markdown": ".md", "none": ""}
MOST_REQUESTS = 512  # at once: each needs a row of a forward, max_num_batched_tokens by default
# Parameters that mean nothing for a model of random weights, and those that mean nothing else.
REAL_MODEL_ONLY = (
    "model",
    "tokenizer",
    "speculative_config",
    "max_model_len",
    "kv_cache_tokens",
    "deterministic",
    "device",
    "workload",
    "category",
    "limit",
    "context_lengths",
)
SPEED_ONLY_ONLY = ("acceptance", "draft_tokens")


@dataclass(slots=True)
class BenchModelOptions(ModelOptions):
    """What to load, and several ways to draft for it."""

    speculative_config: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        list[str] | None,
        typer.Option(
            help="Who drafts: vLLM's JSON (one object or a list), @FILE that holds it, or 'auto',"
            " which is the default. May be repeated: every config is measured, under NAME or else"
            " its methods.",
            metavar="[NAME=]JSON|@FILE",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None

    def plain(self, max_num_seqs: int) -> ModelOptions:
        """The same model without drafts, for so many requests at a time."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return ModelOptions(**values | {"speculative_config": "none", "max_num_seqs": max_num_seqs})


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
        self._check_name()
        from outrider.bench.provenance import check_writable

        for path in self.files:
            check_writable(path)
        if self.report != "none":
            from outrider.bench.plots import why_no_plots

            reason = why_no_plots()
            if reason:
                messages().print(f"The report will have no plots: {reason}")

    def _check_name(self) -> None:
        """Cut a suffix that the files get anyway; one of another kind is a misunderstanding."""
        given, suffix = str(self.output), self.output.suffix
        own = [".json", *filter(None, [FORMATS[self.report]])]
        if suffix in own:
            self.output = self.output.with_suffix("")
        elif re.fullmatch(r"\.[A-Za-z]\w*", suffix):  # ".6B" belongs to a name
            raise ConfigError(
                f"--output must be a name without suffix, or end in {' or '.join(own)} "
                f"for --report {self.report}, got {given!r}"
            )
        if self.output.name in ("", "..") or os.path.isdir(self.output):
            example = self.output / "bench"
            raise ConfigError(
                f"--output must name the files, for example {str(example)!r}, "
                f"got the directory {given!r}"
            )

    @property
    def files(self) -> list[Path]:
        """The JSON, and the report where one is wanted."""
        names = [self.beside(".json")]
        if self.report != "none":
            names.append(self.beside(FORMATS[self.report]))
        return names

    def beside(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)


def numbers(
    text: str,
    kind: type,
    name: str,
    may_be_empty: bool = False,
    most: float | None = None,
) -> list[Any]:
    """The numbers of ``1,2,4``, each given once: whole ones from 1, others from 0, up to `most`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [kind(part) for part in parts]
    except ValueError as error:
        raise ConfigError(
            f"{name} must be numbers with commas between, got {shown(text)}"
        ) from error
    if any(
        value < 0 or not math.isfinite(value) or (kind is int and value < 1) for value in values
    ):
        raise ConfigError(f"{name} must be positive numbers, got {shown(text)}")
    if most is not None and any(value > most for value in values):
        raise ConfigError(f"{name} must be numbers of at most {most}, got {shown(text)}")
    if len(set(values)) < len(values):
        raise ConfigError(f"{name} must have every number once, got {shown(text)}")
    if not values and not may_be_empty:
        raise ConfigError(f"{name} needs at least one number, got {shown(text)}")
    return values


def given_options(context: typer.Context) -> dict[str, str]:
    """What stands on the command line, by parameter: ``{"max_tokens": "--max-tokens"}``."""
    return {
        parameter.name: max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name is not None
        and (source := context.get_parameter_source(parameter.name)) is not None
        and source.name == "COMMANDLINE"
    }


def check_combination(given: dict[str, str], speed_only: bool, subcommand: str | None) -> None:
    """Refuse options that would be ignored beside the others.

    Raises:
        ConfigError: names the option and what it does not go with.
    """
    if subcommand is not None:
        for option in given.values():
            raise ConfigError(
                f"{option} belongs to `bench`, not to `bench {subcommand}`: "
                f"expected options of `{subcommand}` behind its name"
            )
    if "max_num_seqs" in given:
        raise ConfigError(
            f"{given['max_num_seqs']} does not go with bench: expected --batch, which says how "
            "many requests are under way"
        )
    for name in REAL_MODEL_ONLY if speed_only else SPEED_ONLY_ONLY:
        if name in given:
            other = "with" if speed_only else "without"
            raise ConfigError(f"{given[name]} does not go {other} --speed-only")


def cpu_threads() -> int:
    """As many as the kernels use."""
    return set_num_threads()
