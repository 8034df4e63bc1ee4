"""The memory with which ranks build, load and save a model by shards.

    python -m benchmarks.starting.run

A model of 0.5 billion parameters, 2 GB in float32, is built on eight ranks from the function that
makes it, saved by all of them as safetensors files, and built again from these files. The peak of
a rank is the growth of its resident memory (VmHWM) after process groups are there and a small
model was built. It may be its share of the parameters, one bucket of 64 MiB, and 64 MB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import shardwright as sw
from benchmarks import record

SEED, RANKS = 0, 8
BUCKET, ALLOWED = 64 * 2**20, 64 * 10**6  # bytes that a rank may have besides its share
STRATEGIES = (f"dp_shard={RANKS}", "dp_shard=4 tp=2")
WAYS = ("built", "saved", "loaded")


class Model(nn.Module):
    """A vocabulary of 32,768, and layers of a feed-forward network of 2048 by 8192."""

    def __init__(self, layers: int, width: int = 2048, words: int = 32768) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for up, down in zip(self.up, self.down, strict=True):
            hidden = hidden + down(torch.relu(up(hidden)))
        return nn.functional.cross_entropy(self.head(hidden), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Thirty-two tokens."""
    return torch.arange(32), torch.arange(32)


def plan_of(layers: int, strategy: str, **sizes: int) -> sw.Plan:
    """The plan of a strategy, made on the meta device."""
    with torch.device("meta"):
        model = Model(layers, **sizes)
    return sw.price(sw.capture(model, batch()), f"{RANKS}xH100", strategy)


def memory(key: str) -> int:
    """Bytes of this process, as Linux counts them: `VmRSS`, or `VmHWM` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def grown(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of `work`, and by how much memory grew in it at the most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before, begin = memory("VmRSS"), time.process_time()
    result = work()
    found = {"peak_bytes": memory("VmHWM") - before, "cpu_seconds": time.process_time() - begin}
    return result, found


def rank(number: int, folder: str, layers: int, strategy: str) -> None:
    """One rank: builds, saves and loads; writes what it needed."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=RANKS)
    small = {"width": 64, "words": 64}
    sw.parallelize(lambda: Model(1, **small), plan_of(1, strategy, **small))
    plan, found = plan_of(layers, strategy), {}
    dist.barrier()
    torch.manual_seed(SEED)
    module, found["built"] = grown(lambda: sw.parallelize(lambda: Model(layers), plan))
    tiles = [p.to_local() for p in module.parameters()]
    share = sum(tile.numel() * tile.element_size() for tile in tiles)
    sums = [float(tile.double().sum()) for tile in tiles]
    _, found["saved"] = grown(lambda: module.save_pretrained(f"{folder}/saved"))
    del module, tiles
    module, found["loaded"] = grown(
        lambda: sw.parallelize(lambda: Model(layers), plan, weights=f"{folder}/saved")
    )
    again = [float(p.to_local().double().sum()) for p in module.parameters()]
    text = json.dumps({"share_bytes": share, "equal": sums == again, **found})
    Path(folder, f"rank{number}.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()


def measured(layers: int, strategies: tuple[str, ...]) -> dict[str, Any]:
    """For each strategy, what every rank needed and whether that was allowed."""
    with torch.device("meta"):
        size = sum(p.numel() * p.element_size() for p in Model(layers).parameters())
    rows: list[dict[str, Any]] = []
    for strategy in strategies:
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank, (folder, layers, strategy), nprocs=RANKS)
            ranks = [json.loads(Path(folder, f"rank{i}.json").read_text()) for i in range(RANKS)]
        over = {
            way: max(
                one[way]["peak_bytes"] - (0 if way == "saved" else one["share_bytes"])
                for one in ranks
            )
            for way in WAYS
        }
        rows.append({"strategy": strategy, "ranks": ranks, "over_share_bytes": over})
    worst = max(row["over_share_bytes"]["built"] for row in rows)
    return {
        "model_bytes": size,
        "allowed_over_share_bytes": BUCKET + ALLOWED,
        "worst_over_share_bytes": worst,
        "ok": worst <= BUCKET + ALLOWED,
        "rows": rows,
    }


def main() -> None:
    """Measure, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--strategy", action="append", help="instead of both")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    result = measured(options.layers, tuple(options.strategy or STRATEGIES))
    for row in result["rows"]:
        over = {way: f"{size / 1e6:.0f} MB" for way, size in row["over_share_bytes"].items()}
        print(row["strategy"], "over the share of a rank:", over)
    record.write({"ranks": RANKS, "layers": options.layers, **result}, options.out, SEED)


if __name__ == "__main__":
    main()
