"""How the commands ask for answers, and the numbers they read off them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.cli.prompts import Message, PromptRecord
from outrider.results import RequestMetrics, RequestOutput, SpeculativeMetrics

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams

Prompt = str | list[Message]  # text as it is, or a conversation for the chat template


@dataclass(slots=True)
class Dialogue:
    """A prompt record while its turns are answered one after the other."""

    record: PromptRecord
    raw: bool  # text goes to the model as it is, without the chat template
    said: list[Message] = field(default_factory=list)

    def ask(self, turn: int) -> Prompt:
        """What the model gets for this turn: everything said so far and the turn itself."""
        if not self.said:
            self.said = list(self.record.before)
        self.said.append({"role": "user", "content": self.record.turns[turn]})
        if self.raw:
            return "\n\n".join(message["content"] for message in self.said)
        return list(self.said)

    def hear(self, text: str) -> None:
        """Keep the model's answer for the turns that follow."""
        self.said.append({"role": "assistant", "content": text})


def answer_all(
    llm: "LLM", records: Sequence[PromptRecord], params: "SamplingParams", raw: bool
) -> list[list[RequestOutput]]:
    """Answers by record and turn; records share batches, turns of one record follow each other."""
    dialogues = [Dialogue(record, raw) for record in records]
    answers: list[list[RequestOutput]] = [[] for _ in records]
    for turn in range(max(len(record.turns) for record in records)):
        asked = [i for i, record in enumerate(records) if turn < len(record.turns)]
        outputs = answer(llm, [dialogues[i].ask(turn) for i in asked], params)
        for i, output in zip(asked, outputs, strict=True):
            dialogues[i].hear(output.outputs[0].text)
            answers[i].append(output)
    return answers


def answer(llm: "LLM", prompts: Sequence[Prompt], params: "SamplingParams") -> list[RequestOutput]:
    """One batch of prompts that are all texts or all conversations."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        return llm.generate(texts, params)
    return llm.chat([prompt for prompt in prompts if not isinstance(prompt, str)], params)


def decode_rate(output: RequestOutput) -> float | None:
    """Tokens per second after the first token, None for answers too short to time."""
    metrics = output.metrics
    if metrics.first_token_time is None or metrics.finished_time is None:
        return None
    num_tokens = sum(len(choice.token_ids) - 1 for choice in output.outputs)
    seconds = metrics.finished_time - metrics.first_token_time
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None


def first_token_seconds(metrics: RequestMetrics) -> float | None:
    """Seconds from arrival to the first token."""
    if metrics.first_token_time is None:
        return None
    return metrics.first_token_time - metrics.arrival_time


def as_json(output: RequestOutput) -> dict[str, Any]:
    """The answer as plain JSON values."""
    metrics = output.metrics
    speculative = metrics.speculative_decoding
    return {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "outputs": [asdict(choice) for choice in output.outputs],
        "metrics": {
            "seconds_to_first_token": first_token_seconds(metrics),
            "decode_tokens_per_second": decode_rate(output),
            "num_preemptions": metrics.num_preemptions,
            "speculative_decoding": None if speculative is None else speculative_json(speculative),
        },
    }


def speculative_json(metrics: SpeculativeMetrics) -> dict[str, Any]:
    """Acceptance with its derived numbers, under vLLM's field names."""
    return asdict(metrics) | {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.draft_acceptance_rate,
        "num_rejected_draft_tokens": metrics.num_rejected_draft_tokens,
        "tokens_per_target_step": metrics.tokens_per_target_step,
    }
