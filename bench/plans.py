"""Plans on recorded traces: what a policy would have brought, on any cost curve, at any batch.

    python bench/plans.py record trace.jsonl --source '{"method": "dspark", "model": "run/drafter"}'
    python bench/plans.py run trace.jsonl --batch 1 8 256
    python bench/plans.py run synthetic --curve gpu --batch 256

`record` decodes the prompts plainly and asks every source at every place. `run` decodes the trace
again with each source alone at its best fixed length, with the planner, plainly, and with an
oracle, a plan that knows which drafts are right; seconds are those of a cost curve: of this machine
(measured by `record`, kept beside the trace) or of a large GPU. The last line is {"<batch>":
{"planner": …, "best_single": …, "plain": …, "oracle": …, "plan_ms": …}} in tokens per simulated
second; plan_ms is the planner's own time per step, on this machine.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import HERE, count

from outrider import LLM, SamplingParams
from outrider.bench.drive import drive
from outrider.bench.workload import DEFAULT_WORKLOAD, encoded, read_workload
from outrider.policy.cost import CostModel, Surface
from outrider.policy.fixed import FixedLength
from outrider.policy.measure import surface_of
from outrider.policy.oracle import Oracle
from outrider.policy.planner import Planner
from outrider.policy.simulate import MakePolicy, Simulated, by_id, gpu_like, simulate
from outrider.policy.traces import Recorder, Trace, read_trace, synthetic
from outrider.policy.view import Policy

LENGTHS = (1, 2, 3, 4, 6, 8, 16)


def record(given: argparse.Namespace) -> None:
    """Write a trace and, beside it, what forwards cost on this machine."""
    recorder = Recorder()
    sources = [{"method": "lookup"}, *map(json.loads, given.source)]
    llm = LLM(given.model, speculative_config=sources, policy=recorder, max_num_seqs=8)
    workload = read_workload(given.workload or [DEFAULT_WORKLOAD, HERE / "maths.jsonl"])
    prompts = encoded(llm, workload, given.max_tokens)
    drive(llm, prompts, SamplingParams(temperature=0, max_tokens=given.max_tokens), 8)
    trace = recorder.trace({str(index): len(ids) for index, ids in prompts})
    for (index, _), request in zip(prompts, trace.requests, strict=True):
        request.kind = workload.prompts[index].category
    trace.write(given.trace)
    engine = llm.engine
    surface = surface_of(engine.target, engine.arena.num_pages, engine.scheduler.max_rows)
    _curve_path(given.trace).write_text(json.dumps(asdict(surface)) + "\n")
    print(f"{len(trace.requests)} texts, {sum(len(r.drafts) for r in trace.requests)} places")


def run(given: argparse.Namespace) -> None:
    """Try plans on a trace."""
    last: dict[str, Any] = {}
    for batch in given.batch:
        trace = _trace(given, batch)
        surface = _surface(given)

        def rate(make: MakePolicy, *names: str, trace: Trace = trace) -> Simulated:
            return simulate(_only(trace, names), make, batch, surface, given.max_rows)  # noqa: B023

        names = sorted({name for r in trace.requests for place in r.drafts for name in place})
        plain = rate(_fixed(0)).tokens_per_second
        singles = {
            (name, length): rate(_fixed(length), name).tokens_per_second
            for name in names
            for length in LENGTHS
        }
        name, length = best = max(singles, key=lambda pair: singles[pair])
        planner = rate(_informed(surface, Planner), *names)
        knowing = partial(Oracle, requests=by_id(trace), calls=trace.calls)
        oracle = rate(_informed(surface, knowing), *names).tokens_per_second
        print(
            f"batch {batch}: plain {plain:.0f}, {name} with {length} tokens {singles[best]:.0f}, "
            f"planner {planner.tokens_per_second:.0f} tokens/s "
            f"({planner.tokens_per_second / singles[best]:.2f}x, "
            f"{planner.tokens_per_second / plain:.2f}x of plain), accepted {planner.by_source}, "
            f"oracle {oracle:.0f} ({oracle / singles[best]:.2f}x)"
        )
        last[str(batch)] = {
            "planner": round(planner.tokens_per_second, 1),
            "best_single": round(singles[best], 1),
            "plain": round(plain, 1),
            "oracle": round(oracle, 1),
            "plan_ms": round(1e3 * planner.planner_seconds_per_step, 3),
        }
    print(json.dumps(last))


def _fixed(length: int) -> Callable[[CostModel], FixedLength]:
    return lambda cost: FixedLength(length)


def _informed(surface: Surface, policy: MakePolicy) -> MakePolicy:
    """A plan that knows the curve, as one that has measured it."""

    def make(cost: CostModel) -> Policy:
        cost.use(surface)
        return policy(cost)

    return make


def _trace(given: argparse.Namespace, batch: int) -> Trace:
    """With enough requests to keep the batch full for a while."""
    wanted = given.fill * batch
    if given.trace == Path("synthetic"):
        return synthetic(wanted, 64)
    trace = read_trace(given.trace)
    times = -(-wanted // len(trace.requests))
    kinds = given.with_kinds
    trace.requests = [r if kinds else replace(r, kind="") for r in trace.requests * times]
    return trace


def _only(trace: Trace, names: tuple[str, ...]) -> Trace:
    requests = [
        replace(r, drafts=[{n: d for n, d in place.items() if n in names} for place in r.drafts])
        for r in trace.requests
    ]
    return Trace(requests, trace.calls)


def _surface(given: argparse.Namespace) -> Surface:
    if given.curve == "gpu":
        return gpu_like(given.max_rows)
    found = json.loads(_curve_path(given.trace).read_text())
    return Surface(**{name: tuple(values) for name, values in found.items()})


def _curve_path(trace: Path) -> Path:
    return trace.with_suffix(".costs.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("record", help="write a trace")
    part.add_argument("trace", type=Path)
    part.add_argument("--model", help="default: the default target")
    part.add_argument("--source", action="append", default=[], help="JSON of one more source")
    part.add_argument("--workload", nargs="+", type=Path, help="JSONL of prompts instead")
    part.add_argument("--max-tokens", type=count, default=96)
    part.set_defaults(function=record)
    part = parts.add_parser("run", help="try plans on a trace")
    part.add_argument("trace", type=Path, help="a file of `record`, or the word synthetic")
    part.add_argument("--curve", choices=("own", "gpu"), default="own")
    part.add_argument("--batch", nargs="+", type=count, default=(1, 4, 8, 16))
    part.add_argument("--fill", type=count, default=8, help="requests per place of a batch")
    part.add_argument("--max-rows", type=count, default=512, help="of a forward")
    part.add_argument("--with-kinds", action="store_true", help="plans know what a request is")
    part.set_defaults(function=run)
    given = parser.parse_args()
    given.function(given)


if __name__ == "__main__":
    main()
