"""The prompts of a bench: from JSONL files, or made to a length."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.prompts import STDIN, Message, PromptRecord, file_name, parse_jsonl, read_once
from outrider.errors import PromptError

if TYPE_CHECKING:
    from outrider.llm import LLM

DEFAULT_WORKLOAD = Path(__file__).parent / "workload.jsonl"
WARM_UP = Path(__file__).parent / "warm_up.jsonl"  # never measured
UNNAMED = "workload"  # category of prompts without one that come through a pipe


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One conversation to answer, and what kind of task it is."""

    category: str
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """The user's last turn."""
        return self.messages[-1]["content"]

    @property
    def conversation(self) -> list[Message]:
        return list(self.messages)


@dataclass(slots=True)
class Workload:
    """Prompts with their origin, and what was left out of it."""

    prompts: list[BenchPrompt]
    origin: list[dict[str, str]] = field(default_factory=list)  # file and its sha256
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "num_prompts": len(self.prompts),
            "categories": dict(Counter(prompt.category for prompt in self.prompts)),
            "notes": self.notes,
        }


def read_workload(
    paths: Sequence[Path] = (), categories: Sequence[str] = (), limit: int | None = None
) -> Workload:
    """Prompts of JSONL files with `prompt`, `turns` (the first counts) or `messages`.

    Args:
        paths: files, pipes or ``-`` for standard input, each read once; none: the workload that
            comes with outrider.
        categories: only these; a line without a category has its file's name.
        limit: thin the prompts evenly to this many.

    Raises:
        PromptError: a file or a line cannot be read (both are named), or nothing is left.
    """
    workload = Workload([])
    for path in paths or (DEFAULT_WORKLOAD,):
        name, category = _names(path)
        data = read_once(path)
        records = parse_jsonl(data, file_name(path))
        workload.prompts += [_prompt(record, category) for record in records]
        workload.origin.append({"file": name, "sha256": hashlib.sha256(data).hexdigest()})
        longer = sum(len(record.turns) > 1 for record in records)
        if longer:
            workload.notes.append(f"{name}: only the first turn of {longer} conversations")
    _keep_categories(workload, categories)
    _drop_repeated(workload)
    if limit is not None and len(workload.prompts) > limit:
        count = len(workload.prompts)
        workload.notes.append(f"{limit} of {count} prompts, evenly spread")
        workload.prompts = [workload.prompts[i * count // limit] for i in range(limit)]
    return workload


def check_room(
    max_model_len: int,
    max_tokens: int,
    input_tokens: int | None = None,
    contexts: Sequence[int] = (),
) -> None:
    """Refuse lengths that do not fit in the context: answers would end early without a word.

    Raises:
        PromptError: names the option that asks for too much.
    """
    asked = [("--input-tokens", input_tokens or 1)]
    asked += [("--context-lengths", length) for length in contexts]
    for option, num_tokens in asked:
        if num_tokens + max_tokens <= max_model_len:
            continue
        given = f"--max-tokens {max_tokens}"
        if num_tokens > 1:
            given = f"{option} {num_tokens} and {given} together"
        raise PromptError(
            f"{given} must leave room in the context: it has {max_model_len} tokens, and "
            f"{num_tokens + max_tokens} would be needed"
        )


def token_ids_of(llm: "LLM", prompt: BenchPrompt) -> list[int]:
    """What the model gets: by its chat template, or the bare text where it has none."""
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in prompt.messages)
        return list(tokenizer.encode(text))
    return list(tokenizer.encode(tokenizer.chat(prompt.conversation), add_special_tokens=False))


def encoded(
    llm: "LLM", workload: Workload, max_tokens: int, input_tokens: int | None = None
) -> list[tuple[int, list[int]]]:
    """(index, token ids) of the prompts; those that do not fit are left out with a note.

    Args:
        max_tokens: room that the answer needs.
        input_tokens: exact length. Longer prompts lose what is before their last tokens, so
            that the end, where the model is told to answer, stays; shorter ones are left out.

    Raises:
        PromptError: no prompt is left.
    """
    check_room(llm.engine.max_model_len, max_tokens, input_tokens)
    longest = llm.engine.max_model_len - max_tokens
    every = [token_ids_of(llm, prompt) for prompt in workload.prompts]
    least = input_tokens or 1
    fitting = [i for i, ids in enumerate(every) if least <= len(ids)]
    if input_tokens is None:
        fitting = [i for i in fitting if len(every[i]) <= longest]
    if len(fitting) < len(every):
        wanted = f"of {least} tokens or more" if input_tokens else f"of at most {longest} tokens"
        workload.notes.append(f"only {len(fitting)} of {len(every)} prompts are {wanted}")
    if not fitting:
        raise PromptError(f"no prompt is left: {workload.notes[-1]}")
    return [(i, every[i][-input_tokens:] if input_tokens else every[i]) for i in fitting]


def _names(path: Path) -> tuple[str, str]:
    """What a report calls a file, and the category of its prompts that have none."""
    if str(path) == STDIN:
        return "standard input", UNNAMED
    if os.path.exists(path) and not os.path.isfile(path):
        return "a pipe", UNNAMED
    printable = "".join(c if c.isprintable() else "?" for c in path.stem)
    return path.name, printable


def _prompt(record: PromptRecord, file: str) -> BenchPrompt:
    messages = (*record.before, {"role": "user", "content": record.text})
    return BenchPrompt(record.label or file, messages)


def _keep_categories(workload: Workload, categories: Sequence[str]) -> None:
    known = sorted({prompt.category for prompt in workload.prompts})
    for category in categories:
        if category not in known:
            raise PromptError(f"category must be one of {', '.join(known)}, got {category!r}")
    if categories:
        workload.prompts = [p for p in workload.prompts if p.category in categories]
        workload.notes.append(f"only the categories {', '.join(categories)}")


def _drop_repeated(workload: Workload) -> None:
    """A source that learns from answers would know the second answer before it is given."""
    seen: dict[tuple[tuple[str, str], ...], BenchPrompt] = {}
    for prompt in workload.prompts:
        seen.setdefault(tuple((m["role"], m["content"]) for m in prompt.messages), prompt)
    kept = list(seen.values())
    if len(kept) < len(workload.prompts):
        count = len(workload.prompts) - len(kept)
        workload.notes.append(f"{count} repeated prompt{'s' if count > 1 else ''} left out")
    workload.prompts = kept
