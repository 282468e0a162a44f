"""`outrider demo`: a handful of real prompts, plain next to speculative."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import ModelOptions
from outrider.errors import PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.comparison import Comparison
    from outrider.cli.console import Colours
    from outrider.cli.prompts import PromptRecord
    from outrider.llm import LLM

DEMO_MAX_TOKENS = 200
BAR_WIDTH = 40  # characters of the faster bar


def demo(
    model: ModelOptions,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = DEMO_MAX_TOKENS,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are shown.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Only prompts of this kind; may be repeated.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Save what is shown as a picture.")] = None,
) -> None:
    """Five prompts of different kinds: the answers, who drafted each token, and the speed-up."""
    from outrider.cli.answers import Dialogue
    from outrider.cli.comparison import compare_prompt, twin
    from outrider.cli.console import Colours, messages, output
    from outrider.cli.demo_prompts import DEMO_PROMPTS
    from outrider.sampling_params import SamplingParams

    records = _chosen(DEMO_PROMPTS, only)
    console, colours = output(record=svg is not None), Colours()
    started = perf_counter()
    llm = model.load()
    plain = twin(llm)
    _introduce(console, llm, perf_counter() - started)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    raw = llm.tokenizer.chat_template is None
    results = []
    for number, record in enumerate(records, 1):
        console.print()
        console.rule(f"{number}  {record.label}", align="left", style="dim")
        console.print(_question(record.text, console.width - 1), style="dim")
        prompt = Dialogue(record, raw).ask(0)
        with messages().status("decoding plainly and speculatively, in turns …"):
            result = compare_prompt(plain, llm, prompt, params, rounds, record.label)
        _show(console, result, colours)
        results.append(result)
    _conclude(console, results, colours)
    if svg is not None:
        console.save_svg(str(svg), title="outrider demo")


def _chosen(records: Sequence["PromptRecord"], only: list[str] | None) -> list["PromptRecord"]:
    kinds = [record.label for record in records]
    for kind in only or ():
        if kind not in kinds:
            raise PromptError(f"--only must be one of {', '.join(kinds)}, got {kind!r}")
    return [record for record in records if not only or record.label in only]


def _introduce(console: "Console", llm: "LLM", seconds: float) -> None:
    import platform

    console.print(
        f"outrider · {llm.target.name} · {str(llm.target.dtype).removeprefix('torch.')}"
        f" · {platform.machine()}, ready in {seconds:.1f} s",
        style="bold",
    )
    console.print(
        "Each prompt is answered twice by the same model: plainly, one token per forward, and "
        "speculatively, where several drafted tokens are checked in one forward. Only tokens the "
        "model itself would have written are kept, so the text must be the same."
    )


def _question(text: str, width: int, head: int = 3) -> str:
    """The first lines of a prompt, and how much follows."""
    lines = [line[:width] + ("…" if len(line) > width else "") for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    rest = len(lines) - head
    return "\n".join(lines[:head]) + (f"\n… {rest} more lines" if rest > 0 else "")


def _show(console: "Console", result: "Comparison", colours: "Colours") -> None:
    console.print(colours.paint(result.spans))
    console.print()
    console.print(colours.legend(result.speculative.token_sources))
    if result.plain.rate is None or result.speculative.rate is None:
        console.print("The answer is too short to time.")
        return
    fastest = max(result.plain.rate, result.speculative.rate)
    for name, rate, style in (
        ("plain      ", result.plain.rate, "dim"),
        ("speculative", result.speculative.rate, "bold"),
    ):
        bar = "━" * max(1, round(BAR_WIDTH * rate / fastest))
        console.print(f"{name} {bar} {rate:.0f} tokens/s", style=style)
    same = "✓ same text" if result.same_text else "✗ the texts differ"
    console.print(f"{_speed_in_words(result.speculative.rate / result.plain.rate)} · {same}")


def _speed_in_words(speedup: float) -> str:
    """Within 5 % the two are as fast as each other: a shared machine cannot tell them apart."""
    if abs(speedup - 1.0) < 0.05:
        return "as fast as plain"
    return f"{speedup:.1f}× faster" if speedup > 1.0 else f"{speedup:.2f}× of plain, slower"


def _conclude(console: "Console", results: Sequence["Comparison"], colours: "Colours") -> None:
    from outrider.cli.compare import overview

    console.print()
    console.print(overview(results))
    sources = [source for result in results for source in result.speculative.token_sources]
    console.print(colours.legend(sources))
    console.print(
        "\nGo on:  outrider chat\n"
        '        outrider generate "Write a haiku about the sea"\n'
        "        outrider compare --help",
        style="dim",
    )
