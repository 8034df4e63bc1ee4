"""The program of one rank: local operators and redistributions.

In contrast to a `Graph`, a `Program` has local shapes and explicit communication. It prints as
text and does not depend on torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.graph import Op
from shardwright.ir.layout import (
    REPLICATE,
    Atoms,
    Layout,
    Mesh,
    Placement,
    Shard,
    chunk,
    local_atoms,
    part_length,
    zigzag_runs,
)
from shardwright.ir.options.mixed_precision import HALF_DTYPES
from shardwright.ir.redistribution import Collective, steps_between
from shardwright.program.lower.routing import Routing

Shape = tuple[int, ...]
Run = tuple[int, int]  # elements of the whole, side by side: start and length


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a redistribution along one mesh axis, with this rank's numbers.

    Tensors are seen as their atoms: one dimension per atom.

    Attributes:
        axis: the name of the mesh axis.
        collective: what happens along it.
        whole: the shape that the tensor has where the axis does not shard it.
        src: the sharded dimension before; -1 where the placement is no Shard.
        dst: the sharded dimension after; -1 where the placement is no Shard.
        start: where this rank's tile begins in that dimension of `whole`.
        length: how long the tile is; both are for steps that cut or embed it.
        keeps: whether the rank contributes its tensor; otherwise zeros.
        halves: the two runs of `whole` that a tile in zigzag order is cut from.
    """

    axis: str
    collective: Collective
    whole: Shape
    src: int
    dst: int
    start: int
    length: int
    keeps: bool
    halves: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class Redistribute:
    """`result` is `value` in another layout, and its gradient is redistributed back.

    Attributes:
        value: the tensor before.
        result: the tensor after; another name of `value` if `forward` is empty.
        text: both layouts, for printing.
        before: the local shape of `value`, in the tensor's own dimensions.
        after: the local shape of `result`.
        atoms_before: the tile of `value` seen as atoms, where the forward moves start.
        atoms_grad: the tile of the gradient seen as atoms, where the backward moves start.
        forward: the moves of the value.
        backward: the moves of the gradient of `result` to that of `value`.
        differentiable: whether there is a gradient.
        cast: the dtype in which the value is moved, and that of its gradient; None for its own.
    """

    value: str
    result: str
    text: str
    before: Shape
    after: Shape
    atoms_before: Shape
    atoms_grad: Shape
    forward: tuple[Move, ...]
    backward: tuple[Move, ...]
    differentiable: bool
    cast: tuple[str, str] | None = None

    def __str__(self) -> str:
        cast = f" as {self.cast[0]}" if self.cast else ""
        return f"%{self.result} = redistribute(%{self.value}, {self.text}){cast}"


