"""What a step takes on local ranks that share a long sequence or a wide vocabulary.

    python -m benchmarks.wide.memory -o benchmarks/wide/memory.json

* `long`: a step of a small Llama on 32k tokens, by one process and by four that share the
  sequence. Each may allocate `ALLOWED` bytes more than it has once torch is there; the
  system enforces that (`RLIMIT_DATA`).
* `logits`: the most bytes of tensors that are alive during a step of a model that is next to
  nothing but logits, less what is there before, counted on one process and on several that share
  the vocabulary.

Rows that the file has of this commit are kept.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright as sw
from benchmarks import record
from benchmarks.wide.models import SEED, Built, longest
from benchmarks.wide.plans import line
from benchmarks.wide.ranks import on_ranks
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.parameters.peak_memory import metered

ALLOWED = 2**30  # bytes
SHARED_BY = (1, 2, 4)  # ranks that share the vocabulary
WORDS, SAMPLES, WIDTH = 50257, 128, 2


class Tied(nn.Module):
    """Next to its logits nothing is large."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(self.table(words), self.table.weight)
        return nn.functional.cross_entropy(logits, labels)


def wide() -> Built:
    """A table of 50,257 words that is also the head."""
    torch.manual_seed(SEED)
    words = torch.randint(WORDS, (SAMPLES,))
    return Tied(), {"words": words, "labels": words.roll(1)}


def long() -> Iterator[dict[str, Any]]:
    """Whether one process, and each of four that share the sequence, does with `ALLOWED` bytes."""
    model, batch = longest()
    graph = sw.capture(model, (), batch)
    for devices in (1, 4):
        plan = sw.search(graph, sw.Machine.preset(f"{devices}xcpu")).smallest()
        outcome = on_ranks(devices, _limited, plan_to_json(plan))
        yield {
            "tokens": batch["input_ids"].shape[1],
            "allowed_bytes": ALLOWED,
            "devices": devices,
            "plan": line(plan, ("sequence",)),
            "outcome": outcome,
        }


def _limited(text: str) -> str:
    """One step within the limit, and what came of it."""
    plan = sw.Plan.from_json(text)
    module, batch = longest()
    parallel = sw.parallelize(module, plan, tune_host=record.TUNE_HOST)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    resource.setrlimit(resource.RLIMIT_DATA, (_held() + ALLOWED,) * 2)
    started = time.perf_counter()
    try:
        loss = float(parallel.train_step(optimizer, batch))
    except (RuntimeError, MemoryError) as e:
        if plan.devices > 1 or not (isinstance(e, MemoryError) or "alloc" in str(e)):
            raise  # others would wait for this one
        return "out of memory"
    return f"ran in {time.perf_counter() - started:.1f} s, loss {loss:.4f}"


def _held() -> int:
    """Bytes of data that this process has, as `RLIMIT_DATA` counts them."""
    (found,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x)
    return int(found.split()[1]) * 1024


def logits() -> Iterator[dict[str, Any]]:
    """What is counted on ranks that share the vocabulary."""
    model, batch = wide()
    graph = sw.capture(model, (), batch)
    for devices in SHARED_BY:
        mesh = [f"mesh tp={devices}"] if devices > 1 else []
        machine = sw.Machine.preset(f"{devices}xcpu")
        plan = sw.search(graph, machine, constraints=mesh).smallest()
        yield {
            "devices": devices,
            "logits_bytes": 4 * WORDS * SAMPLES,
            "plan": line(plan, ("vocabulary", "classes")),
            "counted_bytes": on_ranks(devices, _counted, plan_to_json(plan)),
        }


def _counted(text: str) -> int:
    """Bytes of tensors at the peak of a second step, less those that are there before it."""
    model, batch = wide()
    module = sw.parallelize(model, sw.Plan.from_json(text), tune_host=record.TUNE_HOST)

    def step() -> None:
        module(**batch).backward()

    step()
    module.zero_grad(set_to_none=True)
    held = [*module.parameters(), *batch.values()]
    _, most = metered(step, held, torch.device("cpu"))
    _, before = metered(lambda: None, held, torch.device("cpu"))
    return most - before


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {"long": long, "logits": logits}


def main() -> None:
    """Measure what is asked for, print a line each, write the result after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--fresh", action="store_true", help="measure again what the file has")
    options = parser.parse_args()
    rows = [] if options.fresh else record.rows_of_this_commit(options.output)
    for part in options.only:
        if part in {row["part"] for row in rows}:
            continue
        for found in PARTS[part]():
            rows.append({"part": part, "commit": record.commit(), **found})
            print(rows[-1], flush=True)
        record.write({"rows": rows}, options.output, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
