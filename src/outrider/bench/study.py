"""A whole bench: what is measured in which order, and everything that came of it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.contexts import context_prompts
from outrider.bench.forward import ForwardCost, forward_cost
from outrider.bench.lossless import Verdict
from outrider.bench.run import Prompts, drive, measure
from outrider.bench.speed_only import LABEL, ForcedSource, random_prompts
from outrider.bench.summary import Measurement, summarise
from outrider.bench.workload import Workload, encoded
from outrider.cli.comparison import twin
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.target.base import Target

FORMAT = 1  # of the JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    batches: tuple[int, ...] = (1, 8)
    rounds: int = 3
    max_tokens: int = 128
    input_tokens: int | None = None  # exact length of the prompts
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    contexts: tuple[int, ...] = ()  # prompt lengths of the sweep

    def params(self, max_tokens: int | None = None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=max_tokens or self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


@dataclass(slots=True)
class Study:
    """All numbers of one bench."""

    target: dict[str, Any]
    speculative_config: Any
    settings: Settings
    workload: dict[str, Any]
    label: str = ""  # what must stand above every number, where it is not a real model
    measurements: list[Measurement] = field(default_factory=list)  # by batch size
    contexts: list[Measurement] = field(default_factory=list)  # by length of the context
    forward: ForwardCost | None = None
    verdict: Verdict = field(default_factory=Verdict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "label": self.label,
            "provenance": self.provenance,
            "target": self.target,
            "speculative_config": self.speculative_config,
            "settings": asdict(self.settings),
            "workload": self.workload,
            "lossless": self.verdict.as_json(),
            "measurements": [asdict(one) for one in self.measurements],
            "contexts": [asdict(one) for one in self.contexts],
            "forward": None if self.forward is None else asdict(self.forward),
        }


def bench_model(
    llm: "LLM",
    config: Any,
    workload: Workload,
    settings: Settings,
    done: Callable[[int], None] = lambda _: None,
) -> Study:
    """Measure a model with its sources over a workload, by batch size and by context length.

    Args:
        llm: the model; its own sources are not used.
        config: the speculative config whose sources are made anew for every round.
        done: called with the number of answers that were just finished.
    """
    prompts = encoded(llm, workload, settings.max_tokens, settings.input_tokens)
    # Before anything is measured, so that a length that does not fit is refused at once.
    sweep = [(length, *context_prompts(llm, length)) for length in settings.contexts]
    study = Study(describe(llm.target), config, settings, workload.as_json())
    study.forward = forward_cost(llm)
    categories = [prompt.category for prompt in workload.prompts]
    for batch in settings.batches:
        study.measurements.append(
            _measured(llm, config, prompts, categories, batch, study, done, "workload")
        )
    for length, kinds, texts in sweep:
        one = _measured(llm, config, texts, kinds, 1, study, done, length)
        one.context_tokens = length
        study.contexts.append(one)
    return study


def bench_speed_only(
    llm: "LLM",
    settings: Settings,
    acceptance: Sequence[float],
    num_draft_tokens: int,
    done: Callable[[int], None] = lambda _: None,
) -> Study:
    """Measure a model of random weights whose drafts are right at a forced rate.

    Args:
        settings: `input_tokens` is the length of every prompt.
        acceptance: rates to force, each against plain decoding in the same run.
        num_draft_tokens: of every draft; the planner may submit fewer.
    """
    assert settings.input_tokens is not None
    prompts = random_prompts(
        llm.target.vocab_size, max(settings.batches), settings.input_tokens, settings.seed
    )
    about = {"origin": [], "num_prompts": len(prompts), "categories": {"random": len(prompts)}}
    config = {"forced_acceptance": list(acceptance), "num_draft_tokens": num_draft_tokens}
    study = Study(describe(llm.target), config, settings, about | {"notes": []}, LABEL)
    study.forward = forward_cost(llm)
    params = settings.params()
    plain = drive(twin(llm, None, max_num_seqs=len(prompts)), prompts, params, len(prompts))
    answers = {answer.index: answer.token_ids for answer in plain.answers}
    for batch in settings.batches:
        for rate in acceptance:
            source = ForcedSource(answers, rate, num_draft_tokens, settings.seed)
            kinds = ["random"] * len(prompts)
            one = _measured(llm, source, prompts[:batch], kinds, batch, study, done, "random")
            one.forced_acceptance = rate
            study.measurements.append(one)
    return study


def describe(target: "Target") -> dict[str, Any]:
    """The target as JSON values."""
    return {
        "name": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "deterministic": target.deterministic,
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "weight_bytes": getattr(target, "weight_bytes", None),
    }


def num_answers(settings: Settings, num_prompts: int, num_sweep_prompts: int = 4) -> int:
    """How many answers a bench of a model decodes, for a progress bar."""
    per_round = len(settings.batches) * num_prompts + len(settings.contexts) * num_sweep_prompts
    return 2 * settings.rounds * per_round


def _measured(
    llm: "LLM",
    config: Any,
    prompts: Prompts,
    categories: Sequence[str],
    batch: int,
    study: Study,
    done: Callable[[int], None],
    group: Any,
) -> Measurement:
    measured = measure(
        lambda size: twin(llm, None, max_num_seqs=size),
        lambda size: twin(llm, config, max_num_seqs=size),
        prompts,
        study.settings.params(),
        batch,
        study.settings.rounds,
        done,
    )
    for name, rounds in zip(("plain", "speculative"), measured.sides, strict=True):
        study.verdict.compare(llm, name, batch, rounds, group)
    return summarise(measured, categories, [len(token_ids) for _, token_ids in prompts])
