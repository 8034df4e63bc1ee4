"""SoyBean's k-cut: the tiling with least communication, one cut at a time or all at once.

Paper: SoyBean (arXiv 1805.04170), one-cut and k-cut. A one-cut splits every operator and parameter
into p parts so that the fewest bytes cross the cut (`planner/tables/soybean.py`). A k-cut makes k
cuts, each optimal given the cuts before it.
Deviations: the paper sweeps the levels of a breadth-first search, which a skip edge breaks. Here
every cut is a problem of its own and is solved by elimination, so skips and branches are exact.
Cuts may have any number of parts, and sizes need not divide: tiles are as `torch.chunk` makes them,
and a tiling that leaves a device without a tile is infeasible. Ties are broken by memory. An
operator's backward pass follows its forward tiling. As in the paper, an operator is computed whole
on both sides of a cut only where none of its factors can be split.
Complexity: one elimination over the whole graph for each cut, with as many choices as a rule has.
Oracle: `tests/harness/kcut_oracle.py::Net.best`.
Known inefficiency: repeated layers are not folded, because their copies may be cut differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np

from shardwright.ir.graph import Graph, Op
from shardwright.ir.layout import Mesh
from shardwright.machine.model import Machine
from shardwright.planner.space.space import Space, make_space
from shardwright.planner.tables.layout_codes import FIRST_ATOM, MOST_AXES, digit
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.objective import Objective
from shardwright.planner.tables.options import Allowed, Only
from shardwright.planner.tables.pricing import Pricing
from shardwright.planner.tables.soybean import Communication
from shardwright.rules.analysis import analyze
from shardwright.rules.rule import Choice, Rule, Split
from shardwright.simulate.time.stragglers import skewed, stretch
from shardwright.solve.algebra.minplus import extreme_objectives
from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import Node, Point, Problem
from shardwright.solve.elimination.solver import make_solver
from shardwright.solve.folding.folded import Folded

Legal = Callable[[Op, Rule, Choice], bool]  # whether an operator may take this choice at a cut
_Numbers = Mapping[str, tuple[int, ...]]  # by name, one number for each cut

_MAX_TABLE = 2_000_000


class CutError(ValueError):
    """The mesh has more axes, and so needs more cuts, than the search supports."""


def divides(op: Op, rule: Rule, choice: Choice) -> bool:
    """Whether the choice splits the operator."""
    return isinstance(choice, Split)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The tilings that the cuts along the axes of `mesh` give, and the bytes that cross the cuts.

    Attributes:
        mesh: its axes are the cuts, the outermost first.
        tilings: for every operator its choice at each cut, as an index into `Rule.choices()`.
        storage: for every parameter the digits (`planner/tables/layout_codes.py`) of its layout.
        crossing: bytes by SoyBean's measure, over all groups; one entry for each block of cuts that
            were found together.
        pinned: nodes that were decided heuristically, because the graph is too wide around them.
    """

    mesh: Mesh
    tilings: _Numbers
    storage: _Numbers
    crossing: tuple[float, ...]
    pinned: tuple[str, ...]

    @property
    def bytes(self) -> float:
        """Bytes that cross all cuts in one step."""
        return sum(self.crossing)


