"""Lowers the graph, a tiling per operator and a rank to that rank's program.

Every operand is read in the layout that the tiling of its operator requires. If this differs from
the layout in which the value was produced, or if its gradient is computed in another layout than
the producer needs, a redistribution is inserted. Readers that need equal layouts share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwright.ir.graph import OPAQUE, Graph, LeafKind, Op, Ref, VerifyError, argument
from shardwright.ir.hosts import neighbours
from shardwright.ir.layout import REPLICATE, Layout, Mesh, Partial, atom_range, atom_runs
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    Load,
    Program,
    Redistribute,
    Run,
    RunModule,
    Uniform,
    reads,
    writes,
)
from shardwright.program.lower.offset_ops import placed_call, shared_attention
from shardwright.program.lower.segments.recomputed_segments import grouped_segments
from shardwright.program.lower.tile_cache import TileCache
from shardwright.program.lower.zigzag_order import in_zigzag_order
from shardwright.rules.analysis import Analysis
from shardwright.rules.arguments import localize
from shardwright.rules.micro_batches import gradient_layout
from shardwright.rules.operators.mlp_chunks import DOWN, TURNED, number_drawn_by
from shardwright.rules.placements import OpLayouts, layouts_under
from shardwright.rules.rule import Tiling, joint_split

Positions = tuple[tuple[tuple[int, int, int], ...], ...]

_AFTER_DRAWS = 2**20  # draws of the graph are numbered from zero, attention from here
# Operators whose numbers depend on where in the whole tensor a tile lies.
_DRAWS: dict[str, type[Dropout] | type[Uniform]] = {
    "shardwright.dropout.default": Dropout,
    "shardwright.uniform.default": Uniform,
}


def lower(graph: Graph, analysis: Analysis, decisions: Decisions, rank: int) -> Program:
    """The program of `rank`, for the batch as a whole.

    Inputs come as `input_layouts` says, buffers and constants whole: cutting
    them costs nothing.
    """
    mesh, tilings = decisions.mesh, decisions.tilings
    layouts_by_op = op_layouts_of(graph, analysis, mesh, tilings)
    given = {**decisions.storage, **input_layouts(graph, analysis, mesh, tilings)}
    return write(graph, analysis, ProgramLayouts(mesh, layouts_by_op, given), decisions, rank)


def op_layouts_of(
    graph: Graph, analysis: Analysis, mesh: Mesh, tilings: Mapping[str, Tiling]
) -> Mapping[str, OpLayouts]:
    """Layouts of everything that operators touch; equal operators share one object."""
    known: dict[object, OpLayouts] = {}
    found = {}
    for op in graph.ops:
        rule, tiling = analysis.rules[op.name], tilings[op.name]
        # All that `layouts_under` reads: equal layers differ in the numbers of their factors alone.
        names = rule.operands, rule.results, rule.internal_reductions
        key = (*names, rule.additive, rule.linear, rule.routes, rule.joint_splits, tiling)
        if (op_layouts := known.get(key)) is None:
            op_layouts = known[key] = layouts_under(rule, tiling, mesh)
        found[op.name] = op_layouts
    return in_zigzag_order(graph, analysis, found)


def _dual(_: str, layout: Layout) -> Layout:
    return layout.dual()


@dataclass(frozen=True)
class ProgramLayouts:
    """Layouts of everything that a program computes.

    Attributes:
        mesh: the mesh of the layouts; with micro-batches it has their axis, too.
        layouts_by_op: the layouts of what each operator reads and makes.
        given: the layouts of leaves; those that it lacks are replicated.
        result: the layout in which results are returned; None is replicated.
        sent: values that go to another pipeline stage. They keep the layout of their producer, and
            their gradients arrive in the layout that it needs.
        home: the layout in which the gradient of a value is needed, by its name and layout.
    """

    mesh: Mesh
    layouts_by_op: Mapping[str, OpLayouts]
    given: Mapping[str, Layout]
    result: Layout | None = None
    sent: frozenset[str] = frozenset()
    home: Callable[[str, Layout], Layout] = _dual


def write(
    graph: Graph, analysis: Analysis, placed: ProgramLayouts, decisions: Decisions, rank: int
) -> Program:
    """The program of `rank` of the mesh of `placed`.

    Args:
        graph: the graph to lower, which may be a part of the one that `analysis` is of.
        analysis: the rules and dimensions of the whole graph.
        placed: the layouts of all values; these, and not `decisions`, say how operators are split.
        decisions: of these only what is about memory and 8 bits counts: recomputation, copies that
            are gathered again, parameters on the host.
        rank: the rank in the mesh of `placed`.
    """
    writer = _Writer(graph, analysis, placed, rank, decisions)
    for leaf in graph.leaves:
        writer.leaf(leaf.name, leaf.kind)
    for op in graph.ops:
        writer.segment = decisions.segments.get(op.name, 0)
        writer.operator(op, placed.layouts_by_op[op.name])
    writer.segment = 0
    outputs = tuple(writer.result(name) for name in graph.outputs)
    updates = tuple((buffer, writer.result(name)) for buffer, name in graph.updates)
    program = Program(
        mesh=placed.mesh,
        rank=rank,
        leaves=tuple(leaf.name for leaf in graph.leaves),
        instructions=grouped_segments(
            writer.instructions,
            writer.segments,
            (*outputs, *(value for _, value in updates)),
            decisions.kept,
            writer.views,
        ),
        outputs=outputs,
        updates=updates,
    )
    verify(program)
    return program


def input_layouts(
    graph: Graph,
    analysis: Analysis,
    mesh: Mesh,
    tilings: Mapping[str, Tiling],
    *,
    in_turn: int = 0,
) -> dict[str, Layout]:
    """The part of each input that a rank needs: sharded where all its readers agree.

    An input that has a gradient comes whole to every device, and its readers cut it: every rank is
    given the same batch and wants the whole gradient of it. Only along the first `in_turn` axes of
    the mesh, whose indices a rank runs one after the other, it is sharded as other inputs are.
    """
    found = {}
    for leaf in graph.leaves_of(LeafKind.INPUT):
        differentiable = graph.tensor[leaf.name].requires_grad
        wanted: set[Layout] = set()
        for op in graph.consumers[leaf.name]:
            op_layouts = layouts_under(analysis.rules[op.name], tilings[op.name], mesh)
            positions = [i for i, name in enumerate(op.operands) if name == leaf.name]
            layouts = (op_layouts.operands[i] for i in positions)
            wanted.update(_whole_after(in_turn, one) if differentiable else one for one in layouts)
        agreed = wanted.pop() if len(wanted) == 1 else Layout.replicated(mesh)
        if any(isinstance(p, Partial) for p in agreed.placements) or leaf.name in graph.outputs:
            agreed = Layout.replicated(mesh)
        found[leaf.name] = agreed
    return found


def _whole_after(axes: int, layout: Layout) -> Layout:
    """`layout` along the first `axes` of its mesh, replicated along all others."""
    kept = layout.placements[:axes]
    return Layout(layout.mesh, (*kept, *(REPLICATE for _ in layout.placements[axes:])))


class _Writer:
    """Collects instructions, and tracks the layout of every value."""

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        placed: ProgramLayouts,
        rank: int,
        decisions: Decisions,
    ) -> None:
        self.graph = graph
        self.analysis = analysis
        self.placed = placed
        self.coordinate = placed.mesh.coordinate(rank)
        self.tiles = TileCache(self.coordinate)
        self.number = {name: i for i, name in enumerate(analysis.rules)}  # in the whole graph
        self.instructions: list[Instruction] = []
        self.layouts: dict[str, Layout] = {}
        self.names: dict[str, str] = {}  # value -> its name in the program
        self.segments: list[int] = []
        self.segment = 0  # of what is being written
        self.views: set[str] = set()  # operators whose results share memory of an operand
        self.redistributed: dict[tuple[str, Layout, Layout, int], str] = {}
        self.parameters: set[str] = set()
        self.regathered, self.on_host = decisions.regathered, decisions.hosts_parameters
        self.rereads = decisions.rereads or self.on_host
        self.in_8_bit = decisions.in_8_bit
        self.near = neighbours(placed.mesh, decisions.host_devices)
        # What is not kept of a parameter: a copy, the parameter itself, or a view -> that copy.
        self.copies: dict[str, str] = {}
        self.reread: set[str] = set()  # parameters themselves, under the names that are read

    def leaf(self, name: str, kind: LeafKind) -> None:
        whole = Layout.replicated(self.placed.mesh)
        self.layouts[name] = self.placed.given.get(name, whole)
        self.names[name] = name
        if kind is LeafKind.PARAMETER:
            self.parameters.add(name)
            self.names[name] = f"{name}/local"
            shape = self.local_shape(name, self.layouts[name])
            self.write(Load(name, self.names[name], shape))
            if self.on_host or (self.rereads and self.graph.tensor[name].requires_grad):
                self.copies[self.names[name]] = self.names[name]
                self.reread.add(self.names[name])

    def operator(self, op: Op, op_layouts: OpLayouts) -> None:
        """Write an operator with local arguments, after the redistributions that it needs."""
        operands = [
            self.read(name, layout, grad)
            for name, layout, grad in zip(
                op.operands, op_layouts.operands, op_layouts.operand_grads, strict=True
            )
        ]
        shapes = [
            self.local_shape(name, layout)
            for name, layout in zip(op.outputs, op_layouts.results, strict=True)
        ]
        local = localize(
            op,
            [self.graph.tensor[name].shape for name in op.outputs],
            [
                self.local_shape(name, layout)
                for name, layout in zip(op.operands, op_layouts.operands, strict=True)
            ],
            shapes,
        )
        local = local.with_operands(operands)
        if all(self.graph.tensor[name].alias_of for name in op.outputs):
            self.views.add(op.name)
        for name in op.outputs:
            for value, read in zip(op.operands, operands, strict=True):
                if read in self.copies and self.graph.tensor[name].alias_of == value:
                    self.copies[name] = self.copies[read]
        kept = {
            self.copies[read]: None
            for value, read in zip(op.operands, operands, strict=True)
            if read in self.copies
            and (value in op.saves or (read in self.reread and not self.on_host))
        }
        for name, layout in zip(op.outputs, op_layouts.results, strict=True):
            self.layouts[name] = layout
            self.names[name] = name

        def positions(operand: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
            return self.positions(op.operands[operand], op_layouts.operands[operand])

        if op.target in _DRAWS:
            drawn = self.positions(op.outputs[0], op_layouts.results[0])
            self.write(_DRAWS[op.target](local, drawn))
        elif (number := number_drawn_by(op)) is not None:
            drawn = self.inner_positions(op, op_layouts)
            local = replace(local, args=local.args[:-1])
            self.write(DroppedMlp(local, number, drawn, tuple(shapes)))
        elif op.kind == "scaled_dot_product_attention" and argument(op, 4, "dropout_p", 0.0):
            self.write(self.attention(op, local, op_layouts))
        elif shared := joint_split(op_layouts.tiling):
            ends = zip(op.operands[:2], op_layouts.operands[:2], strict=True)
            axis, choice = shared
            key_runs = [self.runs(name, layout, axis) for name, layout in ends]
            at = self.placed.mesh.names[axis], self.coordinate[axis]
            self.write(shared_attention(local, choice, *at, *key_runs))
        elif op.target == OPAQUE:
            self.write(RunModule(local, _AFTER_DRAWS + self.number[op.name]))
        elif placed := placed_call(
            local, op_layouts, self.placed.mesh, self.near, positions, tuple(shapes)
        ):
            if isinstance(placed, Compute) and not self.segment:
                placed = replace(placed, regathers=tuple(kept))
            self.write(placed)
        else:
            scaling = self.graph.numerics.fp8 if op.name in self.in_8_bit else ""
            again = () if self.segment else tuple(kept)
            self.write(Compute(local, tuple(shapes), again, scaling=scaling))

    def attention(self, op: Op, local: Op, op_layouts: OpLayouts) -> Attention:
        """Scores are query by key, [..., heads, query length, key length]; either may repeat."""
        query, key = (
            self.positions(name, layout)
            for name, layout in zip(op.operands[:2], op_layouts.operands[:2], strict=True)
        )
        shapes = [self.graph.tensor[name].shape for name in op.operands[:2]]
        batch = [
            q if m >= n else k
            for q, k, m, n in zip(query[:-2], key[:-2], shapes[0], shapes[1], strict=False)
        ]
        number = _AFTER_DRAWS + self.number[op.name]
        return Attention(local, number, (*batch, query[-2], key[-2]))

    def inner_positions(self, op: Op, op_layouts: OpLayouts) -> Positions:
        """Rows of the input by the inner features of an MLP, as the last weight has them."""
        down, turned = op.args[DOWN], op.args[TURNED]
        assert isinstance(down, Ref) and isinstance(turned, tuple)
        at = op.operands.index(down.name)
        rows = self.positions(op.operands[0], op_layouts.operands[0])[:-1]
        weight = self.positions(down.name, op_layouts.operands[at])
        return (*rows, weight[1 if turned[-1] else 0])

    def runs(self, value: str, layout: Layout, axis: int) -> tuple[tuple[Run, ...], ...]:
        """Starts and lengths in the last dimension but one, of each device along `axis`."""
        (size,) = self.analysis.atoms[value][-2]
        at = (len(self.analysis.atoms[value]) - 2, 0)
        here = self.coordinate
        devices = range(self.placed.mesh.shape[axis])
        coordinates = ((*here[:axis], one, *here[axis + 1 :]) for one in devices)
        return tuple(atom_runs(size, at, layout, coordinate) for coordinate in coordinates)

    def result(self, value: str) -> str:
        """Name of what the program returns of `value`."""
        whole = Layout.replicated(self.placed.mesh)
        if value in self.placed.sent and value in self.parameters:
            # Its gradient from the next stage is whole, those of its readers here may be parts.
            stored = self.layouts[value]
            return self.read(value, stored, gradient_layout(stored))
        if value in self.placed.sent:
            return self.names[value]
        return self.read(value, self.placed.result or whole, whole)

    def read(self, value: str, wanted: Layout, grad: Layout) -> str:
        """Name of `value` laid out as `wanted`, whose gradient comes back as `grad`."""
        src = self.layouts[value]
        atoms = self.analysis.atoms[value]
        differentiable = self.graph.tensor[value].requires_grad
        forward = self.tiles.moves(atoms, src, wanted)
        # Parameters need not be read again if copies are kept, or if they are read as they lie:
        # their gradients are summed outside of a segment, together with others.
        inside = value not in self.parameters or (forward and value in self.regathered)
        segment = self.segment if inside else 0
        key = value, wanted, grad, segment
        if key in self.redistributed:
            return self.redistributed[key]
        home = self.placed.home(value, src)
        backward = self.tiles.moves(atoms, grad, home) if differentiable else ()
        if not forward and not backward:
            self.redistributed[key] = self.names[value]
            return self.names[value]
        result = f"{value}/{len(self.redistributed)}"
        text = f"{src} -> {wanted}"
        if differentiable:
            text += f", gradient {grad} -> {home}"
        self.write(
            Redistribute(
                value=self.names[value],
                result=result,
                text=text,
                before=self.local_shape(value, src),
                after=self.local_shape(value, wanted),
                atoms_before=self.tiles.tile(atoms, src).atoms,
                atoms_grad=self.tiles.tile(atoms, grad).atoms,
                forward=forward,
                backward=backward,
                differentiable=differentiable,
            ),
            segment,
        )
        self.redistributed[key] = result
        own = self.names[value]
        again = value in self.regathered if forward or not self.on_host else True
        if again and (forward or own in self.reread):
            self.copies[result] = result
            if not forward:
                self.reread.add(result)
        elif self.rereads and own in self.copies and not forward:  # another name of a view
            self.copies[result] = self.copies[own]
        return result

    def write(self, instruction: Instruction, segment: int | None = None) -> None:
        self.instructions.append(instruction)
        self.segments.append(self.segment if segment is None else segment)

    def local_shape(self, value: str, layout: Layout) -> tuple[int, ...]:
        return self.tiles.tile(self.analysis.atoms[value], layout).shape

    def positions(self, value: str, layout: Layout) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Of each dimension, start, length and size of each atom that is not in zigzag order."""
        found = []
        for d, sizes in enumerate(self.analysis.atoms[value]):
            ranges = [atom_range(n, (d, a), layout, self.coordinate) for a, n in enumerate(sizes)]
            found.append(tuple((r.start, len(r), n) for r, n in zip(ranges, sizes, strict=True)))
        return tuple(found)


def verify(program: Program) -> None:
    """Raise `VerifyError` if an instruction reads an undefined value or moves do not fit shapes."""
    defined = set(program.leaves)
    for instruction in program.instructions:
        for name in reads(instruction):
            if name not in defined:
                raise VerifyError(f"{instruction}: reads %{name} before it is defined")
        for name in (made := writes(instruction)):
            if name in defined:
                raise VerifyError(f"{instruction}: defines %{name} twice")
        defined.update(made)
    for name in (*program.outputs, *(value for _, value in program.updates)):
        if name not in defined:
            raise VerifyError(f"%{name} is returned but never defined")
