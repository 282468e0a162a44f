"""`outrider bench peers`: the same prompts through other engines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.bench_options import FORMATS, ReportOptions, cpu_threads, numbers
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.peers.compare import Comparison
    from outrider.bench.peers.spec import Peer


def peers(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="As everywhere; llama.cpp needs one from a GGUF file."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Only this one (and outrider); may be repeated. Default: all."),
    ] = None,
    install: Annotated[
        list[str] | None,
        typer.Option(
            help="First make this peer's environment, some minutes and up to 4 GB; may be"
            " repeated, 'all' for all."
        ),
    ] = None,
    workload: Annotated[
        list[Path] | None, typer.Option("--workload", "-w", help="JSONL, as for `bench`.")
    ] = None,
    category: Annotated[
        list[str] | None, typer.Option(help="Only this kind; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.", metavar="N,N,…")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="Everybody takes turns so often.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 128,
    stop_at_eos: Annotated[
        bool,
        typer.Option("--stop-at-eos", help="Let answers end where the model ends them."),
    ] = False,
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("results/bench-peers"),
    report: Annotated[str, typer.Option(help="html, markdown or none.")] = "html",
) -> None:
    """Run the same prompts through other engines, each in its own environment.

    Everybody loads first, then all take turns call by call; who waits is stopped and takes no
    core. A peer that is not installed is left out with a sentence.
    """
    from outrider.bench.peers.compare import PeerSettings, compare_peers
    from outrider.bench.peers.spec import OURSELVES, find_peer
    from outrider.bench.peers.spec import peers as all_peers
    from outrider.bench.provenance import provenance
    from outrider.bench.workload import read_workload

    names = [name for name in all_peers() if name != OURSELVES]
    chosen = [find_peer(name) for name in (OURSELVES, *(peer or names))]
    options = ReportOptions(output, report)
    options.check()
    settings = PeerSettings(
        batches=tuple(numbers(batch, int, "--batch")),
        rounds=rounds,
        max_tokens=max_tokens,
        ignore_eos=not stop_at_eos,
        num_threads=num_threads or cpu_threads(),
    )
    prompts = read_workload(workload or (), category or (), limit)
    wanted = names if install and "all" in install else install or []
    _install([find_peer(name) for name in wanted])
    about = provenance(settings.num_threads)
    with _peer_progress() as (show, done):
        result = compare_peers(chosen, model, prompts, settings, show, done)
    result.provenance = about
    _write_peers(result, options)


def _install(wanted: "Sequence[Peer]") -> None:
    """Make environments one after the other; one that fails does not keep the others."""
    from outrider.bench.peers.install import install
    from outrider.cli.console import messages

    console = messages()
    for peer in wanted:
        with console.status("") as status:
            try:
                install(peer, status.update)
            except ConfigError as error:
                console.print(f"{peer.title} could not be installed: {error}")


@contextmanager
def _peer_progress() -> "Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]":
    """A bar on stderr: what is being started, then how many calls are finished."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from outrider.cli.console import messages

    console = messages()
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("peers", total=None)
        yield (
            lambda text: bar.update(task, description=text),
            lambda done, total: bar.update(task, description="calls", completed=done, total=total),
        )


def _write_peers(result: "Comparison", options: ReportOptions) -> None:
    import json

    from outrider.bench.peers.compare import as_json
    from outrider.bench.peers.report import headline, ratios, speeds, write_peer_report
    from outrider.bench.provenance import write_whole
    from outrider.bench.terminal import show_table
    from outrider.cli.console import messages, output

    written = [options.beside(".json")]
    write_whole(written[0], json.dumps(as_json(result), ensure_ascii=False))
    if options.report != "none":
        written.append(options.beside(FORMATS[options.report]))
        write_peer_report(result, written[-1])
    console = output()
    console.print(headline(result), style="bold")
    for table in (speeds(result), ratios(result)):
        if table is not None:
            show_table(console, table)
    for note in result.notes:
        console.print(f"· {note}")
    messages().print("\nwritten: " + ", ".join(map(str, written)), style="dim")
