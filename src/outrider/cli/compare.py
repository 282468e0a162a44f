"""`outrider compare`: the same prompts decoded plainly and speculatively, side by side."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import ModelOptions, SamplingOptions, parse_speculative_config
from outrider.cli.prompts import PromptRecord, gather
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from outrider.cli.comparison import Comparison
    from outrider.cli.console import Colours
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams

DEFAULT_SEED = 0  # both sides must draw the same noise when none is asked for


def compare(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts; '-' reads one from standard input. None: those of the demo.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="JSONL; each line has 'prompt', 'turns' (the first is taken) or 'messages'."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are shown.")] = 3,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt on standard output.")
    ] = False,
) -> None:
    """Decode prompts plainly and speculatively: same text? how much faster? who drafted what?"""
    from outrider.cli.console import Colours, output
    from outrider.cli.demo_prompts import DEMO_PROMPTS

    if parse_speculative_config(model.speculative_config) is None:
        raise ConfigError(
            f"compare needs drafts: --speculative-config is {model.speculative_config!r}, "
            "expected another"
        )
    records = gather(prompts or [], file) if prompts or file else list(DEMO_PROMPTS)
    params = sampling.params()
    if params.seed is None and not params.is_greedy:
        params = replace(params, seed=DEFAULT_SEED)
    llm = model.load()
    results = measure(llm, records, params, rounds, raw or llm.tokenizer.chat_template is None)
    if json_output:
        for result in results:
            sys.stdout.write(json.dumps(result.as_json(), ensure_ascii=False) + "\n")
        return
    console, colours = output(), Colours()
    for result in results:
        show(console, result, colours)
    if len(results) > 1:
        console.print(overview(results))


def measure(
    llm: "LLM", records: Sequence[PromptRecord], params: "SamplingParams", rounds: int, raw: bool
) -> list["Comparison"]:
    """Both ways of decoding every record, with a bar on stderr."""
    from rich.progress import Progress

    from outrider.cli.answers import Dialogue
    from outrider.cli.comparison import compare_prompt, twin
    from outrider.cli.console import messages

    console = messages()
    plain = twin(llm)
    results = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("plain and speculative in turns", total=2 * rounds * len(records))
        for record in records:
            prompt = Dialogue(record, raw).ask(0)
            results.append(
                compare_prompt(
                    plain,
                    llm,
                    prompt,
                    params,
                    rounds,
                    record.label,
                    done=lambda: progress.advance(task),
                )
            )
    return results


def show(console: "Console", result: "Comparison", colours: "Colours") -> None:
    """One prompt: the texts side by side, the verdict, the numbers, acceptance by position."""
    console.rule(result.label or "prompt", style="dim")
    console.print(shortened(result.prompt), style="dim")
    console.print(_side_by_side(result, colours))
    console.print(verdict(result))
    if result.difference is not None:
        where = result.difference
        console.print(
            f"  at token {where.position}, after …{where.context!r}:\n"
            f"  plain {where.plain_token!r}, speculative {where.speculative_token!r}"
        )
    console.print(colours.legend(result.speculative.token_sources))
    console.print(_acceptance(result, colours))


def shortened(text: str, limit: int = 240) -> str:
    """The text on one paragraph, cut in the middle when it is long."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def verdict(result: "Comparison") -> str:
    """One line of at most 80 columns: same text or not, both speeds, tokens per forward."""
    same = "✓ same text" if result.same_text else "✗ the texts differ"
    parts = [same]
    if result.speedup is not None:
        parts.append(f"plain {result.plain.rate:.0f} → {result.speculative.rate:.0f} tokens/s")
        parts.append(f"{result.speedup:.2f}×")
    if result.speculative.metrics is not None:
        parts.append(f"{result.speculative.metrics.tokens_per_target_step:.2f} tokens/forward")
    return " · ".join(parts)


def _side_by_side(result: "Comparison", colours: "Colours") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from outrider.cli.console import printable

    table = Table(expand=True, show_lines=False)
    table.add_column("plain", ratio=1)
    table.add_column("speculative", ratio=1)
    table.add_row(Text(printable(result.plain.text)), colours.paint(result.spans))
    return table


def _acceptance(result: "Comparison", colours: "Colours", positions: int = 8) -> "Table":
    """Drafted, kept, and the share kept at each draft position."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim")
    for column in ("source", "drafted", "kept", *(f"#{i + 1}" for i in range(positions))):
        table.add_column(column, justify="left" if column == "source" else "right")
    metrics = result.speculative.metrics
    for name, one in sorted(metrics.per_source.items() if metrics else ()):
        pairs = zip(one.accepted_per_position, one.draft_tokens_per_position, strict=True)
        rates = [f"{kept / drafted:.0%}" if drafted else "" for kept, drafted in pairs]
        table.add_row(
            Text(name, colours.style(name)),
            str(one.num_draft_tokens),
            f"{one.draft_acceptance_rate:.0%}",
            *rates[:positions],
        )
    return table


def overview(results: Sequence["Comparison"]) -> "Table":
    """All prompts in one table."""
    from rich.table import Table

    table = Table()
    table.add_column("prompt")
    for column in ("plain\ntokens/s", "speculative\ntokens/s", "speed-up", "tokens per\nforward"):
        table.add_column(column, justify="right")
    table.add_column("text")
    for result in results:
        metrics = result.speculative.metrics
        table.add_row(
            result.label or shortened(result.prompt, 32),
            _number(result.plain.rate, "{:.0f}"),
            _number(result.speculative.rate, "{:.0f}"),
            _number(result.speedup, "{:.2f}×"),
            _number(metrics.tokens_per_target_step if metrics else None, "{:.2f}"),
            "same" if result.same_text else "differs",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
