"""The same prompts through every engine, call by call in turns."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.peers.install import missing_libraries, python_of
from outrider.bench.peers.models import (
    converted_for,
    gguf_of,
    gguf_type,
    model_directory,
    model_gguf,
)
from outrider.bench.peers.process import PeerFailed, Runner
from outrider.bench.peers.spec import Peer, Side
from outrider.bench.timing import turns
from outrider.bench.workload import WARM_UP, BenchPrompt, Workload, read_workload, token_ids_of
from outrider.errors import OutriderError, PromptError

BF16 = "bfloat16"
WARM_UP_CALLS = 2  # of each batch size; compilers and thread pools settle in them
WARM_UP_TOKENS = 16

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How to measure."""

    batches: tuple[int, ...] = (1, 8)
    rounds: int = 3
    max_tokens: int = 128
    ignore_eos: bool = True  # everybody then decodes the same number of tokens
    num_threads: int = 2


@dataclass(slots=True)
class Call:
    """One call of one side: the prompts decoded in it, its seconds, and the new tokens."""

    indices: list[int]
    seconds: float
    token_ids: list[list[int]]


@dataclass(slots=True)
class Decoded:
    """All calls of one side; `rounds[batch][round]`."""

    side: Side
    versions: dict[str, str] = field(default_factory=dict)
    load_seconds: float = 0.0
    rounds: dict[int, list[list[Call]]] = field(default_factory=dict)


@dataclass(slots=True)
class Comparison:
    """What came of a run."""

    settings: PeerSettings
    model: str
    prompts: list[BenchPrompt]
    workload: dict[str, Any]
    decoded: list[Decoded] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # who was left out, and why
    provenance: dict[str, Any] = field(default_factory=dict)


def compare_peers(
    chosen: Sequence[Peer],
    model: str | None,
    workload: Workload,
    settings: PeerSettings,
    show: Show = lambda _: None,
    done: Callable[[int, int], None] = lambda _finished, _total: None,
) -> Comparison:
    """Measure outrider and its peers on the same token ids.

    A peer that is not installed, does not start or fails later is left out with a sentence; the
    others go on.

    Args:
        show: told what is being started.
        done: told how many calls are finished, and how many there will be.
    """
    from outrider.target.load import load_model

    loaded = load_model(model)
    assert loaded.tokenizer is not None, "a model directory without a tokenizer"
    speaker: Any = _Speaker(loaded.tokenizer)
    workload.prompts = mixed(workload.prompts)
    prompts = [token_ids_of(speaker, prompt) for prompt in workload.prompts]
    warm_up = [token_ids_of(speaker, prompt) for prompt in read_workload([WARM_UP]).prompts]
    result = Comparison(settings, loaded.name, workload.prompts, workload.as_json())
    longest = max(map(len, [*prompts, *warm_up])) + settings.max_tokens
    with tempfile.TemporaryDirectory() as logs:
        sides = list(_sides(chosen, model, result.notes, show))
        with _started(sides, longest, settings, Path(logs), result, show) as runners:
            _warm_up(runners, warm_up, settings, result)
            _take_turns(runners, prompts, settings, result, done)
    result.decoded = [one for one in result.decoded if any(one.rounds.values())]
    if not result.decoded:
        raise PromptError("nothing was measured: " + "; ".join(result.notes))
    return result


