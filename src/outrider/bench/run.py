"""Several ways of decoding the same prompts, in turns, round after round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.bench.drive import Pass, drive
from outrider.bench.timing import turns
from outrider.bench.workload import WARM_UP, read_workload, token_ids_of

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams

WARM_UP_TOKENS = 32  # per request: enough for the cost model to meet the rows it will meet
SLICE = 4  # times the batch size: prompts that one side decodes before the other has its turn

Prompts = Sequence[tuple[int, Sequence[int]]]  # index of the prompt, token ids
MakeLLM = Callable[[int], "LLM"]  # given the batch size


@dataclass(slots=True)
class Measured:
    """All rounds of every side at one batch size; the first side is plain decoding."""

    batch: int
    sides: list[list[Pass]]

    def add_round(self, passes: Sequence[list[Pass]]) -> None:
        """Take in a whole round, as the slices of each side."""
        for rounds_of_side, parts in zip(self.sides, passes, strict=True):
            rounds_of_side.append(sum(parts[1:], parts[0]))

    def keep_whole_rounds(self) -> bool:
        """Drop what some sides have and others do not; whether anything is left."""
        count = min(map(len, self.sides))
        for rounds_of_side in self.sides:
            del rounds_of_side[count:]
        return count > 0


def measure(
    makers: Sequence[MakeLLM],
    prompts: Prompts,
    params: "SamplingParams",
    batch: int,
    rounds: int,
    done: Callable[[int], None] = lambda _: None,
    result: Measured | None = None,
) -> Measured:
    """Decode all prompts `rounds` times by every side.

    Sides are made anew for every round, and warmed up with prompts that are not measured: no
    source has seen an answer of the round before it, and no first call is timed. Within a round
    the sides take turns over slices of the prompts.

    Args:
        makers: of each side, engines on one target given the batch size; plain decoding first.
        done: called with the number of answers that were just finished.
        result: where rounds go as they end, for who wants them when a later one does not.
    """
    result = result or Measured(batch, [[] for _ in makers])
    for number in range(rounds):
        result.add_round(_round(makers, prompts, params, batch, number, done))
    return result


def _round(
    makers: Sequence[MakeLLM],
    prompts: Prompts,
    params: "SamplingParams",
    batch: int,
    number: int,
    done: Callable[[int], None],
) -> list[list[Pass]]:
    """The slices of each side; its engines end with the round, before the next ones are made."""
    llms = [make(batch) for make in makers]
    passes: list[list[Pass]] = [[] for _ in llms]
    for place, part in enumerate(_slices(prompts, batch)):
        for side in turns(len(llms), number + place):
            if place == 0:
                warm_up(llms[side], batch)
            passes[side].append(drive(llms[side], part, params, batch))
            done(len(part))
    return passes


def warm_up(llm: "LLM", batch: int) -> None:
    """Decode prompts that are not measured, as many at once as will be."""
    from outrider.sampling_params import SamplingParams

    room = llm.engine.max_model_len
    if llm.tokenizer is None:
        every = [
            [(7919 * i + place) % llm.target.vocab_size for i in range(32)] for place in (1, 2)
        ]
    else:
        every = [token_ids_of(llm, prompt) for prompt in read_workload([WARM_UP]).prompts]
    num_tokens = max(1, min(WARM_UP_TOKENS, room - max(map(len, every))))
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, owner="warm-up"
    )
    count = max(2, batch)
    # Their indices are negative, so that no source takes them for prompts of the workload.
    prompts = [(-1 - i, every[i % len(every)][: room - num_tokens]) for i in range(count)]
    drive(llm, prompts, params, batch)


def _slices(prompts: Prompts, batch: int) -> list[Prompts]:
    """One prompt at a time for one request at a time, else enough to keep the batch full."""
    size = 1 if batch == 1 else SLICE * batch
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
