"""The forms of a graph that strategies with other losses are priced on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from shardwright.ir.graph import Graph
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.fields import chunks_of
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.memory_limits import loss_forms
from shardwright.planner.plans.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier.priced_frontier import SharedSpaces
from shardwright.rules.operators.loss_chunks import LossChunksError, with_loss_chunks


@final
@dataclass(frozen=True)
class PricedForm:
    """A graph with its loss whole or in chunks, on one machine.

    Attributes:
        graph: the graph.
        spaces: bounds and spaces of its strategies.
        tracer: traces the memory of single operator calls.
    """

    graph: Graph
    spaces: SharedSpaces
    tracer: OpTracer

    @property
    def expansion(self) -> Expansion:
        """Expands strategies of this graph."""
        return self.spaces.expansion

    @cached_property
    def refinement(self) -> Refinement:
        """Settles plans of this graph."""
        one = self.expansion
        return Refinement(self.graph, one.machine, one.optimizer, self.tracer, one.sources.analysis)


@final
class PricedForms:
    """The forms of one graph, each made once."""

    def __init__(self, graph: Graph, machine: Machine, optimizer: str, tracer: OpTracer) -> None:
        self._graph, self._machine, self._optimizer = graph, machine, optimizer
        self._tracer = tracer
        self._known: dict[int, PricedForm] = {}

    @property
    def given(self) -> PricedForm:
        """The form of the graph as it was captured."""
        return self._form(self._graph.numerics.loss_chunks)

    @cached_property
    def useful_chunks(self) -> int | None:
        """Chunks in which large logits take a small part of a device's memory; None: need none."""
        counts = [
            form.numerics.loss_chunks
            for form in loss_forms(self._graph, self._machine, PlanOptions())
        ]
        return max(counts) if max(counts) > 1 else None

    def of(self, strategy: Strategy) -> PricedForm:
        """The form of a strategy's loss; raises `StrategyError` if the model does not permit it."""
        count = chunks_of(strategy.loss)
        if count is None:
            return self.given
        try:
            return self._form(count)
        except LossChunksError as e:
            raise StrategyError(f"loss={strategy.loss}: {e}") from e

    def _form(self, count: int) -> PricedForm:
        if count not in self._known:
            now = self._graph.numerics.loss_chunks
            graph = self._graph if count == now else with_loss_chunks(self._graph, count)
            spaces = SharedSpaces(Expansion(graph, self._machine, self._optimizer))
            self._known[count] = PricedForm(graph, spaces, self._tracer)
        return self._known[count]
