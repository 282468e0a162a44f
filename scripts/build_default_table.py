"""Makes the draft table that ships for the default target.

    python scripts/build_default_table.py answers --problems train_prompts.jsonl -o answers.jsonl
    python scripts/build_default_table.py table answers.jsonl

`answers` lets the target answer school problems (a JSONL file with `turns`: the prompts of GSM8K's
training set), code tasks and everyday questions (table_prompts.py), greedily, and can be stopped
and started again. `table` builds `src/outrider/pretrained/smollm2-135m.table` from these answers
and from the sources of Python's standard library. The last line is the size of the table.
"""

import argparse
import hashlib
import json
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from table_prompts import chat_prompts, code_prompts

import outrider
from outrider.tables.build import TableBuilder
from outrider.tables.corpus import Corpus, read_passages, tokenised
from outrider.tables.edit import merge
from outrider.tables.format import Table
from outrider.tables.records import Settings
from outrider.tokenizer import Tokenizer

TABLE = Path(outrider.__file__).parent / "pretrained" / "smollm2-135m.table"
SEED = 1
# Longer keys brought no more tokens per step from 200 k tokens of answers (1.68 with 3, 4 or 6).
KEY_LENGTHS = (1, 2, 3, 4)
# The target's code is more like its other answers than like the library, whose rarer contexts make
# drafts for school problems worse and those for code no better (tokens per step with two branches:
# 1.85 and 1.55 with what was seen 3 times, 1.89 and 1.55 with what was seen 20 times, 1.92 and
# 1.52 without the library).
LIBRARY = Settings(KEY_LENGTHS, min_count=20)
NOT_LIBRARY = ("test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo")
NUM_PROBLEMS = 1600
MAX_TOKENS = 200
PER_ROUND = 128  # answers between two writes; many, so that the batch of 16 stays full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    answers = commands.add_parser("answers")
    answers.add_argument("--problems", type=Path, required=True)
    answers.add_argument("-o", "--output", type=Path, required=True)
    answers.set_defaults(run=lambda given: write_answers(given.problems, given.output))
    table = commands.add_parser("table")
    table.add_argument("answers", type=Path)
    table.add_argument("-o", "--output", type=Path, default=TABLE)
    table.set_defaults(run=lambda given: write_table(given.answers, given.output))
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


def write_table(answers: Path, output: Path) -> None:
    """Build the two parts and merge them; what both have is taken from the answers."""
    from outrider.target.load import load_model

    loaded = load_model()
    assert loaded.tokenizer is not None
    library = Corpus([Path(sysconfig.get_paths()["stdlib"])], (".py",), NOT_LIBRARY)
    with tempfile.TemporaryDirectory() as directory:
        parts = [Path(directory) / name for name in ("answers", "library")]
        settings = Settings(KEY_LENGTHS)
        _build(Corpus([answers]), loaded.tokenizer, settings, parts[0])
        _build(library, loaded.tokenizer, LIBRARY, parts[1])
        output.parent.mkdir(exist_ok=True)
        tables = [Table(part) for part in parts]
        merge(*tables, output, _provenance(answers, loaded.name, tables), prefer_first=True)
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB")


def _build(corpus: Corpus, tokenizer: Tokenizer, settings: Settings, path: Path) -> None:
    passages = (passage for file in corpus.files() for passage in read_passages(file, tokenizer))
    with TableBuilder(tokenizer.vocab_size, tokenizer.fingerprint, settings) as builder:
        for token_ids, counted in tokenised(passages, tokenizer):
            builder.add(token_ids, counted)
        builder.finish(path, {})


def _provenance(answers: Path, model: str, tables: Sequence[Table]) -> dict[str, Any]:
    content = answers.read_bytes()
    return {
        "command": "python scripts/build_default_table.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"outrider": outrider.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("numpy", "tokenizers")},
        "seed": SEED,
        "model": model,
        "data": {
            "answers": {
                "what": "greedy answers of the model to GSM8K training problems and to the code "
                "tasks and questions of scripts/table_prompts.py",
                "count": content.count(b"\n"),
                "max_tokens": MAX_TOKENS,
                "sha256": hashlib.sha256(content).hexdigest(),
                **tables[0].header["corpus"],
            },
            "library": {
                "what": f"sources of Python {platform.python_version()}'s standard library, "
                f"without {', '.join(NOT_LIBRARY)} (PSF licence)",
                **tables[1].header["corpus"],
            },
        },
    }


def all_prompts(problems: Path) -> list[str]:
    """The three kinds in turn, so that a run that is cut short has some of each."""
    lines = problems.read_text(encoding="utf-8").splitlines()
    if len(lines) < NUM_PROBLEMS:
        sys.exit(f"{problems} holds {len(lines)} problems, expected {NUM_PROBLEMS} or more")
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
