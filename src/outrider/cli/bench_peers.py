"""`outrider bench peers`: the same prompts through other engines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.bench_options import MOST_REQUESTS, ReportOptions, cpu_threads, numbers
from outrider.cli.interrupts import already_told
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.peers.compare import Comparison, PeerSettings
    from outrider.bench.peers.spec import Peer
    from outrider.bench.workload import Workload


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
    from outrider.bench.peers.compare import PeerSettings
    from outrider.bench.peers.spec import OURSELVES, find_peers
    from outrider.bench.peers.spec import peers as all_peers
    from outrider.bench.workload import read_workload

    others = [name for name in all_peers() if name != OURSELVES]
    chosen = find_peers(peer or others)
    wanted = find_peers([one for name in install or () for one in _meant(name, others)])
    options = ReportOptions(output, report)
    options.check()
    settings = PeerSettings(
        batches=tuple(numbers(batch, int, "--batch", most=MOST_REQUESTS)),
        rounds=rounds,
        max_tokens=max_tokens,
        ignore_eos=not stop_at_eos,
        num_threads=_threads(num_threads),
    )
    prompts = read_workload(workload or (), category or (), limit)
    _install(wanted)
    result = _measure(chosen, model, prompts, settings)
    _show_and_write(result, options)
    if result.interrupted is not None:
        raise already_told(result.interrupted)
    _complain(result.without_figures(chosen), len(chosen), named=bool(peer))


def _meant(name: str, others: list[str]) -> list[str]:
    return others if name == "all" else [name]


def _threads(asked: int | None) -> int:
    """As many as asked for; else as many as torch uses, within the cores there are."""
    from outrider.bench.peers.cores import cores_for, our_cores

    return len(cores_for(asked or min(cpu_threads(), len(our_cores()))))


def _measure(
    chosen: "Sequence[Peer]", model: str | None, prompts: "Workload", settings: "PeerSettings"
) -> "Comparison":
    from outrider.bench.peers.compare import compare_peers
    from outrider.bench.peers.spec import OURSELVES
    from outrider.bench.peers.spec import peers as all_peers
    from outrider.bench.provenance import provenance
    from outrider.cli.console import messages

    about = provenance(settings.num_threads)
    sides = [all_peers()[OURSELVES], *chosen]
    try:
        with _peer_progress() as (show, done):
            result = compare_peers(sides, model, prompts, settings, show, done)
    except (KeyboardInterrupt, SystemExit) as end:
        messages().print("outrider: interrupted: no round was finished, nothing was written")
        raise already_told(end) from None
    result.provenance = about
    return result


def _complain(missing: "Sequence[Peer]", num_chosen: int, named: bool) -> None:
    """End with a failure where peers were asked for by name, or any, and gave nothing."""
    from outrider.bench.peers.process import PeerFailed

    if missing and (named or len(missing) == num_chosen):
        names = ", ".join(peer.title for peer in missing)
        raise PeerFailed(f"no figures of {names}: the reasons are above")


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
    """On stderr what is being started, then how far the calls are: a bar, or lines in a file."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from outrider.cli.console import messages

    console = messages()
    if not console.is_terminal:
        yield (
            lambda text: console.print(f"outrider: {text}", soft_wrap=True),
            lambda _done, _total: None,
        )
        return
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("peers", total=None)
        yield (
            lambda text: bar.update(task, description=text),
            lambda done, total: bar.update(task, description="calls", completed=done, total=total),
        )


def _show_and_write(result: "Comparison", options: ReportOptions) -> None:
    """The terminal comes first, files in any case: neither shall take the figures with it."""
    try:
        _show(result)
    finally:
        _write(result, options)


def _show(result: "Comparison") -> None:
    from outrider.bench.peers.report import headline, ratios, remarks, speeds
    from outrider.bench.terminal import show_table
    from outrider.cli.console import output

    console = output()
    if result.label:
        console.print(result.label, style="bold yellow")
    console.print(headline(result), style="bold")
    for table in (speeds(result), ratios(result)):
        if table is not None:
            show_table(console, table)
    for note in remarks(result):
        console.print(f"· {note}")


def _write(result: "Comparison", options: ReportOptions) -> None:
    import json

    from outrider.bench.peers.compare import as_json
    from outrider.bench.peers.report import write_peer_report
    from outrider.bench.provenance import write_whole
    from outrider.cli.console import messages

    try:
        write_whole(options.files[0], json.dumps(as_json(result), ensure_ascii=False))
        for path in options.files[1:]:
            write_peer_report(result, path)
    except ConfigError as error:
        raise ConfigError(f"{error}; the results are shown above") from error
    messages().print("\nwritten: " + ", ".join(map(str, options.files)), style="dim")
