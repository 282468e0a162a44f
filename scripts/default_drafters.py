"""What the drafters that ship are made of: texts, stages of training, and what judges them.

Prompts come from one directory: gsm8k_train_prompts.jsonl to train on, and to judge by
gsm8k_test.jsonl, humaneval.jsonl and spec_bench.jsonl, whose first 80 lines are MT-bench. Lines
have `turns`, and perhaps `category`.
"""

from dataclasses import dataclass, field, replace

from outrider.training.recipe import Recipe, read_recipe

PROBLEMS = "gsm8k_train_prompts.jsonl"
TEMPERATURES = (0, 1)  # of evaluations


@dataclass(frozen=True, slots=True)
class Texts:
    """Answers of the target to school problems, and to prompts that it makes up itself."""

    name: str  # of their directory
    problems: range  # lines of PROBLEMS
    self_prompts: int
    seed: int
    features: str | None = None  # directory of what its layers computed; None: not kept
    beginnings: str | None = None  # file beside this one, of how its own prompts begin
    max_tokens: int = 384  # of an answer

    @property
    def prompts(self) -> str:
        """File of the problems as they are asked."""
        return f"math{self.name.removeprefix('data')}.jsonl"


@dataclass(frozen=True, slots=True)
class Stage:
    """One run; it starts from the drafter of the stage before."""

    run: str
    recipe: str
    texts: Texts
    settings: dict[str, str] = field(default_factory=dict)  # in place of the recipe's

    @property
    def changes(self) -> list[str]:
        """For `--set`."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def whole_recipe(self) -> Recipe:
        """The recipe with the settings in it."""
        return read_recipe(self.recipe, self.changes)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Prompts that no drafter was trained on."""

    name: str
    file: str
    categories: tuple[str, ...] = ()  # none: all
    limit: int = 80
    max_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is made."""

    drafters: dict[str, tuple[Stage, ...]]
    unseen: Texts  # confidences are calibrated on these
    evaluations: tuple[Evaluation, ...]


FIRST = Texts("data", range(4600), 10400, seed=1, features="features")
FRESH = Texts(
    "data2",
    range(4750, 5550),
    7000,
    seed=3,
    features="features2",
    beginnings="beginnings.jsonl",
)
UNSEEN = Texts("data_cal", range(4600, 4750), 350, seed=2)
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"),
    "humanities",
)
WHOLE = Plan(
    drafters={
        # The first stage knows school problems far better than chat (3.31 against 2.36 tokens per
        # step on held-out texts), so the second shows fewer of them (3.37 against 2.60), and the
        # third has new texts, of more kinds, and names half as many tokens more: 3.5 % of chat is
        # beyond them, not 6 %. Each starts at a lower rate.
        "dspark": (
            Stage("dspark", "dspark", FIRST),
            Stage(
                "dspark2",
                "dspark",
                FIRST,
                {
                    "training.steps": "4000",
                    "training.matrix_learning_rate": "5e-3",
                    "training.learning_rate": "1.2e-3",
                    "training.shares": "{math: 0.4}",
                },
            ),
            Stage(
                "dspark3",
                "dspark",
                FRESH,
                {
                    "drafter.draft_vocab_size": "12288",
                    "training.steps": "2000",
                    "training.matrix_learning_rate": "3e-3",
                    "training.learning_rate": "8e-4",
                },
            ),
        ),
        # The same texts and steps as the first stage above, to be compared with it.
        **{name: (Stage(name, name, FIRST),) for name in ("dflash", "eagle3")},
        "peagle": (Stage("peagle", "peagle", FIRST, {"training.steps": "1500"}),),
        "mtp": (Stage("mtp", "mtp", FIRST, {"training.steps": "1000"}),),
    },
    unseen=UNSEEN,
    evaluations=(
        Evaluation("gsm8k_test", "gsm8k_test.jsonl"),
        Evaluation("humaneval", "humaneval.jsonl"),
        Evaluation("mt_bench", "spec_bench.jsonl", MT_BENCH),
    ),
)
FEW_STEPS = {
    "training.steps": "3",
    "training.tokens_per_pack": "512",
    "training.anchors_per_pack": "64",
    "held_out": "4",
}


def tiny(plan: Plan) -> Plan:
    """The same path in minutes, to see that it leads to the end; its drafters are worth nothing."""
    return Plan(
        {
            name: tuple(
                replace(stage, texts=_few(stage.texts), settings=stage.settings | FEW_STEPS)
                for stage in stages
            )
            for name, stages in plan.drafters.items()
        },
        _few(plan.unseen),
        tuple(replace(each, limit=2, max_tokens=16) for each in plan.evaluations),
    )


def _few(texts: Texts) -> Texts:
    first = texts.problems.start
    return replace(texts, problems=range(first, first + 12), self_prompts=8, max_tokens=48)
