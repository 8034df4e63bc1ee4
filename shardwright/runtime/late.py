"""Sums of what a program returns, which nobody has to wait for before the backward pass.

The gradient of a loss does not depend on the loss. Where nobody sees it in between, its sum is
under way while the backward pass runs, and no rank waits between the two for the slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from shardwright.runtime.redistribute import Redistribution
from shardwright.runtime.waiting import Waited, wait_for


class LateSums:
    """Sums of single numbers that a program returns and reads nowhere else."""

    def __init__(self, program: fx.GraphModule) -> None:
        (returned,) = (node for node in program.graph.nodes if node.op == "output")
        self._sums: list[Redistribution] = []
        for node in program.graph.nodes:
            if node.op == "call_module" and set(node.users) == {returned}:
                module = program.get_submodule(str(node.target))
                if isinstance(module, Redistribution) and module.sums_a_number:
                    self._sums.append(module)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside of it sums are begun and not waited for; what the program returned waits for its
        value until the end. After an error nothing is waited for, as other ranks may never come.
        """
        works: list[Waited] = []
        for one in self._sums:
            one.works = works
        try:
            yield
        finally:
            for one in self._sums:
                one.works = None
        for work in works:
            wait_for(work, "the sum of the loss")
