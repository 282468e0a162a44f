"""Options of `outrider bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.errors import ConfigError

WORKLOAD_PANEL = "Workload"
MEASURE_PANEL = "Measuring"
SPEED_PANEL = "Speed only"
REPORT_PANEL = "Report"
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


def numbers(text: str, kind: type, name: str, may_be_empty: bool = False) -> list[Any]:
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


def cpu_threads() -> int:
    """As many as torch uses."""
    import torch

    return torch.get_num_threads()