@final
class Cutter:
    """Cuts one graph so that the fewest bytes are communicated, by SoyBean's measure.

    At each cut an operator takes a `legal` choice if it has one. Operators without a choice of
    their own, such as views, follow the operator that they read.
    """

    def __init__(
        self, graph: Graph, machine: Machine, optimizer: str = "adamw", *, legal: Legal = divides
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.optimizer = optimizer
        self.legal = legal
        self.analysis = analyze(graph)
        self._stretch = cache(lambda: stretch(graph, self.analysis, machine))

    def cut(
        self, mesh: Mesh, at_once: int = 1, progress: Callable[[int], None] | None = None
    ) -> Cuts:
        """Cut along the axes of `mesh`, outermost first, `at_once` of them jointly.

        Args:
            mesh: its axes are the cuts.
            at_once: cuts that are optimised together. 1 is SoyBean's k-cut; the number of axes
                gives the optimum over all cuts.
            progress: called with the number of finished cuts.

        Raises:
            CutError: the mesh has more than `MOST_AXES` axes.
        """
        if len(mesh.axes) > MOST_AXES:
            raise CutError(
                f"mesh {mesh} means {len(mesh.axes)} cuts, and {MOST_AXES} can be made;"
                " use fewer devices, or the joint search"
            )
        cuts = Cuts(Mesh(()), {}, {}, (), ())
        for first in range(0, len(mesh.axes), at_once):
            if progress:
                progress(first)
            cuts = self._more(cuts, Mesh(mesh.axes[: first + at_once]))
        return cuts

    def crossing(self, cuts: Cuts) -> float:
        """Bytes that cross all of `cuts`, priced from scratch."""
        space = self.space(cuts, measure=Communication(cuts.mesh))
        return PriceList.of(space.folded).point((0,) * len(space.problem.nodes)).time

    def space(
        self, cuts: Cuts, mesh: Mesh | None = None, measure: Objective | None = None
    ) -> Space:
        """The search space on `mesh` in which `cuts` fix the choices along the first axes.

        Args:
            cuts: the cuts that are fixed.
            mesh: by default the mesh of `cuts`.
            measure: the objective; by default seconds.
        """
        mesh = mesh or cuts.mesh
        free = len(mesh.axes) - len(cuts.mesh.axes)
        rules, atoms = self.analysis.rules, self.analysis.atoms
        operators = {
            name: _only(numbers, free, len(rules[name].choices()))
            for name, numbers in cuts.tilings.items()
        }
        parameters = {
            name: _only(numbers, free, FIRST_ATOM + sum(map(len, atoms[name])))
            for name, numbers in cuts.storage.items()
        }
        allowed = Allowed(operators, parameters)
        machine = skewed(self.machine, self._stretch, mesh.size)
        pricing = Pricing(self.optimizer, measure)
        model = CostModel(self.graph, self.analysis, machine, mesh, pricing, allowed)
        return make_space(model, ())

    def _more(self, cuts: Cuts, mesh: Mesh) -> Cuts:
        """`cuts` and the optimal cuts along the remaining axes of `mesh`."""
        space = self.space(cuts, mesh, Communication(mesh))
        problem = self._legal_choices(space)
        point, pinned = _least(problem)
        names = dict.fromkeys((*cuts.pinned, *(problem.nodes[i].name for i in pinned)))
        crossing = (*cuts.crossing, point.time - cuts.bytes)
        return Cuts(mesh, *_numbers(space, point.choice), crossing, tuple(names))

    def _legal_choices(self, space: Space) -> Problem:
        """The space's problem without the illegal choices of cluster leaders."""
        nodes = list(space.problem.nodes)
        for op in self.graph.ops:
            op_node = space.op_nodes[op.name]
            if op_node.leads:
                node = nodes[op_node.own_node]
                time = np.where(self._legal(space, op), node.time, np.inf)
                nodes[op_node.own_node] = Node(node.name, time, node.memory)
        return Problem(tuple(nodes), space.problem.edges)

    def _legal(self, space: Space, op: Op) -> list[bool]:
        """For each option, whether it takes a legal choice at every cut that offers one."""
        rule = self.analysis.rules[op.name]
        good = [self.legal(op, rule, choice) for choice in rule.choices()]
        options = space.model.options(op).choices
        cuts = range(len(space.model.mesh.axes))
        open_to = {(i, option[:i]) for option in options for i in cuts if good[option[i]]}
        return [
            all(good[option[i]] or (i, option[:i]) not in open_to for i in cuts)
            for option in options
        ]


def _only(decided: Sequence[int], free: int, choices: int) -> Only:
    every = frozenset(range(choices))
    return (*(frozenset({number}) for number in decided), *(every,) * free)


def _least(problem: Problem) -> tuple[Point, tuple[int, ...]]:
    """The assignment of least time, ties broken by memory, and the nodes pinned for it."""
    folded = Folded.of(problem)
    solver = make_solver(folded, _MAX_TABLE)
    _, choice = solver.minimise(extreme_objectives(*folded.most))
    points = best_points(PriceList.of(folded), [choice])
    return points[0], solver.pinned


def _numbers(space: Space, choice: Sequence[int]) -> tuple[_Numbers, _Numbers]:
    """The choice of every operator and every parameter under an assignment."""
    model = space.model
    tilings = {
        op.name: model.options(op).choices[space.option(space.op_nodes[op.name], choice)]
        for op in model.graph.ops
    }
    storage = {}
    for name, layout in space.storage(choice).items():
        counts = [len(sizes) for sizes in model.analysis.atoms[name]]
        storage[name] = tuple(digit(placement, counts) for placement in layout.placements)
    return tilings, storage
