"""Duplicates the placeholders of constant tensors in an exported program."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import final

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument


@final
class Constants:
    """The constant tensors of `program`, which is changed in place.

    Call `sort` after the last `duplicate`.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._specs = {
            spec.arg.name: spec
            for spec in program.graph_signature.input_specs
            if spec.kind is InputKind.CONSTANT_TENSOR
        }
        self._made = 0

    @property
    def names(self) -> frozenset[str]:
        """The names of the placeholders of all constants, duplicates among them."""
        return frozenset(self._specs)

    def duplicate(self, node: fx.Node) -> fx.Node:
        """A new placeholder for the constant of the placeholder `node`."""
        self._made += 1
        spec = self._specs[node.name]
        with node.graph.inserting_after(node):
            made = node.graph.placeholder(f"{node.name}_again_{self._made}")
        made.meta = dict(node.meta)
        target = f"{spec.target}/{made.name}"
        self._program.constants[target] = self._program.constants[spec.target]
        self._specs[made.name] = replace(spec, arg=TensorArgument(made.name), target=target)
        return made

    def sort(self) -> None:
        """Sort the placeholders by first reader, as a full export does, if there are duplicates."""
        if not self._made:
            return
        specs = self._program.graph_signature.input_specs
        first = next(i for i, s in enumerate(specs) if s.kind is InputKind.CONSTANT_TENSOR)
        nodes = {node.name: node for node in self._program.graph.nodes if node.name in self._specs}
        order = {node: i for i, node in enumerate(self._program.graph.nodes)}

        def read(spec: InputSpec) -> int:
            return min((order[user] for user in nodes[spec.arg.name].users), default=len(order))

        constants = sorted(self._specs.values(), key=read)
        others = [spec for spec in specs if spec.kind is not InputKind.CONSTANT_TENSOR]
        specs[:] = [*others[:first], *constants, *others[first:]]
        for one, next_one in pairwise(constants):
            nodes[one.arg.name].append(nodes[next_one.arg.name])
