"""The same prompts through every engine, call by call in turns."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SPARE_TOKENS = 64  # of context behind the last answer; llama.cpp drafts beyond its end

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
    longest = max(map(len, [*prompts, *warm_up])) + settings.max_tokens + SPARE_TOKENS
    race = _Race(settings, result)
    try:
        for side, path in list(_sides(chosen, model, result.notes, show)):
            show(f"starting {side.name}")
            race.start(side, path, longest)
        show("warming up")
        race.warm_up(warm_up)
        race.run(prompts, done)
    finally:
        race.close()
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


def _models_for(peer: Peer, model: str | None) -> Mapping[str, str | None]:
    """The model as the peer reads it, by number format."""
    if peer.model == "any":
        return {BF16: model}
    if peer.model == "gguf":
        original, bf16 = gguf_of(model), model_gguf(model)
        if original is None or bf16 is None:
            return {}
        kind = gguf_type(original)
        return {BF16: str(bf16)} | ({} if kind == "BF16" else {kind: str(original)})
    directory = model_directory(model)
    path = converted_for(peer, directory) if peer.convert else directory
    return {BF16: str(path)}


class _Race:
    """The sides that still run."""

    def __init__(self, settings: PeerSettings, result: Comparison) -> None:
        self._settings, self._result = settings, result
        self._runners: dict[int, Runner] = {}  # by place in result.decoded
        self._logs = tempfile.TemporaryDirectory()

    def start(self, side: Side, model: str | None, max_model_len: int) -> None:
        """Start one side and let it load; when that fails it is noted."""
        settings, place = self._settings, len(self._result.decoded)
        job = {
            "model": model,
            "threads": settings.num_threads,
            "options": side.options,
            "max_model_len": max_model_len,
            "max_batch": max(settings.batches),
        }
        log = Path(self._logs.name) / f"{place}.log"
        try:
            runner = Runner(side, job, settings.num_threads, log)
        except PeerFailed as error:
            self._result.notes.append(str(error))
            return
        about = runner.about
        self._result.decoded.append(Decoded(side, about["versions"], about["load_seconds"]))
        self._runners[place] = runner

    def warm_up(self, prompts: Sequence[list[int]]) -> None:
        """Let everybody decode, at every batch size it takes, prompts that are not measured."""
        for batch in self._settings.batches:
            several = [prompts[i % len(prompts)] for i in range(batch)]
            for place in self._able(batch):
                for _ in range(WARM_UP_CALLS):
                    self._ask(place, several, WARM_UP_TOKENS, True)

    def run(self, prompts: Sequence[list[int]], done: Callable[[int, int], None]) -> None:
        """All rounds; within a round the sides take turns call by call."""
        settings = self._settings
        calls = {batch: batches_of(len(prompts), batch) for batch in settings.batches}
        per_round = sum(len(calls[batch]) * len(self._able(batch)) for batch in settings.batches)
        finished = 0
        for number in range(settings.rounds):
            for batch in settings.batches:
                able = self._able(batch)
                for place in able:
                    self._result.decoded[place].rounds.setdefault(batch, []).append([])
                for turn, indices in enumerate(calls[batch]):
                    for index in turns(len(able), number + turn):
                        self._call(able[index], batch, indices, prompts)
                        finished += 1
                        done(finished, settings.rounds * per_round)

    def close(self) -> None:
        """End all processes."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._logs.cleanup()

    def _able(self, batch: int) -> list[int]:
        """Places of the sides that still run and take calls of this size."""
        return [
            place
            for place, runner in self._runners.items()
            if batch <= (runner.side.largest_batch or batch)
        ]

    def _call(
        self, place: int, batch: int, indices: list[int], prompts: Sequence[list[int]]
    ) -> None:
        settings = self._settings
        asked = [prompts[i] for i in indices]
        answer = self._ask(place, asked, settings.max_tokens, settings.ignore_eos)
        if answer is not None:
            self._result.decoded[place].rounds[batch][-1].append(Call(indices, *answer))

    def _ask(
        self, place: int, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> tuple[float, list[list[int]]] | None:
        """Seconds and tokens; a side that fails is noted, ended and takes no further part."""
        runner = self._runners.get(place)
        if runner is None:  # it failed before
            return None
        try:
            return runner.decode(prompts, max_tokens, ignore_eos)
        except PeerFailed as error:
            self._result.notes.append(str(error))
            self._result.decoded[place].rounds.clear()  # rounds with holes are no figures
            del self._runners[place]
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
