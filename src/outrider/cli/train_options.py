"""Options of `outrider train`, those of the target of `estimate` too, and how work is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import Device, ModelName, NumThreads
from outrider.errors import ConfigError
from outrider.threads import check_num_threads, set_num_threads

if TYPE_CHECKING:
    from outrider.target.load import LoadedModel

DataPath = Annotated[
    Path, typer.Option("--data", help="Directory that `outrider train data` wrote.")
]
FeaturesPath = Annotated[
    Path | None,
    typer.Option(
        "--features",
        help="Directory that `outrider train features` wrote; without it, features are computed "
        "on the way.",
    ),
]


@dataclass(slots=True)
class TargetOptions:
    """The model that drafts are for."""

    model: ModelName = None
    device: Device = "auto"
    num_threads: NumThreads = None

    def __post_init__(self) -> None:
        if self.num_threads is not None:
            check_num_threads(self.num_threads, "--num-threads")

    def set_threads(self) -> int:
        """Use the threads that are asked for; returns how many there are."""
        return set_num_threads(self.num_threads, "--num-threads")

    def find(self) -> "LoadedModel":
        """The model, found and read, not yet built."""
        from outrider.cli.progress import start_up
        from outrider.target.load import load_model

        with start_up():
            return load_model(self.model, "auto", self.device)


@contextmanager
def bar(what: str, total: float, done: float = 0) -> Iterator[Callable[..., None]]:
    """A bar on stderr with the time left, to be told of progress and, if it changes, of what."""
    from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

    from outrider.cli.console import messages

    console = messages()
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=total, completed=int(done))

        def advance(count: float, text: str = what) -> None:
            shown.update(task, advance=count, description=text)

        yield advance


def layer_numbers(text: str) -> tuple[int, ...]:
    """Layers such as 1,8,14: whole numbers from -1 (the embedding), each once."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < -1 or len(set(found)) < len(found):
        raise ConfigError(
            f"--layers must be different layers with commas between, from -1 (the embedding), as "
            f"1,8,14, got {text!r}"
        )
    return found


def check_layers(numbers: tuple[int, ...], loaded: "LoadedModel") -> None:
    """Refuse layers that the model does not have."""
    most = loaded.config["num_hidden_layers"] - 1
    if max(numbers) > most:
        given = ",".join(map(str, numbers))
        raise ConfigError(f"--layers must be from -1 to {most} for {loaded.name}, got {given}")


def about(num_threads: int, **more: Any) -> dict[str, Any]:
    """Provenance of what a command writes."""
    from outrider.bench.provenance import provenance

    return provenance(num_threads) | more
