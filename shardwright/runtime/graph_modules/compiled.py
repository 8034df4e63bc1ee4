"""Compiles programs with `torch.compile`.

Regions of a step program are cut into segments at repeated layers (`graph_modules/repeats.py`), and
equal segments are one compiled function, also those of several regions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx, nn

from shardwright.program.step.region import Region
from shardwright.runtime.graph_modules.repeats import SharedCode, segments
from shardwright.tracing.export.operators import OVERLOAD, operator_of

_RELU = operator_of("aten.relu.default")
_PRODUCTS = frozenset(
    map(operator_of, ("aten.linear.default", "aten.addmm.default", "aten.mm.default"))
)
MakeSegment = Callable[[SharedCode], fx.GraphModule]


class CompiledRegions(nn.Module):
    """Compiles regions; each is called as the module of `region_module` is.

    `make` makes the module of a segment, to which numbers are given if it draws. The random state
    is on `device_of_state`. A segment of a single operator is not compiled.
    """

    def __init__(self, make: MakeSegment, device_of_state: torch.device) -> None:
        super().__init__()
        self.make, self.device_of_state = make, device_of_state
        self.shared = nn.ModuleList()  # one for each distinct segment
        self.regions = nn.ModuleList()
        self._known: dict[SharedCode, _Code] = {}

    def region(self, region: Region) -> fx.GraphModule:
        """A module that runs a region in compiled segments."""
        root, graph = nn.Module(), fx.Graph()
        nodes = {name: graph.placeholder(f"leaf_{i}") for i, name in enumerate(region.inputs)}
        state = graph.placeholder("random_state")
        for at, segment in enumerate(segments(region)):
            given = [nodes[name] for name in segment.inputs] + [state]
            if segment.numbers:
                numbers = torch.tensor(segment.numbers, device=self.device_of_state)
                root.register_buffer(f"numbers_{at}", numbers, persistent=False)
                given.append(graph.get_attr(f"numbers_{at}"))
            code = self.segment(segment.code)
            root.add_module(f"segment_{at}", code.module)
            results = graph.call_module(f"segment_{at}", tuple(given))
            for i, name in enumerate(segment.outputs):
                nodes[name] = graph.call_function(operator.getitem, (results, i))
                if i in code.rectified:
                    nodes[name] = graph.call_function(_RELU, (nodes[name],))
        graph.output(tuple(nodes[name] for name in region.outputs))
        found = fx.GraphModule(root, graph, class_name="Segments")
        self.regions.append(found)
        return found

    def segment(self, code: SharedCode) -> _Code:
        """The module of all segments with this code."""
        if code not in self._known:
            module = self.make(code)
            _out_of_place(module)
            self._known[code] = _Code(module, _without_last_rectifiers(module))
            if _fuses(module):
                # Segments with equal code may have inputs of several shapes: each is compiled.
                module.compile(dynamic=False)
            self.shared.append(module)
        return self._known[code]


class _Code(NamedTuple):
    """The module of a segment, and the outputs of which the segment has the ReLU."""

    module: fx.GraphModule
    rectified: frozenset[int]


def _without_last_rectifiers(module: fx.GraphModule) -> frozenset[int]:
    """Let a segment return what a ReLU at its end takes of a product; the outputs that change.

    The compiler would write a mask of booleans for the backward pass, one by one on CPUs, which
    takes half as long as the product of a layer of 1024. Outside, the result itself is the mask,
    and a product is a kernel of its own in any case.
    """
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    last = [
        node
        for node in module.graph.nodes
        if node.target is _RELU and node.args[0].target in _PRODUCTS and set(node.users) == {output}
    ]
    results = output.args[0]
    changed = frozenset(i for i, node in enumerate(results) if node in last)
    output.args = (tuple(x.args[0] if i in changed else x for i, x in enumerate(results)),)
    for node in last:
        module.graph.erase_node(node)
    module.recompile()
    return changed


def _fuses(part: fx.GraphModule) -> bool:
    """Whether there is something to fuse: looking up compiled code costs more than one operator."""
    return sum(node.op not in ("placeholder", "output") for node in part.graph.nodes) > 1


def _out_of_place(program: fx.GraphModule) -> None:
    """Replace each in-place operator `f_` by `f`, so that the order of operators does not matter.

    This is safe because only the result of `f_` is read afterwards. A compiler makes its parts
    functional in any case.
    """
    for node in program.graph.nodes:
        if isinstance(node.target, OVERLOAD):
            namespace, kind, overload = str(node.target).split(".")
            if kind.endswith("_") and not kind.endswith("__"):  # as __and__ does
                node.target = operator_of(f"{namespace}.{kind[:-1]}.{overload}")
    program.recompile()
