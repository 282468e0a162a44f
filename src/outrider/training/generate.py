"""Texts to train on: prompts, given or written by the target itself, and the target's answers.

Everything follows from a plan and the number of a shard, so that a run which was killed goes on
with the same texts.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.bench.repetition import loop_start
from outrider.bench.workload import BenchPrompt
from outrider.errors import DataError, PromptError
from outrider.sampling_params import SamplingParams
from outrider.training.beginnings import Beginning
from outrider.training.dataset import (
    KIND,
    TARGET_ID,
    Data,
    Sample,
    Shard,
    read_header,
    unlike,
    write_header,
    write_shard,
)
from outrider.training.features import (
    Features,
    joined,
    open_features,
    shards_to_do,
    write_shard_features,
)
from outrider.training.recorder import Recorder

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.results import RequestOutput

MARKER = "\u2042 the user's words \u2042"  # stands for them where a template is rendered
SELF_TEMPERATURE, SELF_TOP_P, SELF_TOKENS = 1.0, 0.95, 256  # how the target writes prompts
SHORTEST = 8  # tokens of an answer that is kept
MIN_PROMPT = 6  # characters that the target must have added to a beginning


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked, and how it is answered."""

    prompts: tuple[BenchPrompt, ...]
    beginnings: tuple[Beginning, ...]
    self_prompts: int  # prompts that the target writes
    temperatures: tuple[tuple[float, float], ...]  # temperature and share
    top_p: float = 1.0
    max_tokens: int = 512
    shard_size: int = 512  # prompts of one file
    seed: int = 0

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) + self.self_prompts

    @property
    def num_shards(self) -> int:
        return -(-self.num_prompts // self.shard_size)

    @property
    def categories(self) -> list[str]:
        own = [category for category, _, _ in self.beginnings] if self.self_prompts else []
        return sorted({*(prompt.category for prompt in self.prompts), *own})

    def as_json(self) -> dict[str, Any]:
        """Settings, and the prompts as a hash."""
        content = asdict(self)
        for name in ("prompts", "beginnings"):
            content[name] = _hash(json.dumps(content[name]))
        return content

    def shard(self, index: int) -> list[BenchPrompt | None]:
        """Prompts of one shard in a random order; None: one that the target writes."""
        order = list(range(self.num_prompts))
        random.Random(f"{self.seed} order").shuffle(order)
        chosen = order[index * self.shard_size : (index + 1) * self.shard_size]
        return [self.prompts[i] if i < len(self.prompts) else None for i in chosen]


@dataclass(frozen=True, slots=True)
class Done:
    """What one shard came to."""

    index: int
    num_prompts: int  # of the plan, whether or not anything was kept
    num_texts: int
    num_tokens: int  # generated
    num_too_long: int  # prompts that leave no room for an answer
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(1e-9, self.seconds)


@dataclass(frozen=True, slots=True)
class Recording:
    """Features that are kept while the target answers: where, and by whom."""

    directory: Path
    recorder: Recorder
    about: dict[str, Any]  # for `open_features`


def generate(
    llm: "LLM",
    plan: Plan,
    directory: Path,
    provenance: dict[str, Any],
    recording: Recording | None = None,
) -> Iterator[Done]:
    """Write the shards that are not there yet, and data.json after each.

    Args:
        recording: its recorder is one of the sources of `llm`.

    Raises:
        DataError: the directory holds data of another plan, or of the same without features, or
            cannot be written; or answers as long as the plan's leave no room for prompts.
        PromptError: the target has no chat template.
    """
    header = chat_header(llm) if plan.self_prompts else []
    if plan.max_tokens >= llm.engine.max_model_len:
        raise DataError(
            f"answers of {plan.max_tokens} tokens leave no room for prompts in the context of "
            f"{llm.engine.max_model_len}: expected fewer tokens"
        )
    about = {
        "plan": plan.as_json(),
        "target": llm.target.name,
        "tokenizer": llm.tokenizer.fingerprint,
        TARGET_ID: llm.target_id,
    }
    about = _open(directory, plan, about)
    if recording is not None and _shard(directory, 0).exists():
        _open_recorded(recording, Data(directory))
    for index in range(plan.num_shards):
        if not _shard(directory, index).exists():
            done = _write(llm, plan, header, directory, index, recording)
            _write_about(directory, plan, about, provenance)
            if recording is not None:
                open_features(recording.directory, Data(directory), recording.about)
            yield done


def _open(directory: Path, plan: Plan, about: dict[str, Any]) -> dict[str, Any]:
    """Make sure that the directory is one of this plan, before its first shard is written.

    Returns what its header says of that; one made earlier says less, and stays as it is.
    """
    path = directory / "data.json"
    has_shards = any(directory.glob("tokens-*"))
    if path.exists() and has_shards:
        found = read_header(path, KIND)
        differs = unlike(found, about)
        if differs:
            raise DataError(f"{directory} holds other data; give another directory: {differs}")
        about = {key: found[key] for key in about if key in found}
        if _shard(directory, 0).exists():  # a kill may have come between a shard and its count
            _write_about(directory, plan, about, found.get("provenance", {}))
    elif has_shards:
        raise DataError(f"{directory} holds shards of data without their data.json")
    else:
        write_header(path, KIND, {"categories": plan.categories, **about})
    return about


def _open_recorded(recording: Recording, data: Data) -> None:
    """Make sure that features are kept of what is there: a kill may have come before their header,
    and the first command may have kept none."""
    open_features(recording.directory, data, recording.about)
    lacking = shards_to_do(recording.directory, data)
    if lacking:
        raise DataError(
            f"{recording.directory} has no features of {lacking[0].path}, expected those of all "
            "texts that are there: `outrider train features` makes them"
        )


def _shard(directory: Path, index: int) -> Path:
    return directory / f"tokens-{index:05d}.safetensors"


def chat_header(llm: "LLM") -> list[int]:
    """What a conversation holds before the user's first words, as token ids.

    Raises:
        PromptError: there is no chat template, or it does not show what the user says.
    """
    text = llm.tokenizer.chat([{"role": "user", "content": MARKER}])
    if MARKER not in text:
        raise PromptError("the chat template does not show what the user says")
    return llm.tokenizer.encode(text.split(MARKER)[0], add_special_tokens=False)


def _write(
    llm: "LLM",
    plan: Plan,
    header: list[int],
    directory: Path,
    index: int,
    recording: Recording | None,
) -> Done:
    started = perf_counter()
    rng = random.Random(f"{plan.seed} {index}")
    wanted = plan.shard(index)
    prompts = [prompt for prompt in wanted if prompt is not None]
    prompts += _self_prompts(llm, plan, header, wanted.count(None), rng)
    rng.shuffle(prompts)
    ids = [_encoded(llm, prompt) for prompt in prompts]
    room = llm.engine.max_model_len - plan.max_tokens
    kept = [pair for pair in zip(prompts, ids, strict=True) if len(pair[1]) <= room]
    values, shares = zip(*plan.temperatures, strict=True)
    params = [
        SamplingParams(
            temperature=rng.choices(values, shares)[0],
            top_p=plan.top_p,
            max_tokens=plan.max_tokens,
            seed=rng.getrandbits(60),
        )
        for _ in kept
    ]
    if recording is not None:
        recording.recorder.forget()  # how prompts were written
    outputs = llm.generate([{"prompt_token_ids": each} for _, each in kept], params)
    samples = []
    features: list[Features] = []
    for (prompt, _), param, output in zip(kept, params, outputs, strict=True):
        sample = _sample(prompt.category, param.temperature, output)
        if sample is None:
            continue
        if recording is not None:
            found = recording.recorder.features(sample, _text(output))
            if found is None:
                continue
            features.append(found)
        samples.append(sample)
    if recording is not None:
        recording.recorder.forget()
    directory.mkdir(parents=True, exist_ok=True)
    if recording is not None:  # first, so that no shard is ever without
        recording.directory.mkdir(parents=True, exist_ok=True)
        shard = Shard(_shard(directory, index))
        whole = joined(features or [recording.recorder.nothing()])
        write_shard_features(recording.directory, shard, whole)
    write_shard(directory, index, samples, plan.categories)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    too_long = len(prompts) - len(kept)
    seconds = perf_counter() - started
    return Done(index, len(wanted), len(samples), tokens, too_long, seconds)


def _encoded(llm: "LLM", prompt: BenchPrompt) -> list[int]:
    return llm.tokenizer.encode(llm.tokenizer.chat(prompt.conversation), add_special_tokens=False)


def _self_prompts(
    llm: "LLM", plan: Plan, header: list[int], count: int, rng: random.Random
) -> list[BenchPrompt]:
    """Prompts that the target writes behind the header of the user's turn; some come to nothing."""
    if not count:
        return []
    weights = [weight for _, _, weight in plan.beginnings]
    chosen = rng.choices(plan.beginnings, weights, k=count)
    asked = [
        {"prompt_token_ids": header + llm.tokenizer.encode(text, add_special_tokens=False)}
        for _, text, _ in chosen
    ]
    params = [
        SamplingParams(
            temperature=SELF_TEMPERATURE,
            top_p=SELF_TOP_P,
            max_tokens=SELF_TOKENS,
            seed=rng.getrandbits(60),
        )
        for _ in chosen
    ]
    prompts = []
    for (category, text, _), output in zip(chosen, llm.generate(asked, params), strict=True):
        found = output.outputs[0]
        is_whole = found.finish_reason == "stop" and loop_start(found.token_ids) is None
        if is_whole and len(found.text.strip()) >= MIN_PROMPT:
            message = {"role": "user", "content": text + found.text}
            prompts.append(BenchPrompt(category, (message,)))
    return prompts


def _sample(category: str, temperature: float, output: "RequestOutput") -> Sample | None:
    """The text, cut where it begins to repeat itself; None where little is left."""
    ids = output.outputs[0].token_ids
    ids = ids[: loop_start(ids)]
    if len(ids) < SHORTEST:
        return None
    return Sample(category, temperature, output.prompt_token_ids, ids)


def _text(output: "RequestOutput") -> bytes:
    """Prompt and answer, as the recorder names a text."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return np.array(ids, np.int32).tobytes()


def _write_about(
    directory: Path, plan: Plan, about: dict[str, Any], provenance: dict[str, Any]
) -> None:
    """data.json of the shards that are there. The id is that of the plan and the first shard, so
    that it stays when more follow, and differs where another machine writes other texts."""
    first = _shard(directory, 0).read_bytes()
    asked = {key: value for key, value in about.items() if key != TARGET_ID}
    identity = _hash(json.dumps(asked, sort_keys=True), first)
    categories = plan.categories
    content = {"id": identity, "categories": categories, **about, "provenance": provenance}
    path = directory / "data.json"
    write_header(path, KIND, content)
    data = Data(directory)
    counts: dict[str, int] = dict.fromkeys(categories, 0)
    for shard in data.shards:
        for kind in shard.categories.tolist():
            counts[categories[kind]] += 1
    content |= {
        "complete": len(data.shards) == plan.num_shards,
        "num_texts": data.num_texts,
        "num_tokens": data.num_tokens,
        "texts_by_category": counts,
    }
    write_header(path, KIND, content)


def _hash(text: str, more: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + more).hexdigest()[:16]