@dataclass(frozen=True, slots=True)
class Compute:
    """One operator on local tiles.

    Attributes:
        op: the operator, with local sizes among its arguments.
        shapes: the local shapes of the results.
        regathers: results of redistributions that it reads and does not keep; they are made again
            in the backward pass.
        routing: where a mixture of experts sends rows, if the device holds only some experts.
        scaling: the key of the recipe (`ir/options/fp8.py`) of a linear layer whose products are in
            8 bits; empty for none.
    """

    op: Op
    shapes: tuple[Shape, ...]  # of the results
    regathers: tuple[str, ...] = ()
    routing: Routing | None = None
    scaling: str = ""

    def __str__(self) -> str:
        shapes = ", ".join(str(list(s)) for s in self.shapes)
        again = "".join(f", regathers %{name}" for name in self.regathers)
        routed = f", {self.routing}" if self.routing and self.routing.hops else ""
        scaled = f", in 8 bits by {self.scaling}" if self.scaling else ""
        return f"{self.op}: {shapes}{routed}{scaled}{again}"


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout on a tile. `positions` has, per dimension and atom, (start, length, size)."""

    op: Op
    positions: tuple[tuple[tuple[int, int, int], ...], ...]

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Random numbers in [0, 1) for a tile; `positions` as in `Dropout`."""

    op: Op
    positions: tuple[tuple[tuple[int, int, int], ...], ...]

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with dropout on a tile. `positions` are those of the tile of its scores.

    `number` distinguishes it from other operators with random numbers.
    """

    op: Op
    number: int
    positions: tuple[tuple[tuple[int, int, int], ...], ...]

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class DroppedMlp:
    """An MLP in chunks with dropout inside. `positions` are those of its tile of inner width.

    `number` is that of the dropout among operators that draw, which `op` leaves out. `shapes` are
    those of the local results.
    """

    op: Op
    number: int
    positions: tuple[tuple[tuple[int, int, int], ...], ...]
    shapes: tuple[Shape, ...]

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Joint:
    """An operator that several devices compute together, communicating inside of it.

    Attributes:
        op: the operator.
        axes: the mesh axes along which these devices are.
        tile: start, length and size of each atom of the classes of a cross entropy, as this device
            has them.
        first: of other reductions, whether this device is the one that gives the result.
        shapes: the local shapes of the results.
    """

    op: Op
    axes: tuple[str, ...]
    tile: tuple[tuple[int, int, int], ...]
    first: bool
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.op} over {' '.join(self.axes)}"


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention over a sequence that the devices along one mesh axis share.

    Attributes:
        op: the operator.
        axis: the name of the mesh axis.
        position: that of this device along it.
        queries: for each device the runs of queries that it holds, one behind the other.
        keys: for each device the runs of keys and values, which go around all devices in a ring;
            empty where every device has all of them.
    """

    op: Op
    axis: str
    position: int
    queries: tuple[tuple[Run, ...], ...]
    keys: tuple[tuple[Run, ...], ...]

    def __str__(self) -> str:
        halves = any(len(runs) > 1 for runs in self.queries)
        how = ["in halves"] * halves + ["in a ring"] * bool(self.keys)
        return f"{self.op} {' '.join(how)} over {self.axis}"


def has_fused_blocks(dtype: str, widths: tuple[int, int], *, on_cpu: bool) -> bool:
    """Whether a ring computes each block of scores in one kernel, if there is no mask.

    `widths` are those of a key and of a value. On GPUs these are the limits of flash attention.

    >>> has_fused_blocks("bfloat16", (128, 128), on_cpu=False)
    True
    >>> has_fused_blocks("float32", (128, 128), on_cpu=False)
    False
    """
    key, value = widths
    if on_cpu:
        return key == value
    return key == value and key % 8 == 0 and key <= 256 and dtype in HALF_DTYPES


@dataclass(frozen=True, slots=True)
class RunModule:
    """An opaque sub-module. `number` distinguishes it from other operators with random numbers."""

    op: Op
    number: int

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Load:
    """This rank's tile of a parameter, in the shape that operators take it in."""

    leaf: str
    result: str
    shape: Shape

    def __str__(self) -> str:
        return f"%{self.result} = load(%{self.leaf}): {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class RecomputedSegment:
    """Instructions that keep nothing for the backward pass and are recomputed there.

    Attributes:
        number: that of the segment in the plan.
        instructions: what runs forward, and again in the backward pass.
        takes: the inputs, which are kept.
        gives: the results that other instructions read.
        kept: the operators that run once. Their own results stay in memory; results of other
            instructions that they save exist again once these are recomputed.
    """

    number: int
    instructions: tuple[Instruction, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    kept: frozenset[str] = frozenset()

    def __str__(self) -> str:
        words = ("kept" if self.keeps(one) else "recomputed" for one in self.instructions)
        lines = zip(words, self.instructions, strict=True)
        return "\n".join(f"{word} {self.number}: {one}" for word, one in lines)

    def keeps(self, one: Instruction) -> bool:
        """Whether an instruction of the segment runs once."""
        return isinstance(one, CALLS) and one.op.name in self.kept


Instruction = (
    Redistribute
    | Compute
    | Dropout
    | Uniform
    | Attention
    | DroppedMlp
    | Joint
    | SharedAttention
    | RunModule
    | Load
    | RecomputedSegment
)

CALLS = (  # of operators
    *(Compute, Dropout, Uniform, Attention, DroppedMlp),
    *(Joint, SharedAttention, RunModule),
)
DRAWS_BY_INDEX = (Dropout, Uniform, DroppedMlp)  # each number of a tile is drawn by its index


@dataclass(frozen=True)
class Program:
    """The forward pass of one rank, for the whole batch or one micro-batch.

    Attributes:
        mesh: the mesh of the devices; with micro-batches it has their axis, too.
        rank: the rank in that mesh.
        leaves: the inputs, parameters, buffers and constants that it is given.
        instructions: what it does, in order.
        outputs: the values that it returns.
        updates: the new contents of buffers, as (buffer, value).
    """

    mesh: Mesh
    rank: int
    leaves: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.mesh}"]
        lines += [str(i) for i in self.instructions]
        lines += [f"update %{buffer} <- %{value}" for buffer, value in self.updates]
        lines.append("return " + ", ".join(f"%{name}" for name in self.outputs))
        return "\n".join(lines)


