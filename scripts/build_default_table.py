"""Makes the draft table that ships for the default target.

    python scripts/build_default_table.py answers --problems train_prompts.jsonl -o answers.jsonl
    python scripts/build_default_table.py table answers.jsonl

`answers` lets the target answer school problems (a JSONL file with `turns`: the prompts of GSM8K's
training set), code tasks and everyday questions (table_prompts.py), greedily, and can be stopped
and started again. `table` builds `src/outrider/pretrained/smollm2-135m.table` from these answers
and from the sources of Python's standard library. The last line is the size of the table.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from table_prompts import chat_prompts, code_prompts

SEED = 1
NUM_PROBLEMS = 1600
MAX_TOKENS = 200
PER_ROUND = 128  # answers between two writes; many, so that the batch of 16 stays full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    answers = commands.add_parser("answers")
    answers.add_argument("--problems", type=Path, required=True)
    answers.add_argument("-o", "--output", type=Path, required=True)
    answers.set_defaults(run=lambda given: write_answers(given.problems, given.output))
    given = parser.parse_args()
    given.run(given)


def write_answers(problems: Path, output: Path) -> None:
    """Append the answers that the output does not hold yet."""
    from outrider import LLM, SamplingParams

    prompts = all_prompts(problems)
    done = _done(output)
    llm = LLM(max_num_seqs=16, max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    left = [prompt for prompt in prompts if prompt not in done]
    for start in range(0, len(left), PER_ROUND):
        batch = left[start : start + PER_ROUND]
        results = llm.chat([[{"role": "user", "content": prompt}] for prompt in batch], params)
        with output.open("a", encoding="utf-8") as file:
            for prompt, result in zip(batch, results, strict=True):
                choice = result.outputs[0]
                answer = {"token_ids": choice.token_ids, "text": choice.text}
                line = {"turns": [prompt], "prompt": result.prompt, "outputs": [answer]}
                file.write(json.dumps(line) + "\n")
        sys.stderr.write(f"{len(prompts) - len(left) + start + len(batch)} of {len(prompts)}\n")


def all_prompts(problems: Path) -> list[str]:
    """The three kinds in turn, so that a run that is cut short has some of each."""
    lines = problems.read_text(encoding="utf-8").splitlines()
    school = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // NUM_PROBLEMS]]
    kinds = [school[:NUM_PROBLEMS], code_prompts(SEED), chat_prompts(SEED)]
    return list(dict.fromkeys(_spread(kinds)))


def _spread(kinds: Sequence[list[str]]) -> Iterator[str]:
    """All items, each list evenly spread over the whole."""
    places = [
        ((index + 0.5) / len(kind), number, item)
        for number, kind in enumerate(kinds)
        for index, item in enumerate(kind)
    ]
    return (item for _, _, item in sorted(places))


def _done(output: Path) -> set[str]:
    if not output.exists():
        return set()
    lines = output.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["turns"][0] for line in lines}


if __name__ == "__main__":
    main()
