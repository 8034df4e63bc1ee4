"""Finds the first operator of the model that produced a non-finite value.

The program of the step is run again, operator by operator. −∞ is ignored, because attention masks
contain it on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import Graph, Op
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.pipeline.runner import PipelineModule
from shardwright.runtime.regions.regions import Regions

_NEVER = 2**62


def origin(module: ParallelModule | PipelineModule, batch: Any, state: tuple[int, int]) -> str:
    """The operator that first produces NaN or ∞ for `batch` in this random state.

    It is a collective, because the collectives of the step run in it; every rank gets the result.
    """
    running = module._sw_running()
    place = {op.name: i for i, op in enumerate(running.graph.ops)}
    found = _Found(place)
    for name, parameter in module.named_parameters():
        found.note(-1, f"the parameter {name}", parameter)
    eager = torch.compiler.set_stance("force_eager")
    with torch.no_grad(), eager, _watched(running, found):
        module.set_random_state(state)
        module(**batch) if isinstance(batch, Mapping) else module(*batch)
    first = found.first
    if dist.is_initialized():
        every: list[tuple[int, str]] = [first] * dist.get_world_size()
        dist.all_gather_object(every, first)
        first = min(every)
    return first[1] if first[0] < _NEVER else "no operator alone: sums of finite numbers overflow"


@final
class _Found:
    """The earliest value that is no number, by the place of its operator in the graph."""

    def __init__(self, place: Mapping[str, int]) -> None:
        self.place = place
        self.first = (_NEVER, "")

    def note(self, at: int, text: str, value: Any) -> None:
        tensors = value if isinstance(value, tuple | list) else [value]
        if at < self.first[0] and any(_is_wrong(t) for t in tensors):
            self.first = (at, text)


class _Watching(fx.Interpreter):
    """Runs a program; of a region `ops` has the operators of the graph that it runs for."""

    def __init__(
        self, program: fx.GraphModule, found: _Found, ops: Callable[[], Sequence[Op]] | None
    ) -> None:
        super().__init__(program)
        self.found, self.ops = found, ops

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        op = n.meta.get("op")
        if op is not None and self.ops is not None:
            op = self.ops()[n.meta["place"]]
        if op is not None and op.name in self.found.place:
            where = f"{op.source.module or 'the model itself'} ({op.source})"
            self.found.note(self.found.place[op.name], f"{op.kind} in {where}", value)
        return value


@contextmanager
def _watched(module: ParallelModule | PipelineModule, found: _Found) -> Iterator[None]:
    """A context in which operators note in `found` the first result that is not finite."""
    programs = module.programs()
    every = [one for one in module.modules() if isinstance(one, Regions)]
    ops = {part: _running_ops(regions, module.graph) for regions in every for part in regions.parts}
    executed = [regions.executed for regions in every]
    for regions in every:  # compiled segments do not run operator by operator
        regions.executed = tuple(regions.parts)
    for program in programs:
        program.forward = _Watching(program, found, ops.get(program)).run
    try:
        yield
    finally:
        for program in programs:
            del program.forward
        for regions, before in zip(every, executed, strict=True):
            regions.executed = before


def _running_ops(regions: Regions, graph: Graph) -> Callable[[], Sequence[Op]]:
    """The operators that a region runs now; of a cast of a parameter one without a name."""
    cast = Op("", "", (), (), ())

    def running() -> Sequence[Op]:
        assert regions.running is not None, "a region is run for an instruction"
        return [graph.op.get(name, cast) for name in regions.running.ops]

    return running


def _is_wrong(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    tile = value.to_local() if isinstance(value, DTensor) else value
    return bool((tile.isnan() | tile.isposinf()).any())