def mixed(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The prompts with their kinds in turns, so that every batch holds all of them."""
    seen: dict[str, int] = {}
    ranked: list[tuple[int, BenchPrompt]] = []
    for prompt in prompts:
        seen[prompt.category] = rank = seen.get(prompt.category, 0) + 1
        ranked.append((rank, prompt))
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]


def batches_of(count: int, batch: int) -> list[list[int]]:
    """Prompts of each call: only full batches, where there are enough for one."""
    if count < batch:
        return [list(range(count))]
    return [list(range(start, start + batch)) for start in range(0, count - batch + 1, batch)]


@dataclass(frozen=True, slots=True)
class _Speaker:
    """All that `token_ids_of` asks of an LLM."""

    tokenizer: Any


def _sides(
    chosen: Sequence[Peer], model: str | None, notes: list[str], show: Show
) -> Iterator[tuple[Side, str | None]]:
    """Sides with the model each one reads; who cannot take part is noted."""
    for peer in chosen:
        if python_of(peer) is None:
            notes.append(
                f"{peer.title} is not installed: `outrider bench peers --install {peer.name}`"
            )
            continue
        for name in missing_libraries(peer):
            notes.append(f"{peer.title} runs without {name}, which is not on this machine")
        try:
            show(f"{peer.title}: model")
            models = _models_for(peer, model)
        except OutriderError as error:
            notes.append(str(error))
            continue
        if not models:
            notes.append(f"{peer.title} reads GGUF files, and this model does not come from one")
        for dtype, path in models.items():
            for variant in peer.variants:
                yield Side(peer, variant, dtype), path


def _models_for(peer: Peer, model: str | None) -> dict[str, str | None]:
    """The model as the peer reads it, by number format."""
    if peer.model == "any":
        return {BF16: model}
    if peer.model == "gguf":
        original, bf16 = gguf_of(model), model_gguf(model)
        if original is None or bf16 is None:
            return {}
        return {BF16: str(bf16), gguf_type(original): str(original)}
    directory = model_directory(model)
    return {BF16: str(converted_for(peer, directory) if peer.convert else directory)}


@contextmanager
def _started(
    sides: Sequence[tuple[Side, str | None]],
    max_model_len: int,
    settings: PeerSettings,
    logs: Path,
    result: Comparison,
    show: Show,
) -> Iterator[list[tuple[Runner, Decoded]]]:
    """All runners that start, one after the other; they are ended in the end."""
    runners: list[tuple[Runner, Decoded]] = []
    try:
        for number, (side, path) in enumerate(sides):
            show(f"starting {side.name}")
            job = {
                "model": path,
                "threads": settings.num_threads,
                "options": side.options,
                "max_model_len": max_model_len,
                "max_batch": max(settings.batches),
            }
            try:
                runner = Runner(side, job, settings.num_threads, logs / f"{number}.log")
            except PeerFailed as error:
                result.notes.append(str(error))
                continue
            decoded = Decoded(side, runner.about["versions"], runner.about["load_seconds"])
            result.decoded.append(decoded)
            runners.append((runner, decoded))
        yield runners
    finally:
        for runner, _ in runners:
            runner.close()


def _warm_up(
    runners: list[tuple[Runner, Decoded]],
    prompts: Sequence[list[int]],
    settings: PeerSettings,
    result: Comparison,
) -> None:
    for runner, decoded in list(runners):
        for batch in settings.batches:
            if batch <= (decoded.side.largest_batch or batch):
                several = [prompts[i % len(prompts)] for i in range(batch)]
                for _ in range(WARM_UP_CALLS):
                    _ask(runner, several, WARM_UP_TOKENS, True, runners, decoded, result)


def _take_turns(
    runners: list[tuple[Runner, Decoded]],
    prompts: Sequence[list[int]],
    settings: PeerSettings,
    result: Comparison,
    done: Callable[[int, int], None],
) -> None:
    calls = {batch: batches_of(len(prompts), batch) for batch in settings.batches}
    total = settings.rounds * sum(
        len(calls[batch])
        for _, decoded in runners
        for batch in settings.batches
        if batch <= (decoded.side.largest_batch or batch)
    )
    finished = 0
    for number in range(settings.rounds):
        for batch in settings.batches:
            able = [pair for pair in runners if batch <= (pair[1].side.largest_batch or batch)]
            for _, decoded in able:
                decoded.rounds.setdefault(batch, []).append([])
            for place, indices in enumerate(calls[batch]):
                for index in turns(len(able), number + place):
                    runner, decoded = able[index]
                    if (runner, decoded) not in runners:  # it failed meanwhile
                        continue
                    asked = [prompts[i] for i in indices]
                    limits = settings.max_tokens, settings.ignore_eos
                    answer = _ask(runner, asked, *limits, runners, decoded, result)
                    if answer is not None:
                        decoded.rounds[batch][-1].append(Call(indices, *answer))
                    finished += 1
                    done(finished, total)


def _ask(
    runner: Runner,
    prompts: list[list[int]],
    max_tokens: int,
    ignore_eos: bool,
    runners: list[tuple[Runner, Decoded]],
    decoded: Decoded,
    result: Comparison,
) -> tuple[float, list[list[int]]] | None:
    """Seconds and tokens; a runner that fails is noted, ended and takes no further part."""
    if (runner, decoded) not in runners:
        return None
    try:
        return runner.decode(prompts, max_tokens, ignore_eos)
    except PeerFailed as error:
        result.notes.append(str(error))
        decoded.rounds.clear()  # rounds with holes are no figures
        runners.remove((runner, decoded))
        runner.close()
        return None


def as_json(result: Comparison) -> dict[str, Any]:
    """Every call of every side."""
    return {
        "format": 1,
        "provenance": result.provenance,
        "model": result.model,
        "settings": asdict(result.settings),
        "workload": result.workload,
        "categories": [prompt.category for prompt in result.prompts],
        "notes": result.notes,
        "sides": [
            {
                "name": one.side.name,
                "peer": one.side.peer.name,
                "variant": one.side.variant,
                "dtype": one.side.dtype,
                "options": one.side.options,
                "versions": one.versions,
                "load_seconds": one.load_seconds,
                "rounds": {
                    str(batch): [[asdict(call) for call in calls] for calls in rounds]
                    for batch, rounds in one.rounds.items()
                },
            }
            for one in result.decoded
        ],
    }
