"""The same prompts through every engine, call by call in turns."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
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
from outrider.bench.workload import (
    WARM_UP,
    BenchPrompt,
    Workload,
    encoded,
    read_workload,
    token_ids_of,
)
from outrider.errors import ModelError, OutriderError, PromptError

BF16 = "bfloat16"
WARM_UP_CALLS = 2  # of each batch size; compilers and thread pools settle in them
WARM_UP_TOKENS = 16
SPARE_TOKENS = 64  # of context behind the last answer; llama.cpp drafts beyond its end

Show = Callable[[str], None]
# What goes wrong while a model is written in another format: disks, memory, formats without a
# counterpart, packages that are not there.
UNWRITTEN = (OutriderError, OSError, ValueError, RuntimeError, LookupError, ImportError)


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
    finished_rounds: int = 0
    interrupted: BaseException | None = None  # what ended the run after some whole rounds

    @property
    def label(self) -> str:
        """What to say before all numbers: "" for a run that came to its end."""
        if self.interrupted is None:
            return ""
        return f"incomplete: {self.finished_rounds} of {self.settings.rounds} rounds"

    def without_figures(self, chosen: Sequence[Peer]) -> list[Peer]:
        """Those of the chosen peers that gave nothing."""
        measured = {one.side.peer.name for one in self.decoded}
        return [peer for peer in chosen if peer.name not in measured]


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
    others go on. When outrider fails, the run ends: there is nothing to compare with. An interrupt
    after the first round ends it with the whole rounds (`Comparison.interrupted`).

    Args:
        show: told what is being started, and every finished round.
        done: told how many calls are finished, and how many there will be.

    Raises:
        PromptError: no prompt fits in the model's context.
        PeerFailed: outrider itself could not be measured.
    """
    from outrider.target.load import load_model

    show("reading the model")
    loaded = load_model(model)
    speaker = _Speaker.of(loaded)
    workload.prompts = mixed(workload.prompts)
    prompts = _fitting(speaker, workload, settings.max_tokens)
    warm_up = _warm_up(speaker, settings.max_tokens)
    result = Comparison(settings, loaded.name, workload.prompts, {})
    result.settings = replace(
        settings, batches=_filled(settings.batches, len(prompts), workload.notes)
    )
    result.workload = workload.as_json()
    longest = max(map(len, [*prompts, *warm_up])) + settings.max_tokens + SPARE_TOKENS
    race = _Race(result, show)
    try:
        for side, path in _sides(chosen, model, result.notes, show):
            race.start(side, path, min(longest, speaker.engine.max_model_len))
        show("warming up")
        race.warm_up(warm_up, min(WARM_UP_TOKENS, settings.max_tokens))
        race.run(prompts, done)
    except (KeyboardInterrupt, SystemExit) as end:
        if not result.finished_rounds:
            raise
        result.interrupted = end
    finally:
        race.close()
    _keep_whole_rounds(result)
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
    """Prompts of each call, all of the same size: the last one is filled up from the start."""
    assert batch <= count, "a prompt would be twice in one call"
    return [[i % count for i in range(start, start + batch)] for start in range(0, count, batch)]


def _filled(batches: Sequence[int], count: int, notes: list[str]) -> tuple[int, ...]:
    """The batch sizes that so many prompts can fill; what differs from those asked for is noted.

    The same prompt twice in one call would draft for itself, so a batch has at most all prompts.
    """
    for batch in dict.fromkeys(batches):
        if batch > count:
            notes.append(f"batch {batch} became batch {count}: there are no more prompts")
        elif spare := -count % batch:
            names = "prompt counts" if spare == 1 else f"{spare} prompts count"
            notes.append(f"batch {batch}: the first {names} twice, to fill up the last batch")
    return tuple(dict.fromkeys(min(batch, count) for batch in batches))


@dataclass(frozen=True, slots=True)
class _Engine:
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Speaker:
    """All that is asked of an LLM where prompts become token ids."""

    tokenizer: Any
    engine: _Engine

    @classmethod
    def of(cls, loaded: Any) -> Any:
        from outrider.target.model import check_model_len

        if loaded.tokenizer is None:
            raise ModelError(f"{loaded.name} has no tokenizer: expected a model with one")
        return cls(loaded.tokenizer, _Engine(check_model_len(None, loaded.config_object())))