def reads(instruction: Instruction) -> tuple[str, ...]:
    """Names of the values that an instruction takes, in order, repeats included."""
    if isinstance(instruction, Compute):  # most are
        return instruction.op.operands
    if isinstance(instruction, Redistribute):
        return (instruction.value,)
    if isinstance(instruction, Load):
        return (instruction.leaf,)
    if isinstance(instruction, RecomputedSegment):
        return instruction.takes
    return instruction.op.operands


def writes(instruction: Instruction) -> tuple[str, ...]:
    """Names of the values that an instruction defines."""
    if isinstance(instruction, Compute):
        return instruction.op.outputs
    if isinstance(instruction, Redistribute | Load):
        return (instruction.result,)
    if isinstance(instruction, RecomputedSegment):
        return instruction.gives
    return instruction.op.outputs


def flat(atoms: Atoms) -> Shape:
    """Shape of a tensor seen as its atoms."""
    return tuple(size for sizes in atoms for size in sizes)


def flat_dim(atoms: Atoms, placement: Placement) -> int:
    """The dimension of the atoms' shape that a placement shards, -1 if none."""
    if not isinstance(placement, Shard):
        return -1
    return sum(len(sizes) for sizes in atoms[: placement.dim]) + placement.atom


def moves(atoms: Atoms, src: Layout, dst: Layout, coordinate: tuple[int, ...]) -> tuple[Move, ...]:
    """The steps from `src` to `dst` as the device at `coordinate` takes them."""
    found, now = [], list(src.placements)
    for step in steps_between(src, dst):
        axis = src.mesh.names[step.axis]
        without = Layout(src.mesh, (*now[: step.axis], REPLICATE, *now[step.axis + 1 :]))
        shard = step.dst if isinstance(step.dst, Shard) else step.src
        start, length = 0, 0
        halves: tuple[Run, ...] = ()
        if isinstance(shard, Shard):
            outer = local_atoms(atoms, without, coordinate)[shard.dim][shard.atom]
            place = src.mesh.shape[step.axis], coordinate[step.axis]
            start, length = chunk(outer, *place)[0], part_length(outer, *place, shard)
            if shard.zigzag and step.collective is Collective.SLICE:
                halves = zigzag_runs(outer, *place)
        found.append(
            Move(
                axis=axis,
                collective=step.collective,
                whole=flat(local_atoms(atoms, without, coordinate)),
                src=flat_dim(atoms, step.src),
                dst=flat_dim(atoms, step.dst),
                start=start,
                length=length,
                keeps=coordinate[step.axis] == 0,
                halves=halves,
            )
        )
        now[step.axis] = step.dst
    return tuple(found)
