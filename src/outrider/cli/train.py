"""`outrider train`: from a model to a drafter of its own."""

import difflib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.train_data import data as data
from outrider.cli.train_eval import calibrate as calibrate
from outrider.cli.train_eval import evaluate
from outrider.cli.train_features import features as features
from outrider.cli.train_options import DataPath, FeaturesPath, TargetOptions, about
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.training.recipe import Recipe
    from outrider.training.run import Pace, Run

SAVE_MINUTES = 5.0
eval = evaluate


def train(context: typer.Context) -> None:
    """Train a drafter for your own model: data, features, training, evaluation.

    `data` has the model answer prompts, `features` keeps what it computes on its answers, `run`
    trains a drafter by a recipe, `eval` measures what the engine accepts of it; `calibrate` sets
    how sure a drafter is of its tokens, which a run does at its end too.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(
    target: TargetOptions,
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A packaged recipe, or a .yaml or .py file.")
    ],
    data: DataPath,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Directory of the run; one that is there goes on."),
    ],
    features: FeaturesPath = None,
    steps: Annotated[int | None, typer.Option(help="In place of the recipe's.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a value of the recipe, as training.learning_rate=3e-4; may be repeated.",
        ),
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from this drafter, or that of another run.")
    ] = None,
    report_every: Annotated[int, typer.Option(min=1, help="Steps between reports.")] = 20,
    held_out_every: Annotated[
        int, typer.Option(min=1, help="Steps between looks at held-out texts.")
    ] = 100,
    save_minutes: Annotated[
        float, typer.Option(min=0, help="Minutes between checkpoints.")
    ] = SAVE_MINUTES,
) -> None:
    """Train a drafter by a recipe; the same command goes on where it was stopped.

    Several processes share the work under
    `torchrun --nproc-per-node N --no-python outrider train run …`.
    """
    from outrider.training.hold import held
    from outrider.training.run import Inputs, Pace, Run, drafter_at
    from outrider.training.world import join_world, leave_world

    asked = [*(changes or []), *([] if steps is None else [f"training.steps={steps}"])]
    chosen = _recipe(recipe, asked)
    start = None if init_from is None else drafter_at(init_from)
    world, device = join_world(target.device)
    try:
        threads = target.set_threads()
        inputs = Inputs(data, output, features, target.model, device, start)
        with held(output) if world.is_first else nullcontext():
            started = _starting(chosen, inputs, world, Run)
            provenance = about(threads, seed=chosen.seed)
            _train(started, Pace(report_every, held_out_every, 60 * save_minutes), provenance)
    finally:
        leave_world()


def _recipe(name: str, changes: list[str]) -> "Recipe":
    """What the argument names; a name that is nearly one of the packaged recipes is told."""
    from outrider.training.recipe import packaged_recipes, read_recipe

    try:
        return read_recipe(name, changes)
    except ConfigError as error:
        near = difflib.get_close_matches(name, packaged_recipes(), n=1)
        if not near or name in near or Path(name).exists():  # then its content is at fault
            raise
        raise ConfigError(f"{error}; did you mean {near[0]!r}?") from error


def _starting(recipe: Any, inputs: Any, world: Any, make: Any) -> "Run":
    """The run, loaded, and a line that says what it is."""
    from outrider.cli.console import messages
    from outrider.cli.progress import start_up

    with start_up(quiet=not world.is_first):
        run = make(recipe, inputs, world)
    if world.is_first:
        count = sum(p.numel() for p in run.drafter.parameters())
        trainer = run.trainer
        going_on = f", going on at step {trainer.step:,}" if trainer.step else ""
        messages().print(
            f"{recipe.drafter.algorithm}: {count:,} parameters, {run.num_texts:,} texts, "
            f"{trainer.num_steps:,} steps of {run.steps_per_epoch:,} per epoch{going_on}",
            soft_wrap=True,
        )
    return run


def _train(run: "Run", pace: "Pace", provenance: dict[str, Any]) -> None:
    from outrider.cli.console import messages, output
    from outrider.cli.train_show import Show, print_result
    from outrider.training.world import StopSignals

    with StopSignals() as stop:
        with Show(run.trainer.num_steps, run.trainer.step, run.world.is_first) as show:
            for moment in run.steps(pace, stop):
                show.moment(moment)
        if stop.number is not None and run.trainer.step < run.trainer.num_steps:
            if run.world.is_first:
                messages().print(
                    f"stopped at step {run.trainer.step:,} and saved; the same command goes on"
                )
            raise SystemExit(128 + stop.number)
    if not run.world.is_first:
        return
    done = run.finished()
    if done is None:
        print_result(output(), run.finish(provenance))
    else:
        output().print(f"the run has ended, its drafter is {done}", soft_wrap=True)
