"""Uniform strategies of a model of the zoo on four ranks: what its searched plan need not use.

A batch of four samples is taken, which four ranks can share. A strategy that the reduced model
has nothing for is refused: tensor parallelism without a weight that it splits evenly, experts of
a model without any.
"""

from dataclasses import dataclass

import torch

from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.decisions import Decisions
from shardwright.program.plan_decoder import read_plan
from tests.zoo.published import multiply_adds

STRATEGIES = ("dp_shard=4", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "dp_shard=4 ep=2")
SAMPLES, SHARED = 5, 4  # of reduced batches, and of what four ranks can share


@dataclass(frozen=True)
class Chosen:
    """A strategy's decisions, and the share of the multiply-adds that all of its axes split."""

    strategy: str
    decisions: Decisions
    split: float


def shared(batch):
    """The first samples of a batch; of tensors with several rows a sample, as many each."""
    return {
        key: value[: len(value) // SAMPLES * SHARED]
        if torch.is_tensor(value) and value.ndim and len(value) % SAMPLES == 0
        else value
        for key, value in batch.items()
    }


def chosen(one, machine="4xH100"):
    """What the strategies decide for a `Subject`; those that are refused are left out."""
    expansion = Expansion(one.narrow, preset(machine), "sgd")
    found = []
    for text in STRATEGIES:
        try:
            plan = expansion.plan(Strategy.parse(text))
        except StrategyError:
            continue
        decisions = read_plan(plan, one.narrow, one.analysis)
        found.append(Chosen(text, decisions, _split(one, decisions.tilings)))
    return found


def _split(one, tilings):
    """The share of all multiply-adds in operators that every axis splits."""
    known = {}
    work = {op.name: multiply_adds(one.narrow, op, one.analysis, known) for op in one.narrow.ops}
    split = sum(work[name] for name, tiling in tilings.items() if None not in tiling)
    return split / max(1, sum(work.values()))
