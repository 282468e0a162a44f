"""`outrider generate`: answers to prompts, streamed in colour or written as JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import ModelOptions, SamplingOptions
from outrider.cli.prompts import PromptRecord, gather

if TYPE_CHECKING:
    from outrider.cli.console import Colours
    from outrider.llm import LLM
    from outrider.results import RequestOutput
    from outrider.sampling_params import SamplingParams


def generate(
    model: ModelOptions,
    sampling: SamplingOptions,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; '-' reads one from standard input.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="JSONL; each line has 'prompt', 'turns' or 'messages'."),
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers per prompt.")] = 1,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the text as it is, without the chat template.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object per answer on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the text.")] = False,
) -> None:
    """Answer prompts; the text goes to standard output, the numbers to standard error."""
    records = gather(prompts or [], file)
    params = sampling.params(n, shows_logprobs=json_output)
    llm = model.load(quiet)
    raw = raw or llm.tokenizer.chat_template is None
    if json_output:
        _write_json(llm, records, params, raw)
    elif len(records) == 1 and len(records[0].turns) == 1 and n == 1:
        _stream_one(llm, records[0], params, raw, quiet)
    else:
        _write_all(llm, records, params, raw, quiet)


def _stream_one(
    llm: "LLM", record: PromptRecord, params: "SamplingParams", raw: bool, quiet: bool
) -> None:
    from outrider.cli.answers import Dialogue
    from outrider.cli.console import Colours
    from outrider.cli.stream import print_summary, stream_answer

    colours = Colours()
    answer = stream_answer(llm, Dialogue(record, raw).ask(0), params, colours)
    if not quiet:
        print_summary(answer, colours)


def _write_json(
    llm: "LLM", records: Sequence[PromptRecord], params: "SamplingParams", raw: bool
) -> None:
    from outrider.cli.answers import answer_all, as_json

    for index, answers in enumerate(answer_all(llm, records, params, raw)):
        for turn, output in enumerate(answers):
            line = {"index": index, "turn": turn} | as_json(output)
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")


def _write_all(
    llm: "LLM", records: Sequence[PromptRecord], params: "SamplingParams", raw: bool, quiet: bool
) -> None:
    from time import perf_counter

    from outrider.cli.answers import answer_all
    from outrider.cli.console import Colours, messages

    colours = Colours()
    started = perf_counter()
    answers = answer_all(llm, records, params, raw)
    seconds = perf_counter() - started
    for record, turns in zip(records, answers, strict=True):
        for turn, output in enumerate(turns):
            if not quiet:
                messages().print(f"\n▸ {record.turns[turn].strip()[:100]}", style="bold")
            _write_choices(llm, output, colours, quiet)
    num_tokens = sum(len(c.token_ids) for turns in answers for o in turns for c in o.outputs)
    if not quiet:
        messages().print(
            f"\n{num_tokens} tokens in {seconds:.2f} s · {num_tokens / seconds:.0f} tokens/s "
            f"over {len(records)} prompts",
            style="dim",
        )


def _write_choices(llm: "LLM", output: "RequestOutput", colours: "Colours", quiet: bool) -> None:
    from outrider.cli.console import messages
    from outrider.cli.stream import new_writer

    num_choices = len(output.outputs)
    for choice in output.outputs:
        if num_choices > 1 and not quiet:
            sys.stdout.flush()  # headings go to stderr, in order with the answers
            messages().print(f"\n[{choice.index + 1}/{num_choices}]", style="dim")
        writer = new_writer(llm, colours)
        writer.write(choice.text, choice.token_ids, choice.token_sources)
        sys.stdout.write("\n")
