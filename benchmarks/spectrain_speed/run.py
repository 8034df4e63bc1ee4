"""Time to train on the same number of samples, on hosts with slow links between them.

    python -m benchmarks.spectrain_speed.run           # about ten minutes on two idle cores
    python -m benchmarks.spectrain_speed.run --quick   # one case, few steps, nothing written

Needs what `benchmarks.hosts` needs. Both ways take the same mini-batches of 32 samples and make an
update for each. Times are those of steps in the middle of a run: the asynchronous pipeline is full
then, and what it takes to fill and to drain it, once a run, is left out. Hosts that outnumber the
cores share them, under both ways alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.hosts import HostsUnavailableError, Link, hosts

HERE = Path(__file__).parent
PROGRAM = "benchmarks.spectrain_speed.worker"
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Case:
    """One comparison, and how many times faster the asynchronous pipeline is to be."""

    model: str
    num_hosts: int
    bit_per_s: float
    against: str
    rounds: int
    steps: int  # of the other way in a round
    pipeline_steps: int
    target: float | None = None


CASES = (
    Case("vgg16", 4, 1e8, "ddp", rounds=3, steps=2, pipeline_steps=10, target=8.91),
    Case("vgg16", 4, 1e9, "ddp", rounds=3, steps=4, pipeline_steps=10, target=1.5),
    Case("transformer", 4, 1e8, "ddp", rounds=3, steps=3, pipeline_steps=16),
    Case("transformer", 4, 1e9, "ddp", rounds=3, steps=8, pipeline_steps=16),
    Case("vgg16", 2, 1e9, "1f1b", rounds=3, steps=6, pipeline_steps=8, target=1.2),
    Case("transformer", 2, 1e9, "1f1b", rounds=3, steps=10, pipeline_steps=12, target=1.2),
)


def measure(case: Case, *, quick: bool) -> dict[str, Any]:
    """Median seconds of a mini-batch either way, and their ratio in each round."""
    rounds, steps, pipeline_steps = case.rounds, case.steps, case.pipeline_steps
    if quick:
        rounds, steps, pipeline_steps = 1, 1, 3
    with hosts(case.num_hosts, Link(case.bit_per_s)) as cluster:
        outputs = cluster.torchrun(
            PROGRAM,
            *("--model", case.model, "--against", case.against, "--rounds", str(rounds)),
            *("--steps", str(steps), "--pipeline-steps", str(pipeline_steps)),
            timeout_seconds=TIMEOUT_SECONDS,
        )
    told = json.loads(next(line for line in outputs[0].splitlines() if line.startswith("{")))
    other, pipeline = told["seconds"][case.against], told["seconds"]["async"]
    ratios = [a / b for a, b in zip(other, pipeline, strict=True)]
    return {
        "model": case.model,
        "hosts": case.num_hosts,
        "gbit_per_s": case.bit_per_s / 1e9,
        "against": case.against,
        "parameter_bytes": told["parameter_bytes"],
        "seconds_other": statistics.median(other),
        "seconds_async": statistics.median(pipeline),
        "times_faster": statistics.median(ratios),
        "every_round": ratios,
        "target": case.target,
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    target = f"   (to be at least {row['target']})" if row["target"] else ""
    return (
        f"{row['model']:12} {row['hosts']} hosts, {row['gbit_per_s']:g} Gbit/s  {row['against']:5}"
        f" {row['seconds_other']:7.2f} s  async {row['seconds_async']:6.2f} s "
        f" {row['times_faster']:6.2f}x{target}"
    )


def main() -> None:
    """Measure every case, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("vgg16", "transformer"))
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    rows = []
    try:
        for case in CASES[-1:] if options.quick else CASES:
            if options.only in (None, case.model):
                rows.append(measure(case, quick=options.quick))
                print(line(rows[-1]), flush=True)
    except HostsUnavailableError as e:
        print(f"spectrain_speed: skipped, {e}", file=sys.stderr)
        return
    if not options.quick and options.only is None:
        claim = "asynchronous pipelines train faster than data parallelism where links are slow"
        record.write({"claim": claim, "rows": rows}, options.out, 0)


if __name__ == "__main__":
    main()
