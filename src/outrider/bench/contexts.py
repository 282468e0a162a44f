"""Prompts of a given length: the same tasks behind more and more text to read."""

import pydoc_data.topics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outrider.bench.workload import BenchPrompt, token_ids_of
from outrider.errors import PromptError

if TYPE_CHECKING:
    from outrider.llm import LLM

# What is asked about stands at the end, so that a longer context changes nothing but its length.
PASSAGES = (
    "The glass roof of the market hall was repaired between March and October. Ninety-six panes "
    "were replaced, the iron frame was painted dark green as it had been in 1904, and the gutters "
    "now lead the rain into a tank under the fish stalls. The traders, who had moved to the car "
    "park behind the station, returned on the second of November.",
    "The survey counted birds on four islands. On the northern island there were 412 pairs of "
    "terns, on the eastern island 187, on the two small ones together 96. Compared with the "
    "survey before, terns increased by a tenth, while the number of gulls fell by a third. "
    "The report proposes to close the northern landing stage from May to July.",
)
TASKS = (
    ("copy", "Copy the last passage word for word:\n\n{passage}"),
    ("summary", "Summarise the last passage in two sentences:\n\n{passage}"),
)


def context_prompts(llm: "LLM", num_tokens: int) -> tuple[list[str], list[tuple[int, list[int]]]]:
    """Categories, and (index, token ids) of prompts of `num_tokens` tokens or a few less.

    The text before the task is Python's own reference manual, which every Python carries; every
    prompt has another part of it.

    Raises:
        PromptError: the tasks alone are longer, or there is not enough text.
    """
    manual = _manual()
    categories: list[str] = []
    prompts: list[tuple[int, list[int]]] = []
    for passage in PASSAGES:
        for category, task in TASKS:
            asked = task.format(passage=passage)
            prompts.append((len(prompts), _filled(llm, manual, asked, num_tokens)))
            categories.append(category)
    return categories, prompts


def _filled(llm: "LLM", manual: Iterator[str], asked: str, num_tokens: int) -> list[int]:
    """The task behind as many paragraphs as fit; the last one is cut to the length wanted."""
    tokenizer = llm.tokenizer
    missing = num_tokens - len(_with_filler(llm, "", asked))
    if missing < 0:
        raise PromptError(
            f"--context-lengths must be at least {num_tokens - missing} tokens, got {num_tokens}"
        )
    filler: list[int] = []
    while len(filler) < missing:
        paragraph = next(manual, None)
        if paragraph is None:
            raise PromptError(
                f"--context-lengths {num_tokens}: the text that outrider has is shorter than "
                f"{len(TASKS) * len(PASSAGES)} prompts of that length"
            )
        filler += tokenizer.encode(paragraph + "\n\n", add_special_tokens=False)
    # Text that is cut and put together is tokenised a little differently than its parts; two or
    # three cuts bring it to its length.
    while True:
        prompt = _with_filler(llm, tokenizer.decode(filler[:missing]) if missing else "", asked)
        if len(prompt) <= num_tokens:
            return prompt
        missing = max(0, missing - (len(prompt) - num_tokens))


def _with_filler(llm: "LLM", filler: str, asked: str) -> list[int]:
    text = f"{filler}\n\n{asked}" if filler else asked
    return token_ids_of(llm, BenchPrompt("", ({"role": "user", "content": text},)))


def _manual() -> Iterator[str]:
    """Paragraphs of the manual in a fixed order, without headings and tables."""
    topics = pydoc_data.topics.topics
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if len(paragraph) > 80:
                yield " ".join(paragraph.split())
