"""What `outrider table` prints about tables."""

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.tables.coverage import Coverage
    from outrider.tables.format import Table
    from outrider.tokenizer import Tokenizer

NUM_SAMPLES, SAMPLE_TOKENS = 8, 12
KIB, MIB = 1 << 10, 1 << 20
FIXED_SPACE = "\xa0"  # keeps a pair in one line
LEFT_OUT = {  # why contexts are not in a table
    "full_buckets": "whose bucket was full",
    "max_bytes": "of least worth, to keep the size",
    "min_count": "seen too seldom",
    "equal_hashes": "that a shorter hash does not tell apart",
}
KEY_LEGEND = (
    "answers: places where this was the longest key that the table has, and a draft came of it · "
    "first token right: of these, where the first token of the draft is the next one · accepted: "
    "tokens of the draft that follow in the text, on average · expected: the same as the table's "
    "confidence foretold it"
)
SIZE_LEGEND = (
    "places with a draft: of all tokens of the text · tokens per step: of decoding this text, "
    "with the one that the target adds"
)


def many(count: int, what: str) -> str:
    """``1 token``, ``1,234 tokens``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(num_bytes: int) -> str:
    """Bytes in the units that the options take."""
    if num_bytes < MIB:
        return f"{-(-num_bytes // KIB)} KiB"
    return f"{num_bytes / MIB:.1f} MiB"


def left_out(counts: Mapping[str, int]) -> str:
    """What a table lost when it was made, as a further line, or nothing."""
    parts = [
        f"{many(count, 'context')} {LEFT_OUT.get(reason, reason)}"
        for reason, count in counts.items()
        if count
    ]
    return f"\nleft out: {', '.join(parts)}" if parts else ""


def print_header(opened: "Table", verified: bool) -> None:
    """What a table is and where it is from."""
    from outrider.cli.console import output
    from outrider.tables.files import named
    from outrider.tables.hashing import BUCKET_BYTES

    header, layout, console = opened.header, opened.contents.layout, output()
    console.print(
        f"{named(opened.path)}: {size(opened.num_bytes)}, "
        f"{many(header['num_contexts'], 'context')}, "
        f"{many(header['num_slots'], 'continuation')}"
        + (", checked from end to end" if verified else "")
        + left_out(header.get("left_out", {})),
        soft_wrap=True,
    )
    hot, cold = (size(region.num_buckets * BUCKET_BYTES) for region in layout.regions)
    lengths = ", ".join(map(str, layout.key_lengths))
    console.print(f"tokenizer {opened.fingerprint}, {opened.vocab_size:,} ids")
    tokens = "token" if lengths == "1" else "tokens"
    parts = [
        *(f"keys of {lengths} {tokens}", f"filter {size(layout.filter_bytes)}"),
        *(f"entries used most {hot}", f"others {cold}"),
    ]
    console.print(_lines(parts, " · ", console.width))
    by_length = header.get("contexts_by_length", {})
    if by_length:
        parts = [f"{length}: {count:,}" for length, count in by_length.items()]
        console.print(_lines(["contexts by length", *parts], "  ", console.width))
    provenance = json.dumps(opened.provenance, indent=1, ensure_ascii=False)
    console.print(provenance, style="dim", soft_wrap=True)


def _lines(parts: Sequence[str], between: str, width: int) -> str:
    """The parts in lines of at most `width`, none of them cut."""
    joined = between.join(part.replace(" ", FIXED_SPACE) for part in parts)
    return textwrap.fill(joined, width, break_long_words=False).replace(FIXED_SPACE, " ")


def print_samples(opened: "Table", tokenizer: "Tokenizer", after: Sequence[str]) -> None:
    """What a table drafts after texts, or after its most frequent tokens."""
    from rich.table import Table as Grid

    from outrider.cli.console import output
    from outrider.tables.samples import continuation, frequent_starts

    starts = [tokenizer.encode(text, add_special_tokens=False) for text in after]
    starts = starts or [[token] for token in frequent_starts(opened, NUM_SAMPLES)]
    if not starts:
        output().print("it has no keys of one token to show drafts of: give --after TEXT")
        return
    grid = Grid("after", "drafts", "survival")
    for start in starts:
        ids, survival = continuation(opened, start, SAMPLE_TOKENS)
        grid.add_row(
            repr(tokenizer.decode(start, False)),
            repr(tokenizer.decode(ids, False)) if ids else "nothing",
            " ".join(f"{chance:.2f}" for chance in survival),
        )
    output().print(grid)


def print_coverage(name: str, sizes: "Sequence[Coverage]") -> None:
    """What a table did on a text, by key length and by size."""
    from rich.table import Table as Grid

    from outrider.cli.console import output
    from outrider.tables.coverage import recommended

    console = output()
    by_key = Grid("key", "answers", "first token right", "accepted", "expected", title=name)
    for key in sizes[0].keys:
        by_key.add_row(
            many(key.key_length, "token"), f"{key.hit_rate:.1%}", f"{key.first_accepted:.1%}",
            f"{key.accepted_tokens:.2f}", f"{key.expected_tokens:.2f}",
        )  # fmt: skip
    console.print(by_key)
    console.print(KEY_LEGEND, style="dim")
    best = recommended(sizes)
    by_size = Grid("size", "contexts", "places with a draft", "tokens per step", "")
    for each in sizes:
        by_size.add_row(
            size(each.num_bytes), f"{each.num_contexts:,}", f"{each.hit_rate:.1%}",
            f"{each.acceptance_length:.3f}", "recommended" if each is best else "",
        )  # fmt: skip
    console.print(by_size)
    console.print(SIZE_LEGEND, style="dim")
    if best.max_bytes is None:
        console.print("recommended: the table as it is")
        return
    command = f"outrider table prune {shlex.quote(name)} -o SMALLER.table"
    console.print(
        f"for the recommended size: {command} --max-bytes {best.max_bytes // KIB}K", soft_wrap=True
    )
