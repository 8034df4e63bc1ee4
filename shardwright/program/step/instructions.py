"""The instructions of a step program (`step_program.py`).

They run regions of operators forward and backward, start transfers and wait for them, add up
gradients, free values and update parameters.

Values have names. The gradient of `x` in micro-batch 1 is `grad/x@1`; if it has several
contributions, each has a number. The accumulated gradient of a parameter or an input `w` is
`total/w`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from typing import Any

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.layout import Shard
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import Move, Shape
from shardwright.program.step.async_pipeline.versions import Version
from shardwright.program.step.host_copies import Fetch, Offload, StoreGradient

TOTAL = "total/"


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs a region.

    Attributes:
        region: its number in `StepProgram.regions`.
        variant: which of its variants, which differ in the offsets of tiles.
        call: the name of this run, by which a `Backward` refers to it.
        inputs: the values that the region is given.
        outputs: the values that it makes.
        saves: whether its backward pass will follow.
        again: whether it repeats an earlier run, for the backward pass.
        ops: the graph's operators, one for each instruction of the region; empty for none.
    """

    region: int
    variant: int
    call: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saves: bool
    again: bool = False
    ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        word = "recompute" if self.again else "forward"
        tail = "" if self.saves else ", saves nothing"
        return f"{names_text(self.outputs)} = {word} {self.region}({names_text(self.inputs)}){tail}"


class Gradients(enum.Enum):
    """The gradients that a backward pass computes.

    Zero-bubble schedules compute those of a region's inputs first, which the stage before waits
    for, and those of its weights later. Then what the call saved is kept in between.
    """

    ALL = "all"
    INPUTS = "inputs"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Backward:
    """Computes gradients of the inputs of a `Forward` that saved, and frees what it saved.

    A pass for `INPUTS` is followed by one for `WEIGHTS`, whose `given` is empty: it continues from
    the gradients that the first pass kept.

    Attributes:
        region: the number of the region.
        call: the `Forward.call` whose backward pass it is.
        given: for each output of the region the names of gradients whose sum is that output's
            gradient; empty for an output without one.
        made: for each input the name of its gradient; "" if it has none, or is added to a total.
        copies: inputs that the region dropped, as (position, value that exists again).
        totals: gradients that are added up, as (position, total); the first makes the total.
        part: which gradients are computed.
    """

    region: int
    call: str
    given: tuple[tuple[str, ...], ...]
    made: tuple[str, ...]
    copies: tuple[tuple[int, str], ...] = ()
    totals: tuple[tuple[int, str], ...] = ()
    part: Gradients = Gradients.ALL

    def __str__(self) -> str:
        given = ", ".join(" + ".join(f"%{name}" for name in names) or "0" for names in self.given)
        made = ", ".join(
            [f"%{name}" for name in self.made if name] + [f"%{total} +" for _, total in self.totals]
        )
        again = f", with {names_text(name for _, name in self.copies)}" if self.copies else ""
        word = "" if self.part is Gradients.ALL else f"{self.part.value} of "
        none = ", which has none" if not made and self.part is Gradients.WEIGHTS else ""
        return f"{made}{' = ' * bool(made)}backward {word}{self.call}({given}){again}{none}"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a transfer: `value`, after the moves `local` and then `move`, is `result`.

    A gradient that is missing is sent as zeros.

    Attributes:
        value: the tensor before.
        result: the tensor after.
        atoms: the shape in which the moves see it, one dimension for each atom.
        local: moves without communication that come first.
        move: the move that communicates.
        shape: the shape of the result, in the tensor's own dimensions.
        dtype: the dtype in which it is sent, and which the result has.
    """

    value: str
    result: str
    atoms: Shape
    local: tuple[Move, ...]
    move: Move
    shape: Shape
    dtype: str

    @property
    def sent(self) -> Shape:
        """The shape in which the move takes the tensor."""
        return after_moves(self.atoms, self.local)

    @property
    def leads(self) -> bool:
        """Whether a gather or a scattered sum has the ranks' tiles one after the other."""
        tiled = self.move.collective.tiled
        return bool(tiled) and prod(self.move.whole[: self._tiled_dim]) == 1

    def in_order(self, ranks: int) -> bool:
        """Whether tiles lie one after the other and are equally large, so that none is padded."""
        return self.leads and self.move.whole[self._tiled_dim] % ranks == 0

    @property
    def _tiled_dim(self) -> int:
        return self.move.src if self.move.collective.tiled == "src" else self.move.dst

    @property
    def arrived(self) -> Shape:
        """The shape in which the move leaves the tensor."""
        return after_transfer(self.sent, self.move)

    @property
    def bytes(self) -> int:
        """Bytes of the whole that the move gathers, or of the tensor that it sums or exchanges."""
        shape = self.move.whole if self.move.collective.tiled else self.sent
        return prod(shape) * ITEM_BYTES[self.dtype]


