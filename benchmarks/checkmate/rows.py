"""Linear programs in sparse rows, for HiGHS through SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]

_INFEASIBLE = 2  # the status of SciPy's `milp`


@dataclass(frozen=True, eq=False)
class Solved:
    """The result of HiGHS.

    Attributes:
        bound: a lower bound of the least cost; infinite if nothing satisfies the rows.
        values: of all variables, where a solution was found.
        proven: whether the solution is an optimum, or there is none.
    """

    bound: float
    values: Floats | None
    proven: bool


@final
class Program:
    """Minimises a cost over variables from 0 to 1, and others from 0 on, that satisfy rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._entries: list[tuple[int, int, float]] = []
        self._most: list[float] = []

    def __len__(self) -> int:
        return len(self.cost)

    def variables(self, costs: Sequence[float], *, whole: bool, upper: float = 1.0) -> range:
        """New variables with their costs, whole numbers or any; their indices."""
        start = len(self)
        self.cost += costs
        self._lower += [0.0] * len(costs)
        self._upper += [upper] * len(costs)
        self._whole += [whole] * len(costs)
        return range(start, len(self))

    def require(self, variable: int) -> None:
        """Fix a variable at 1."""
        self._lower[variable] = 1.0

    def row(self, terms: Sequence[tuple[int, float]], most: float) -> None:
        """A sum of variables times factors is at most `most`."""
        self._entries += [(len(self._most), variable, factor) for variable, factor in terms]
        self._most.append(most)

    def solved(self, seconds: float, gap: float = 1e-7) -> Solved:
        """The least cost, or what HiGHS knows of it after so many seconds."""
        row, column, factor = (np.array(part) for part in zip(*self._entries, strict=True))
        matrix = csr_array((factor, (row, column)), shape=(len(self._most), len(self)))
        found = milp(
            np.array(self.cost),
            integrality=np.array(self._whole, int),
            bounds=Bounds(np.array(self._lower), np.array(self._upper)),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self._most)),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        if found.status == _INFEASIBLE:
            return Solved(np.inf, None, proven=True)
        bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
        return Solved(bound, found.x, proven=found.status == 0)
