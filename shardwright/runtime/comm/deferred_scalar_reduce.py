"""Asynchronous all-reduces of scalars, in flight while operators run.

The gradient of a loss does not depend on the loss. Where nobody sees it in between, it is summed
while the backward pass runs, and no rank waits between the two for the slowest: it rides with a
sum of gradients where there is one over the same ranks, so that it is no message of its own. What a
program begins with, as the number of labels, is under way until somebody reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.comm.process_group import begun_along
from shardwright.runtime.comm.redistribute import Redistribution
from shardwright.runtime.parameters.unshard import Reduction

Axes = tuple[DeviceMesh, ...]  # of one dimension each


class DeferredScalarReduces:
    """Sums of single numbers that a program returns and reads nowhere else."""

    def __init__(self, program: fx.GraphModule) -> None:
        modules = dict(program.named_modules())
        self._sums = [
            module
            for node in program.graph.nodes
            if (module := _returned_sum(node, modules)) is not None
        ]
        self._reductions = [one for one in program.modules() if isinstance(one, Reduction)]

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside of it sums are begun and not waited for; what the program returned waits for its
        value until the end. After an error nothing is waited for, as other ranks may never come.
        """
        works: list[Waited] = []
        riders: dict[Axes, list[torch.Tensor]] = {one.axes: [] for one in self._reductions}
        for reduction in self._reductions:
            reduction.riders = riders[reduction.axes]
        for one in self._sums:
            rides = one.axes in riders
            one.later = riders[one.axes].append if rides else partial(_begin, works, one.axes)
        try:
            yield
        finally:
            for one in self._sums:
                one.later = None
            for reduction in self._reductions:
                reduction.riders = []
        for axes, left in riders.items():  # where no gradients were summed together
            for number in left:
                _begin(works, axes, number)
        for work in works:
            wait_for(work, "the sum of the loss")


def is_under_way(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node of a program is a sum that is begun there, and waited for elsewhere."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    begun = isinstance(module, Redistribution) and module.later is not None
    return begun or _returned_sum(node, modules) is not None


def _returned_sum(node: fx.Node, modules: Mapping[str, nn.Module]) -> Redistribution | None:
    """The module of a node that sums a number which the program returns and reads nowhere else."""
    if node.op != "call_module" or {user.op for user in node.users} != {"output"}:
        return None
    module = modules[str(node.target)]
    return module if isinstance(module, Redistribution) and module.sums_a_number else None


def _begin(works: list[Waited], axes: Axes, number: torch.Tensor) -> None:
    works.append(begun_along(axes, number))


class Awaited(nn.Module):
    """The value of a sum, there when it is needed; `works` has the sum that was begun last."""

    def __init__(self, works: list[Waited]) -> None:
        super().__init__()
        self.works = works

    def forward(self, begun: torch.Tensor) -> torch.Tensor:
        """`begun`, which is `works`' result, when it is done."""
        if self.works and not torch.compiler.is_compiling():  # compiled sums are done already
            wait_for(self.works.pop(), "a sum over the batch")
            self.works.clear()  # of steps that failed, for which other ranks may never come
        return begun


def early_sums_under_way(program: fx.GraphModule) -> None:
    """Have sums of numbers waited for where they are read first, and no longer where they begin."""
    for node in list(program.graph.nodes):
        summing = program.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(summing, Redistribution) or not summing.sums_a_number:
            continue
        first = next((other for other in _after(node) if other in node.users), node.next)
        if summing.differentiable or first is node.next or first.op == "output":
            continue
        works: list[Waited] = []
        summing.later = partial(_begin, works, summing.axes)
        name = f"{node.target}_awaited"
        program.add_submodule(name, Awaited(works))
        with program.graph.inserting_before(first):
            awaited = program.graph.call_module(name, (node,))
        node.replace_all_uses_with(awaited, lambda user, awaited=awaited: user is not awaited)
    program.recompile()


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "output":
        node = node.next
        yield node
