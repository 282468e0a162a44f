"""`outrider policy`: check a JSON policy, and see what it would do."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

PolicyPath = Annotated[Path, typer.Argument(metavar="FILE", help="A JSON policy.")]
Sources = Annotated[
    str | None,
    typer.Option(help="Names of the sources there are, with commas: others are refused."),
]


def policy(context: typer.Context) -> None:
    """Rules about who may draft when, and how much: docs/policy.md.

    They decide how fast a text comes, never what it says.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def check(file: PolicyPath, sources: Sources = None) -> None:
    """Say whether a policy can be used, and if not, where the fault is."""
    from outrider.policy.rule_document import compile_policy, load_policy

    rules = compile_policy(load_policy(file), _names(sources)).rules
    typer.echo(f"{file}: {len(rules)} rule{'' if len(rules) == 1 else 's'}, no fault")


def explain(
    file: PolicyPath,
    facts: Annotated[
        str,
        typer.Option(
            help="JSON object of facts, e.g. "
            '\'{"context_len": 5000, "batch_size": 4, "health": {"lookup": 0.5}}\'.'
        ),
    ] = "{}",
    sources: Sources = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Dry run: which rules apply to given facts, why the others do not, and what is left."""
    from outrider.policy.rule_document import compile_policy, load_policy, read_facts, read_json
    from outrider.policy.rules import shown_explanation

    rules = compile_policy(load_policy(file), _names(sources))
    request, load = read_facts(read_json(facts, "--facts"), "--facts")
    found = shown_explanation(rules.explain(request, load))
    typer.echo(json.dumps(found) if as_json else _lines(found))


def schema() -> None:
    """Print the JSON Schema of a policy."""
    from outrider.policy.rule_schema import policy_schema

    typer.echo(json.dumps(policy_schema(), indent=2))


def _names(sources: str | None) -> list[str] | None:
    return None if sources is None else [name.strip() for name in sources.split(",")]


def _lines(found: dict[str, Any]) -> str:
    lines = [
        f"{'applies' if rule['applies'] else 'does not'}  {rule['name']}"
        + (f" ({rule['why_not']})" if "why_not" in rule else "")
        for rule in found["rules"]
    ]
    allowed = found["allowed"]
    sources, forbidden, most = (allowed[k] for k in ("sources", "forbid", "num_draft_tokens"))
    who = "any source" if sources is None else ", ".join(sources) or "no source: plain decoding"
    if forbidden and sources != []:
        who += f" but {', '.join(forbidden)}"
    count = "as many tokens as pay" if most is None else f"at most {most} tokens"
    return "\n".join([*lines, f"may draft: {who}; {count}"])
