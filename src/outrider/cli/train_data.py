"""`outrider train data`: the target answers prompts, and writes some of its own."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.interrupts import going_on
from outrider.cli.options import MODEL_PANEL, ModelOptions
from outrider.cli.train_options import about, bar, check_layers, layer_numbers
from outrider.errors import ConfigError
from outrider.threads import set_num_threads

if TYPE_CHECKING:
    from outrider.training.beginnings import Beginning
    from outrider.training.generate import Recording

TEMPERATURES = "0:60,0.7:15,1:25"
PROMPT_ROOM = 512  # tokens of KV for the prompt of each request under way; most are shorter
LEAST_ROOM = 8192  # … and for all of them, so that a long one fits alone
BATCH = 64  # requests at the same time: on a CPU more bring nothing, fewer lose


@dataclass(slots=True)
class AnswerOptions(ModelOptions):
    """What answers, and how many prompts at a time."""

    max_num_seqs: Annotated[
        int,
        typer.Option(
            "--batch",
            "--max-num-seqs",
            min=1,
            help="Requests at the same time.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = BATCH


def data(
    model: AnswerOptions,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory to write; one that is there goes on.")
    ],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSONL whose lines have 'prompt', 'turns' or 'messages', and perhaps 'category'; "
            "may be repeated."
        ),
    ] = None,
    self_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts that the model writes itself; some come to nothing.")
    ] = 0,
    beginnings: Annotated[
        Path | None,
        typer.Option(help="JSONL of how such prompts begin; default: of chat and code."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 512,
    temperature: Annotated[
        str,
        typer.Option(
            metavar="T | T:SHARE,…", help="Of the answers: one, or several with their shares."
        ),
    ] = TEMPERATURES,
    top_p: Annotated[float, typer.Option(help="Of answers with a temperature.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same texts.")] = 0,
    features: Annotated[
        Path | None,
        typer.Option(help="Also keep what the model computes: the directory for its features."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="With --features: layers whose outputs are kept, as 1,8,14,20,27."),
    ] = None,
    shard_size: Annotated[
        int, typer.Option(min=1, help="Prompts of one file: what a kill can lose.")
    ] = 512,
) -> None:
    """Have the model answer prompts; a run that was stopped goes on with the same texts."""
    from outrider.bench.workload import read_workload
    from outrider.cli.console import messages
    from outrider.cli.options import parse_speculative_config
    from outrider.training.generate import Plan, generate
    from outrider.training.hold import held

    if not prompts and not self_prompts:
        raise ConfigError("nothing to answer: give --prompts, --self-prompts or both")
    if features is not None and features.resolve() == output.resolve():
        raise ConfigError(f"--features must be another directory than that of the data, {output}")
    parse_speculative_config(model.speculative_config)
    plan = Plan(
        prompts=tuple(read_workload(prompts).prompts) if prompts else (),
        beginnings=tuple(_beginnings(beginnings)),
        self_prompts=self_prompts,
        temperatures=temperature_shares(temperature),
        top_p=top_p,
        max_tokens=max_tokens,
        shard_size=shard_size,
        seed=seed,
    )
    needed = model.max_num_seqs * (max_tokens + PROMPT_ROOM)
    room = model.kv_cache_tokens or max(LEAST_ROOM, needed)
    made = about(set_num_threads(model.num_threads, "--num-threads"), seed=seed)
    recording = _recording(model, features, layers, made)
    also = [recording.recorder] if recording else []
    llm = replace(model, kv_cache_tokens=room).load(also=also)
    console = messages()
    with ExitStack() as stack:
        stack.enter_context(going_on())
        for directory in (output, *([features] if features else [])):
            stack.enter_context(held(directory))
        advance = stack.enter_context(bar("prompts", plan.num_prompts))
        for done in generate(llm, plan, output, made, recording):
            advance(done.num_prompts)
            console.print(
                f"shard {done.index + 1} of {plan.num_shards}: {done.num_texts} texts, "
                f"{done.num_tokens:,} tokens, {done.tokens_per_second:,.0f} tokens/s"
                + (f"; {done.num_too_long} prompts too long" if done.num_too_long else ""),
                soft_wrap=True,
            )
    _conclude(output)


def _recording(
    model: ModelOptions, directory: Path | None, layers: str | None, provenance: dict[str, Any]
) -> "Recording | None":
    """Features kept on the way, which costs less than `outrider train features` afterwards."""
    from outrider.target.load import load_model
    from outrider.training.features import about_features
    from outrider.training.generate import Recording
    from outrider.training.recorder import Recorder

    if directory is None and layers is None:
        return None
    if directory is None or layers is None:
        raise ConfigError("--features and --layers go together, got one of them")
    numbers = layer_numbers(layers)
    loaded = load_model(model.model, model.dtype, model.device, model.found_tokenizer())
    check_layers(numbers, loaded)
    header = about_features(loaded, numbers) | {"provenance": provenance}
    return Recording(directory, Recorder(loaded, numbers), header)


def _conclude(directory: Path) -> None:
    from outrider.cli.console import messages
    from outrider.training.dataset import Data

    header = Data(directory).header
    kinds = ", ".join(f"{name} {count:,}" for name, count in header["texts_by_category"].items())
    messages().print(
        f"{directory}: {header['num_texts']:,} texts ({kinds}), {header['num_tokens']:,} tokens",
        soft_wrap=True,
    )


def _beginnings(path: Path | None) -> "list[Beginning]":
    from outrider.bench.workload import read_workload
    from outrider.training.beginnings import default_beginnings

    if path is None:
        return default_beginnings()
    return [(prompt.category, prompt.text, 1.0) for prompt in read_workload([path]).prompts]


def temperature_shares(text: str) -> tuple[tuple[float, float], ...]:
    """Temperatures with their shares: ``0.7``, or ``0:60,0.7:15,1:25``."""
    found = []
    for part in text.split(","):
        value, colon, share = part.partition(":")
        try:
            found.append((float(value), float(share) if colon else 1.0))
        except ValueError:
            found.append((-1.0, 0.0))
    if any(not 0 <= value <= 2 or not 0 < share < 1e9 for value, share in found):
        raise ConfigError(
            f"--temperature must be a number from 0 to 2, or several with shares as "
            f"{TEMPERATURES}, got {text!r}"
        )
    return tuple(found)
