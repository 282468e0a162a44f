"""`outrider estimate`: what a drafter would bring on this machine, before it is deployed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.checks import number
from outrider.cli.bench_options import MOST_REQUESTS
from outrider.cli.console import output
from outrider.cli.train_options import TargetOptions
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.policy.expected import Expected

MOST_DRAFT_TOKENS = 64
LEAST_ROWS = 512  # of the largest forward, as an engine has them by default
MARGIN = 0.98  # of the best speed-up; drafts of a length below it are warned of


def estimate(
    target: TargetOptions,
    acceptance: Annotated[
        str,
        typer.Option(
            help="Chance that a draft token is kept: one for all depths, or one per depth with "
            "commas, as `outrider train eval` shows them."
        ),
    ],
    draft_cost: Annotated[
        float,
        typer.Option(help="Of one forward of the drafter, in plain steps of the target."),
    ] = 0.0,
    serial: Annotated[
        bool, typer.Option("--serial", help="The drafter needs one forward per draft token.")
    ] = False,
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_DRAFT_TOKENS, help="Draft tokens per step.")
    ] = 8,
    batch: Annotated[
        int, typer.Option(min=1, max=MOST_REQUESTS, help="Requests decoded at the same time.")
    ] = 1,
    context_length: Annotated[
        int, typer.Option(min=1, help="Tokens of each request in the KV cache.")
    ] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """What drafts would bring before anything is deployed: speed-up and break-even by length.

    The target's forwards are measured on this machine once; what is drafted is not decoded.
    """
    from outrider.policy.expected import expected

    chances = _chances(acceptance)
    number("--draft-cost", draft_cost, 0.0, 1000.0)
    costs = _costs(target, batch, context_length, draft_tokens)
    rows = expected(chances, draft_cost, costs, serial)
    verdict = _verdict(rows)
    if as_json:
        told = [asdict(row) | {"speedup": row.speedup} for row in rows]
        typer.echo(json.dumps({"lengths": told, "verdict": verdict}))
    else:
        _print(rows, verdict)


def _chances(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= chance <= 1 for chance in found):
        raise ConfigError(
            "--acceptance must be a chance in [0, 1], or one per depth with commas, as "
            f"0.75,0.7,0.7, got {text!r}"
        )
    return found


def _costs(target: TargetOptions, batch: int, context: int, most: int) -> list[float]:
    """Of a step with 1 to `most` draft tokens for each request, in plain steps."""
    from outrider.cli.progress import start_up
    from outrider.llm import LLM

    with start_up():
        llm = LLM(
            target.model,
            speculative_config=None,
            max_num_seqs=batch,
            max_num_batched_tokens=max(LEAST_ROWS, batch * (most + 1)),
            device=target.device,
            num_threads=target.num_threads,
        )
    longest = llm.target.max_model_len
    if context > longest:  # no step of such a text could ever be measured
        raise ConfigError(
            f"--context-length must be in [1, {longest}] for this model, got {context}"
        )
    curve = llm.engine.cost.curve(batch * context)
    return [curve[batch * (count + 1)] / curve[batch] for count in range(1, most + 1)]


def _verdict(rows: "Sequence[Expected]") -> str:
    best, asked = max(rows, key=lambda row: row.speedup), rows[-1]
    if best.speedup <= 1:
        return f"plain decoding is faster: drafts of {best.num_draft_tokens} reach {_x(best)}"
    told = f"best with {_tokens(best)}: {_x(best)}"
    if asked.speedup < MARGIN * best.speedup:
        told += f"; {_tokens(asked)} are too many: {_x(asked)}"
    return told


def _tokens(row: "Expected") -> str:
    count = row.num_draft_tokens
    return f"{count} draft token{'' if count == 1 else 's'}"


def _x(row: "Expected") -> str:
    return f"{row.speedup:.2f}×"


def _print(rows: "Sequence[Expected]", verdict: str) -> None:
    from rich.table import Table

    heads = ("draft tokens", "tokens per step", "cost in plain steps", "speed-up", "breaks even at")
    table = Table(*heads, box=None, header_style="dim")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        even = "never" if row.break_even is None else f"{row.break_even:.0%} kept"
        numbers = (f"{row.tokens_per_step:.2f}", f"{row.step_cost:.2f}", _x(row), even)
        table.add_row(str(row.num_draft_tokens), *numbers)
    console = output()
    console.print(table)
    console.print(verdict, soft_wrap=True)
