"""Random constraints on a graph, and what must hold of what is found under them.

Three laws. On the tables what is searched under constraints is a part of what is searched without:
at no weight of memory against time is its optimum better. No plan that is listed under them is
faster than the bound, for as much memory, of the frontier without. And after simulation the plan
that is chosen within a limit is faster than the one without constraints by no more than the gap.
"""

from __future__ import annotations

from random import Random

import numpy as np

import shardwright as sw
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.graph import LeafKind
from shardwright.ir.options.constraints import ConstraintError, parse_constraints
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.planner.meshes.meshes import meshes_of
from shardwright.planner.space.constrain import Marks
from shardwright.planner.space_factory import SpaceFactory
from shardwright.rules.analysis import analyze
from shardwright.rules.naming import dimension_names, split_words
from shardwright.solve.algebra.minplus import Objectives
from shardwright.solve.frontier.sweep import sweep

ROUNDING = 1e-9  # sums of the same terms in another order
_WEIGHTS = np.geomspace(1 / 300, 300, 9)  # around that at which the ends of a frontier tie


class Subject:
    """A graph, what its constraints may say, and what is searched without any."""

    def __init__(self, graph):
        self.graph = graph
        self._free = SpaceFactory(graph, recompute=True)
        self._optima = {}
        analysis = analyze(graph)
        names = dimension_names(graph, analysis)
        self._words = {}
        for op in graph.ops:
            rule = analysis.rules[op.name]
            words = self._words.setdefault(op.source.module, set())
            said = split_words(rule, rule.choices(), names)
            words |= {"whole" if word == "-" else word for word in said}
        self._parameters = [k for leaf in graph.leaves_of(LeafKind.PARAMETER) for k in leaf.keys]

    def constraints(self, random: Random, axes=("dp", "tp", "*")) -> list[str]:
        """One to three constraints; they may contradict each other, or mean nothing on a mesh."""
        return [self._constraint(random, axes) for _ in range(random.choice((1, 1, 2, 2, 3)))]

    def question(self, random: Random, machine) -> tuple[list[str], dict]:
        """Constraints, among them meshes and caps, and options: a memory limit, stages."""
        texts, options = self.constraints(random), {}
        stages = random.choice((1, 1, 1, 2))
        if stages > 1:
            options["stages"] = (stages,)
        if random.random() < 0.3:
            texts.append(f"mesh {random.choice(list(meshes_of(machine.devices // stages)))}")
        if random.random() < 0.2:
            texts.append(f"cap {random.choice(('dp', 'tp'))}={random.choice((1, 2, 4))}")
        if random.random() < 0.7:
            options["part"] = random.choice((0.1, 0.3, 0.6, 0.9))  # of the frontier's memory
        return texts, options

    def excess(self, machine, texts, options) -> float | None:
        """How far a plan under constraints is outside the printed gap of those without, at most.

        The plan that is chosen is held against the lower bound of the one without, and each listed
        plan against the bound for as much memory. As a part of its time; at most zero where the law
        holds. None where there is no plan under the constraints.
        """
        given = {k: v for k, v in options.items() if k != "part"}
        free = sw.search(self.graph, machine, **given)
        if "part" in options:
            most, least = free.costs[0][1], free.costs[-1][1]
            given["memory_limit"] = int(least + options["part"] * (most - least))
            free = sw.search(self.graph, machine, **given)
        limit = given.get("memory_limit")
        try:
            every = sw.search(self.graph, machine, constraints=texts, **given)
            found = every.fastest(limit)
        except (ConstraintError, InfeasibleError, PipelineError):
            return None
        best = free.fastest(limit)  # raises where only constraints make it possible
        return max(best.lower_bound_seconds / found.step_seconds - 1, below_bound(free, every))

    def _constraint(self, random, axes):
        kind, axis = random.choice(("pin", "forbid", "forbid")), random.choice(axes)
        if random.random() < 0.3:
            name = random.choice(self._parameters)
            glob = random.choice((name, f"*.{name.rpartition('.')[2]}", "*"))
            return f"{kind} {glob}={axis}:{random.choice(('R', 'S(0)', 'S(1)'))}"
        module = random.choice(sorted(self._words))
        parts = module.split(".") if module else ["*"]
        globs = (
            "*",
            ".".join(parts),
            ".".join("*" if part.isdigit() else part for part in parts),
            ".".join(parts[: random.randint(1, len(parts))]),
        )
        word = random.choice(sorted(self._words[module]))
        return f"{kind} {random.choice(globs)}={axis}:{word}"

    def gain(self, machine, mesh, texts, count=1) -> float | None:
        """How much better the optimum is under constraints at any weight, at most, as a part.

        None where one of the two is too wide for recomputation or for the solver, and the other is
        not. Raises `ConstraintError` where constraints leave nothing.
        """
        key = machine.name, mesh, count
        if key not in self._optima:
            space, _ = self._free.space(machine, mesh, "adamw", count)
            objectives = _objectives(space)
            self._optima[key] = space, objectives, space.solver.minimise(objectives)[0]
        free, objectives, least = self._optima[key]
        marks = Marks.on(self.graph, parse_constraints(texts))
        sources = SpaceFactory(self.graph, marks, recompute=True)
        space, _ = sources.space(machine, mesh, "adamw", count)
        if free.solver.pinned or space.solver.pinned:
            return None
        if (mesh in self._free.too_wide) != (mesh in sources.too_wide):
            return None
        found = space.solver.minimise(objectives)[0]
        return float((least / found - 1).max())


def _objectives(space) -> Objectives:
    """Least time, least memory, and weighted sums of both on the scale of the space."""
    ends = sweep(space.folded, max_weights=0, solver=space.solver, prices=space.prices).points
    fast, small = ends[0], ends[-1]
    weights = [0.0]
    if len(ends) > 1:
        weights += ((small.time - fast.time) / (fast.memory - small.memory) * _WEIGHTS).tolist()
    ones = np.ones(len(weights))
    return Objectives(np.append(ones, 0.0), np.append(weights, 1.0))


def below_bound(free, found) -> float:
    """How far a plan of the frontier `found` is below the bound of the frontier `free`, at most.

    As a part of its time; zero or less where none is.
    """
    return max(free.bound(peak) / seconds - 1 for seconds, peak in found.costs)
