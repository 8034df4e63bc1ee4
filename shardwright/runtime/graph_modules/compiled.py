"""Compiles programs with `torch.compile`.

Regions of a step program are cut into segments at repeated layers (`graph_modules/repeats.py`), and
equal segments are one compiled function, also those of several regions. In the program of an
asynchronous pipeline's stage, operators that do not keep their gathered copies are not compiled,
and the parts between them are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from shardwright.program.step.region import Region
from shardwright.runtime.graph_modules.repeats import SharedCode, segments
from shardwright.runtime.parameters.reshard_after_forward import ReshardAfterForward
from shardwright.tracing.export.operators import OVERLOAD, operator_of

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
        self._known: dict[SharedCode, int] = {}

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
            root.add_module(f"segment_{at}", self.segment(segment.code))
            results = graph.call_module(f"segment_{at}", tuple(given))
            for i, name in enumerate(segment.outputs):
                nodes[name] = graph.call_function(operator.getitem, (results, i))
        graph.output(tuple(nodes[name] for name in region.outputs))
        found = fx.GraphModule(root, graph, class_name="Segments")
        self.regions.append(found)
        return found

    def segment(self, code: SharedCode) -> fx.GraphModule:
        """The module of all segments with this code."""
        if code not in self._known:
            self._known[code] = len(self.shared)
            module = self.make(code)
            _out_of_place(module)
            if _fuses(module):
                # Segments with equal code may have inputs of several shapes: each is compiled.
                module.compile(dynamic=False)
            self.shared.append(module)
        found = self.shared[self._known[code]]
        assert isinstance(found, fx.GraphModule)
        return found


def compiled(program: fx.GraphModule) -> fx.GraphModule:
    """`program` with its parts compiled; a program without communication is one part."""
    modules = dict(program.named_modules())
    parts, eager = _parts(program, modules)
    if not eager:
        program.compile()
        return program
    _out_of_place(program)
    _end_at_products(program, parts, eager)
    stays = {f"submod_{number}" for number in eager}
    split: fx.GraphModule = split_module(program, program, lambda node: parts[node])
    for name, part in split.named_children():
        if isinstance(part, fx.GraphModule) and name not in stays and _fuses(part):
            part.compile()
    return split


def _fuses(part: fx.GraphModule) -> bool:
    """Whether there is something to fuse: looking up compiled code costs more than one operator."""
    return sum(node.op not in ("placeholder", "output") for node in part.graph.nodes) > 1


def _parts(
    program: fx.GraphModule, modules: Mapping[str, nn.Module]
) -> tuple[dict[fx.Node, int], set[int]]:
    """The number of the part that each node belongs to, and which parts are not compiled."""
    parts: dict[fx.Node, int] = {}
    eager: set[int] = set()
    number = 0
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        wanted = _is_eager(node, modules)
        if wanted != (number in eager):
            number += 1
        if wanted:
            eager.add(number)
        parts[node] = number
    return parts, eager


def _end_at_products(program: fx.GraphModule, parts: dict[fx.Node, int], eager: set[int]) -> None:
    """Move elementwise operators at the end of a part to the beginning of the next part.

    In their own part a compiler would save what their backward pass needs (e.g. a ReLU's boolean
    mask) in addition to their results; inputs of a part are not saved twice.
    """
    last = max(parts.values(), default=-1)
    for node in reversed(program.graph.nodes):
        following = parts.get(node, last) + 2  # the next one that is compiled
        if following > last or parts[node] in eager or not _is_elementwise(node):
            continue
        if all(parts.get(user, following) >= following for user in node.users):
            parts[node] = following


def _is_elementwise(node: fx.Node) -> bool:
    return isinstance(node.target, OVERLOAD) and torch.Tag.pointwise in node.target.tags


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


def _is_eager(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is not compiled: a `ReshardAfterForward`, or a selection of its result."""
    if node.op == "call_function" and node.name.startswith("getitem"):
        given = node.args[0]
        return isinstance(given, fx.Node) and _is_eager(given, modules)
    if node.op != "call_module":
        return False
    return isinstance(modules[str(node.target)], ReshardAfterForward)
