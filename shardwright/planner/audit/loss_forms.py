"""The forms of a graph that strategies with other losses, or in 8 bits, are priced on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from shardwright.ir.graph import Graph
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.options.optimizers import placed
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.memory_limits import forms_to_search
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.form import form_of
from shardwright.planner.strategies.frontier.priced_frontier import SharedSpaces
from shardwright.planner.strategies.unpriced import require_recipe


@final
@dataclass(frozen=True)
class PricedForm:
    """A graph with its loss whole or in chunks, and its products in one precision, on one machine.

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
        self._known: dict[tuple[Numerics, str], PricedForm] = {}

    @property
    def given(self) -> PricedForm:
        """The form of the graph as it was captured."""
        return self._form(self._graph, self._optimizer)

    @cached_property
    def useful_chunks(self) -> int | None:
        """Chunks in which large logits take a small part of a device's memory; None: need none."""
        options = PlanOptions(mlp_chunks=(self._graph.numerics.mlp_chunks,))
        counts = [
            form.numerics.loss_chunks
            for form in forms_to_search(self._graph, self._machine, options).every
        ]
        return max(counts) if max(counts) > 1 else None

    def of(self, strategy: Strategy) -> PricedForm:
        """The form of a strategy's loss and products in 8 bits.

        Raises `StrategyError` if the model or the machine does not permit it.
        """
        require_recipe(strategy, self._machine)
        optimizer = placed(self._optimizer, strategy.offload)
        return self._form(form_of(self._graph, strategy), optimizer)

    def _form(self, graph: Graph, optimizer: str) -> PricedForm:
        key = graph.numerics, optimizer
        if key not in self._known:
            spaces = SharedSpaces(Expansion(graph, self._machine, optimizer))
            self._known[key] = PricedForm(graph, spaces, self._tracer)
        return self._known[key]