def after_moves(shape: Shape, moves: tuple[Move, ...]) -> Shape:
    """The shape of a tensor of `shape` after moves without communication."""
    for move in moves:
        if move.collective is Collective.SLICE:
            shape = (*shape[: move.dst], move.length, *shape[move.dst + 1 :])
        elif move.collective is Collective.EMBED:
            shape = move.whole
    return shape


def after_transfer(shape: Shape, move: Move) -> Shape:
    """The shape of a tensor of `shape` after a move that communicates."""
    if move.collective.change[1] is not Shard:
        return move.whole if move.collective.tiled else shape
    return (*move.whole[: move.dst], move.length, *move.whole[move.dst + 1 :])


@dataclass(frozen=True, slots=True)
class Transfer:
    """Starts a collective on `channel` with all `parts` in one buffer.

    `handle` names it; the results exist after the `Wait` for it. The channel is the mesh axis
    along which the devices communicate.
    """

    collective: Collective
    channel: str
    parts: tuple[Part, ...]
    handle: str

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def __str__(self) -> str:
        values = names_text(part.value for part in self.parts)
        return f"{self.handle} = {self.collective.value}({values}) on {self.channel}"


@dataclass(frozen=True, slots=True)
class Payload:
    """One tensor of a message: the value, its shape on this rank, and its dtype."""

    value: str
    shape: Shape
    dtype: str

    def __str__(self) -> str:
        return f"%{self.value}"


@dataclass(frozen=True, slots=True)
class Send:
    """Starts to send values to the rank at the other end of `channel`, in one message.

    Their memory is read until the `Wait` for `handle`, which has no results. A message of the
    `backward` pass has gradients; one that is missing is sent as zeros.
    """

    payload: tuple[Payload, ...]
    channel: str
    handle: str
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.handle} = send({', '.join(map(str, self.payload))}) on {self.channel}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Starts to receive a message; its values are there after the `Wait` for `handle`."""

    payload: tuple[Payload, ...]
    channel: str
    handle: str
    backward: bool = False

    def __str__(self) -> str:
        tiles = ", ".join(f"{one.dtype}{list(one.shape)}" for one in self.payload)
        return f"{self.handle} = receive({tiles}) on {self.channel}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits for a transfer, a message or a copy; then its `results` are there."""

    handle: str
    results: tuple[str, ...]

    def __str__(self) -> str:
        made = f"{names_text(self.results)} = " if self.results else ""
        return f"{made}wait {self.handle}"


@dataclass(frozen=True, slots=True)
class Relayout:
    """`result` is `value` in another layout, without communication; both as in `Part`."""

    value: str
    result: str
    atoms: Shape
    local: tuple[Move, ...]
    shape: Shape
    dtype: str

    def __str__(self) -> str:
        moves = ", ".join(f"{move.collective.value} {move.axis}" for move in self.local)
        return f"%{self.result} = {moves or 'view'}(%{self.value})"


@dataclass(frozen=True, slots=True)
class Add:
    """`result` is the sum of `terms`, contributions to one gradient; missing without any."""

    result: str
    terms: tuple[str, ...]

    def __str__(self) -> str:
        return f"%{self.result} = {' + '.join(f'%{name}' for name in self.terms) or '0'}"


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Adds `value` to `total`, in place; the first of a step is the total."""

    total: str
    value: str

    def __str__(self) -> str:
        return f"%{self.total} += %{self.value}"


@dataclass(frozen=True, slots=True)
class Free:
    """Frees values. Memory that a region saved of them is kept until its backward pass."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"free {names_text(self.names)}"