def _fitting(speaker: Any, workload: Workload, max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts that leave room for an answer; the workload keeps only those."""
    context, room = speaker.engine.max_model_len, max_tokens + SPARE_TOKENS
    if room >= context:
        raise PromptError(
            f"--max-tokens must be at most {context - SPARE_TOKENS - 1} where the context has "
            f"{context} tokens ({SPARE_TOKENS} are kept for drafts), got {max_tokens}"
        )
    kept = encoded(speaker, workload, room)
    workload.prompts = [workload.prompts[index] for index, _ in kept]
    return [ids for _, ids in kept]


def _warm_up(speaker: Any, max_tokens: int) -> list[list[int]]:
    """Token ids of prompts that are not measured, cut to the context of a small model."""
    room = speaker.engine.max_model_len - max_tokens - SPARE_TOKENS
    return [token_ids_of(speaker, prompt)[-room:] for prompt in read_workload([WARM_UP]).prompts]


def _keep_whole_rounds(result: Comparison) -> None:
    """Drop the round that an interrupt cut, and who has nothing to show."""
    for one in result.decoded:
        kept = {batch: rounds[: result.finished_rounds] for batch, rounds in one.rounds.items()}
        one.rounds = {batch: rounds for batch, rounds in kept.items() if rounds}
    result.decoded = [one for one in result.decoded if one.rounds]


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
            if peer.model != "any":
                show(f"preparing the model for {peer.title} …")
            models = _models_for(peer, model)
        except UNWRITTEN as error:
            reason = str(error) if isinstance(error, OutriderError) else repr(error)
            notes.append(f"{peer.title} is left out, its model could not be made: {reason}")
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

    def __init__(self, result: Comparison, show: Show) -> None:
        self._settings, self._result, self._show = result.settings, result, show
        self._runners: dict[int, Runner] = {}  # by place in result.decoded
        self._logs = tempfile.TemporaryDirectory()

    def start(self, side: Side, model: str | None, max_model_len: int) -> None:
        """Start one side and let it load; when that fails it is noted."""
        settings, place = self._settings, len(self._result.decoded)
        if min(settings.batches) > (side.largest_batch or min(settings.batches)):
            self._result.notes.append(
                f"{side.name} takes at most batch {side.largest_batch}, which was not asked for"
            )
            return
        job = {
            "model": model,
            "threads": settings.num_threads,
            "options": side.options,
            "max_model_len": max_model_len,
            "max_batch": max(settings.batches),
        }
        self._show(f"loading {side.name}{side.peer.loading and f' ({side.peer.loading})'} …")
        log = Path(self._logs.name) / f"{place}.log"
        try:
            runner = Runner(side, job, settings.num_threads, log)
        except PeerFailed as error:
            self._leave_out(side, error)
            return
        about = runner.about
        self._result.decoded.append(Decoded(side, about["versions"], about["load_seconds"]))
        self._runners[place] = runner

    def warm_up(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Let everybody decode, at every batch size it takes, prompts that are not measured."""
        for batch in self._settings.batches:
            several = [prompts[i % len(prompts)] for i in range(batch)]
            for place in self._able(batch):
                for _ in range(WARM_UP_CALLS):
                    self._ask(place, several, max_tokens, True)

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
            self._result.finished_rounds = number + 1
            self._show(f"round {number + 1} of {settings.rounds} is finished")

    def close(self) -> None:
        """End all processes, each even where an interrupt cuts the end of another short."""
        with ExitStack() as stack:
            stack.callback(self._logs.cleanup)
            for runner in self._runners.values():
                stack.callback(runner.close)
            for runner in self._runners.values():
                runner.ask_to_end()  # all at once: some take seconds
        self._runners.clear()

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
            self._result.decoded[place].rounds.clear()  # rounds with holes are no figures
            del self._runners[place]
            runner.close()
            self._leave_out(runner.side, error)
            return None

    def _leave_out(self, side: Side, error: PeerFailed) -> None:
        """Note why a side takes no part; without outrider there is nothing to compare."""
        if side.peer.is_ours:
            raise PeerFailed(f"outrider itself could not be measured: {error}") from error
        self._result.notes.append(str(error))
        self._show(str(error))


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
        "finished_rounds": result.finished_rounds,
        "incomplete": result.interrupted is not None,
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
