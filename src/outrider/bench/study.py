"""A whole bench: what is measured in which order, and everything that came of it."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outrider.bench.configs import PLAIN, naming
from outrider.bench.contexts import context_prompts
from outrider.bench.forward import ForwardCost, forward_cost
from outrider.bench.lossless import Verdict
from outrider.bench.run import Measured, Prompts, drive, measure
from outrider.bench.speed_only import FORCED, LABEL, ForcedSource, random_prompts
from outrider.bench.summary import Measurement, summarise
from outrider.bench.workload import Workload, check_room, encoded
from outrider.cli.comparison import twin
from outrider.sampling_params import SamplingParams

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.target.base import Target

FORMAT = 2  # of the JSON; since 2 a measurement is of one `config`, which has a name
SPECULATIVE = "speculative"  # the side of a config that is alone


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
    configs: dict[str, Any]  # speculative configs by name
    settings: Settings
    workload: dict[str, Any]
    label: str = ""  # what must stand above every number, where it is not a real model
    measurements: list[Measurement] = field(default_factory=list)  # by batch size, then config
    contexts: list[Measurement] = field(default_factory=list)  # by length, then config
    forward: ForwardCost | None = None
    verdict: Verdict = field(default_factory=Verdict)
    provenance: dict[str, Any] = field(default_factory=dict)
    num_cases: int = 0  # batch sizes, context lengths, acceptances: what is measured on its own
    stopped: BaseException | None = field(default=None, repr=False)  # what ended it early

    @property
    def has_several(self) -> bool:
        """Whether configs have to be told apart."""
        return len(self.configs) > 1

    def side(self, config: str) -> str:
        """What the side of a config is called."""
        return config if self.has_several else SPECULATIVE

    def cases(self, measurements: list[Measurement]) -> list[list[Measurement]]:
        """Measurements of all configs that took turns, together."""
        size = len(self.configs)
        return [measurements[i : i + size] for i in range(0, len(measurements), size)]

    @property
    def incomplete(self) -> str:
        """What is missing, in one sentence; "" where everything was measured."""
        if self.stopped is None:
            return ""
        of_user = isinstance(self.stopped, KeyboardInterrupt | SystemExit)
        why = "interrupted" if of_user else f"{type(self.stopped).__name__}: {self.stopped}"
        every = [*self.cases(self.measurements), *self.cases(self.contexts)]
        planned = self.settings.rounds * self.num_cases
        whole = sum(len(case[0].rounds) for case in every)
        return f"INCOMPLETE ({why}): {whole} of {planned} rounds were measured."

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "label": self.label,
            "complete": self.stopped is None,
            "incomplete": self.incomplete,
            "provenance": self.provenance,
            "target": self.target,
            "configs": self.configs,
            **(
                {}
                if self.has_several
                else {"speculative_config": next(iter(self.configs.values()))}
            ),
            "settings": asdict(self.settings),
            "workload": self.workload,
            "lossless": self.verdict.as_json(),
            "answers": self.verdict.references(),
            "measurements": [asdict(one) for one in self.measurements],
            "contexts": [asdict(one) for one in self.contexts],
            "forward": None if self.forward is None else asdict(self.forward),
        }


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured on its own: prompts at one batch size."""

    prompts: Prompts
    categories: Sequence[str]  # by prompt index
    batch: int
    group: Any  # prompts of one group and index are the same
    about: dict[str, Any]  # what sets its `Measurement` apart


def bench_model(
    llm: "LLM",
    configs: Mapping[str, Any],
    workload: Workload,
    settings: Settings,
    done: Callable[[int], None] = lambda _: None,
) -> Study:
    """Measure a model with its sources over a workload, by batch size and by context length.

    Args:
        llm: the model; its own sources are not used.
        configs: speculative configs by name, whose sources are made anew for every round.
        done: called with the number of answers that were just finished.

    Raises:
        ConfigError: a config whose sources cannot be made for this model; says which.
    """
    # Before anything is measured, so that a length that does not fit is refused at once.
    check_room(llm.engine.max_model_len, settings.max_tokens, contexts=settings.contexts)
    prompts = encoded(llm, workload, settings.max_tokens, settings.input_tokens)
    sweep = [(length, *context_prompts(llm, length)) for length in settings.contexts]
    _try_out(llm, configs, max(settings.batches))
    study = Study(describe(llm.target), dict(configs), settings, workload.as_json())
    categories = [prompt.category for prompt in workload.prompts]
    study.num_cases = len(settings.batches) + len(sweep)
    with _keeping(study):
        study.forward = forward_cost(llm)
        for batch in settings.batches:
            case = Case(prompts, categories, batch, "workload", {})
            _measure(llm, configs, case, study, study.measurements, done)
        for length, kinds, texts in sweep:
            case = Case(texts, kinds, 1, length, {"context_tokens": length})
            _measure(llm, configs, case, study, study.contexts, done)
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
    configs = {FORCED: config}
    study = Study(describe(llm.target), configs, settings, about | {"notes": []}, LABEL)
    study.num_cases = len(settings.batches) * len(acceptance)
    kinds = ["random"] * len(prompts)
    with _keeping(study):
        study.forward = forward_cost(llm)
        size = len(prompts)
        plain = drive(twin(llm, None, max_num_seqs=size), prompts, settings.params(), size)
        answers = {answer.index: answer.token_ids for answer in plain.answers}
        for batch in settings.batches:
            for rate in acceptance:
                source = ForcedSource(answers, rate, num_draft_tokens, settings.seed)
                case = Case(prompts[:batch], kinds, batch, "random", {"forced_acceptance": rate})
                _measure(llm, {FORCED: source}, case, study, study.measurements, done)
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


def num_answers(
    settings: Settings, num_configs: int, num_prompts: int, num_sweep_prompts: int = 4
) -> int:
    """How many answers a bench of a model decodes, for a progress bar."""
    per_round = len(settings.batches) * num_prompts + len(settings.contexts) * num_sweep_prompts
    return (1 + num_configs) * settings.rounds * per_round


def _try_out(llm: "LLM", configs: Mapping[str, Any], batch: int) -> None:
    """Make the sources of every config once, one after the other."""
    for name, config in configs.items():
        with naming(name):
            twin(llm, config, max_num_seqs=batch)
    gc.collect()  # errors caught during first imports may keep an engine, with weights and KV


def _measure(
    llm: "LLM",
    configs: Mapping[str, Any],
    case: Case,
    study: Study,
    into: list[Measurement],
    done: Callable[[int], None],
) -> None:
    """Measure one case; what ends it early leaves its whole rounds behind."""
    sides = [None, *configs.values()]
    measured = Measured(case.batch, [[] for _ in sides])
    try:
        measure(
            [lambda size, config=config: twin(llm, config, max_num_seqs=size) for config in sides],
            case.prompts,
            study.settings.params(),
            case.batch,
            study.settings.rounds,
            done,
            measured,
        )
    finally:
        if measured.keep_whole_rounds():
            names = [PLAIN, *map(study.side, configs)]
            for name, rounds in zip(names, measured.sides, strict=True):
                study.verdict.compare(llm, name, case.batch, rounds, case.group)
            lengths = [len(token_ids) for _, token_ids in case.prompts]
            for side, name in enumerate(configs, 1):
                one = summarise(measured, case.categories, lengths, name, side)
                into.append(replace(one, **case.about))


@contextmanager
def _keeping(study: Study) -> Iterator[None]:
    """Whatever ends the body early ends up in the study, if a round was finished before."""
    try:
        yield
    except BaseException as stop:
        if not study.measurements:
            raise
        study.stopped = stop