@dataclass(frozen=True, slots=True)
class Seed:
    """Takes gradients of outputs: (number of the output, its gradient); the backward part begins.

    `results` are outputs and updates that are returned before; others are there at the end.
    """

    results: tuple[str, ...]
    gradients: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        before = f", behind {names_text(self.results)}" if self.results else ""
        made = f"{names_text(name for _, name in self.gradients)} = " if self.gradients else ""
        return f"{made}seed{before}"


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step, the last instruction; it writes the parameters in place.

    Attributes:
        parameters: what is updated, as (parameter, its gradient).
        late: how many updates ago the weights were made that the gradients belong to.
        groups: how many parameters, in their order, each group has; groups are updated one after
            the other. Empty updates all at once.
        on_host: whether the state of the optimizer is copied from the host for each group and back:
            while a group is updated, that of the next one arrives, and that of the one before it
            leaves.
        by_host: whether parameters, gradients and state are on the host, whose processors update
            them.
    """

    parameters: tuple[tuple[str, str], ...]
    late: int = 0
    groups: tuple[int, ...] = ()
    on_host: bool = False
    by_host: bool = False

    def __str__(self) -> str:
        leaves = names_text(leaf for leaf, _ in self.parameters)
        late = f", {self.late} update{'s' * (self.late > 1)} late" if self.late else ""
        groups = f", in groups of {', '.join(map(str, self.groups))}" if self.groups else ""
        gradients = names_text(gradient for _, gradient in self.parameters)
        state = ", with state from the host and back" if self.on_host else ""
        where = ", on the host" if self.by_host else ""
        return f"update {leaves} by {gradients}{late}{groups}{state}{where}"

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each group."""
        leaves = iter([leaf for leaf, _ in self.parameters])
        counts = self.groups or (len(self.parameters),)
        return tuple(tuple(islice(leaves, count)) for count in counts)


StepInstruction = (
    Forward
    | Backward
    | Transfer
    | Send
    | Recv
    | Offload
    | Fetch
    | StoreGradient
    | Wait
    | Relayout
    | Add
    | Accumulate
    | Free
    | Seed
    | Version
    | Update
)


def reads(one: StepInstruction) -> tuple[str, ...]:
    """Names of the values that an instruction takes."""
    return _READS.get(type(one), _none)(one)


def writes(one: StepInstruction) -> tuple[str, ...]:
    """Names of the values that are there after an instruction."""
    return _WRITES.get(type(one), _none)(one)


def _read_backward(one: Backward) -> tuple[str, ...]:
    given = tuple(chain.from_iterable(one.given))
    return (*given, *[name for _, name in one.copies]) if one.copies else given


def _written_backward(one: Backward) -> tuple[str, ...]:
    made = [name for name in one.made if name]
    return (*made, *[total for _, total in one.totals]) if one.totals else tuple(made)


def _none(_: StepInstruction) -> tuple[str, ...]:
    return ()


# By type, as passes ask for every instruction many times. Types that are missing have none.
_READS: Mapping[type, Callable[[Any], tuple[str, ...]]] = {
    Forward: lambda one: one.inputs,
    Backward: _read_backward,
    Transfer: lambda one: tuple([part.value for part in one.parts]),
    Send: lambda one: tuple([part.value for part in one.payload]),
    Offload: lambda one: (one.value,),
    Fetch: lambda one: (one.value,),
    StoreGradient: lambda one: (one.value,),
    Relayout: lambda one: (one.value,),
    Add: lambda one: one.terms,
    Accumulate: lambda one: (one.value,),
    Seed: lambda one: one.results,
    Version: lambda one: tuple([leaf for leaf, _ in one.parameters]),
    Update: lambda one: tuple([gradient for _, gradient in one.parameters]),
}
_WRITES: Mapping[type, Callable[[Any], tuple[str, ...]]] = {
    Forward: lambda one: one.outputs,
    Backward: _written_backward,
    Wait: lambda one: one.results,
    Relayout: lambda one: (one.result,),
    Add: lambda one: (one.result,),
    Accumulate: lambda one: (one.total,),
    Seed: lambda one: tuple([name for _, name in one.gradients]),
    Version: lambda one: tuple([result for _, result in one.parameters]),
}


def names_text(names: Iterator[str] | tuple[str, ...]) -> str:
    """Names of values as a printed program has them."""
    return ", ".join(f"%{name}" for name in names)
