"""Is the speculative text the plain text, token by token?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.cli.comparison import first_difference

if TYPE_CHECKING:
    from outrider.bench.drive import Pass
    from outrider.llm import LLM

SHOWN = 5  # differences that are kept


@dataclass(slots=True)
class Tally:
    """Answers of one side."""

    num_answers: int = 0  # compared
    num_same: int = 0


@dataclass(slots=True)
class Verdict:
    """Every answer of every round and batch size against the first plain answer to its prompt."""

    sides: dict[str, Tally] = field(default_factory=dict)
    differences: list[dict[str, Any]] = field(default_factory=list)  # the first SHOWN
    _reference: dict[Any, list[int]] = field(default_factory=dict, repr=False)

    @property
    def num_answers(self) -> int:
        """Answers that were compared."""
        return sum(tally.num_answers for tally in self.sides.values())

    @property
    def num_same(self) -> int:
        """Those that are the plain text."""
        return sum(tally.num_same for tally in self.sides.values())

    @property
    def is_lossless(self) -> bool:
        return self.num_same == self.num_answers

    def compare(
        self, llm: "LLM", side: str, batch: int, rounds: Sequence["Pass"], group: Any = None
    ) -> None:
        """Take in all rounds of one side; the first answer to a prompt of a group is the reference.

        Plain decoding is compared too: a text that changes with batch or round is not repeatable.
        """
        tally = self.sides.setdefault(side, Tally())
        for number, part in enumerate(rounds):
            for answer in sorted(part.answers, key=lambda answer: answer.index):
                reference = self._reference.setdefault((group, answer.index), answer.token_ids)
                if reference is answer.token_ids:
                    continue
                tally.num_answers += 1
                if reference == answer.token_ids:
                    tally.num_same += 1
                elif len(self.differences) < SHOWN:
                    where = {"side": side, "batch": batch, "round": number, "prompt": answer.index}
                    self.differences.append(where | _difference(llm, reference, answer.token_ids))

    def references(self) -> list[dict[str, Any]]:
        """The first plain answer to every prompt, as JSON values."""
        return [
            {"group": group, "prompt": index, "token_ids": token_ids}
            for (group, index), token_ids in self._reference.items()
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "is_lossless": self.is_lossless,
            "num_answers": self.num_answers,
            "num_same": self.num_same,
            "sides": {name: asdict(tally) for name, tally in self.sides.items()},
            "differences": self.differences,
        }


def _difference(llm: "LLM", reference: list[int], other: list[int]) -> dict[str, Any]:
    tokenizer = llm.tokenizer
    decode = str if tokenizer is None else tokenizer.decode
    found = first_difference(reference, other, decode)
    assert found is not None
    return {
        "position": found.position,
        "context": found.context,
        "plain_token": found.plain_token,
        "other_token": found.speculative_token,
    }
