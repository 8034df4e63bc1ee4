"""Plans whose steps are not one whole batch: micro-batches, pipeline stages, sharded replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.estimates.places import Local
from benchmarks.estimates.subjects import Subject, priced
from shardwright.machine.model import Machine

# Samples of a step by model: as many as ranks times micro-batches, or more.
BATCHES = {"gpt2": 8, "llama": 8, "vit": 16, "mlp": 256}


@dataclass(frozen=True)
class Kind:
    """Strategies by title, whose steps of each of the models are taken in turn at one place."""

    place: Local
    models: Sequence[str]
    strategies: Mapping[str, str]

    def subject(self, name: str, machine: Machine, seconds: float) -> Subject:
        """One of the models with the plans of the strategies (`subjects.priced`)."""
        return priced(self.strategies, BATCHES[name], name, machine, seconds)


KINDS = (
    Kind(
        Local("one host, steps in parts"),
        tuple(BATCHES),
        {
            "4 micro-batches, data parallel": "dp_replicate=2 mb=4",
            "4 micro-batches, fully sharded": "dp_shard=2 mb=4",
            "2 stages, 1F1B": "pp=2 mb=4",
        },
    ),
    Kind(
        Local("one host, four ranks on two cores", 4),
        ("gpt2", "llama", "mlp"),
        {
            "HSDP": "dp_replicate=2 dp_shard=2",
            "HSDP, 2 micro-batches": "dp_replicate=2 dp_shard=2 mb=2",
        },
    ),
)
