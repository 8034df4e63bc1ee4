"""The modules of a plan as a tree in which equal neighbours become one row.

The caller provides the text of a row: `explain` describes one plan, `diff` two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from shardwright.ir.layout import Bytes, Layout
from shardwright.ir.memory import PARTS, STATE, Share
from shardwright.ir.plan import Phase, Plan, PlannedOp, PlannedParameter, PlannedTransfer
from shardwright.ir.redistribution import LOCAL, communication_named
from shardwright.ir.strategy.recompute import op_word

T = TypeVar("T")

# Parts of memory that was not simulated, beside `PARTS`.
_TABLES = {"state": "state", "mixed": "not attributed", "unknown": "not known by module"}
_STATE = (*STATE, "state")


@dataclass
class Module:
    """The operators, parameters and transfers of one module, and its submodules in order of use.

    `memory` are bytes at the peak by part. `rest` of the whole model are bytes that belong to no
    module; they count as the model's and are shown in rows of their own.
    """

    parameters: list[PlannedParameter] = field(default_factory=list)
    ops: list[PlannedOp] = field(default_factory=list)
    transfers: list[PlannedTransfer] = field(default_factory=list)
    memory: Counter[str] = field(default_factory=Counter)
    rest: Counter[str] = field(default_factory=Counter)
    children: dict[str, Module] = field(default_factory=dict)

    def at(self, path: str) -> Module:
        """The module of this path, created if it does not exist."""
        found = self
        for name in path.split(".") if path else ():
            found = found.children.setdefault(name, Module())
        return found

    def inclusive(self) -> Iterator[Module]:
        """The module and all modules below it."""
        yield self
        for child in self.children.values():
            yield from child.inclusive()

    @property
    def is_empty(self) -> bool:
        return not (self.ops or self.parameters or self.transfers or self.memory or self.rest)

    @property
    def is_rest(self) -> bool:
        """Whether the node is for costs outside of all modules."""
        return bool(self.rest) and not (
            self.ops or self.parameters or self.transfers or self.memory or self.children
        )

    @property
    def costs(self) -> Costs:
        """Costs of the module and all modules below it, on one rank."""
        every = list(self.inclusive())
        memory: Counter[str] = Counter()
        for module in every:
            memory.update(module.memory)
            memory.update(module.rest)
        state, saved = sum(memory[part] for part in _STATE), memory["saved"]
        return Costs(
            state,
            saved,
            memory.total() - state - saved,
            sum(op.seconds for m in every for op in m.ops),
            sum(t.seconds for m in every for t in m.transfers),
        )


class Costs(NamedTuple):
    """Costs of a module on one rank; bytes are those at the peak, and add up to it."""

    state_bytes: int  # weights, gradients and optimizer state
    saved_bytes: int  # for the backward pass
    other_bytes: int  # workspace, the batch, buffers of collectives
    compute_seconds: float
    comm_seconds: float

    def minus(self, other: Costs) -> Costs:
        """The difference of these costs and `other`."""
        return Costs(
            self.state_bytes - other.state_bytes,
            self.saved_bytes - other.saved_bytes,
            self.other_bytes - other.other_bytes,
            self.compute_seconds - other.compute_seconds,
            self.comm_seconds - other.comm_seconds,
        )


def module_tree(plan: Plan) -> Module:
    """The root of the plan's modules. A transfer belongs to the module that reads its value."""
    root = Module()
    ops = {op.name: op for op in plan.ops}
    for op in plan.ops:
        root.at(op.source.module).ops.append(op)
    for parameter in plan.parameters:
        root.at(parameter.name.rpartition(".")[0]).parameters.append(parameter)
    for transfer in plan.transfers:
        reader = ops.get(transfer.consumer) or ops.get(transfer.value)
        root.at(reader.source.module if reader else "").transfers.append(transfer)
    for share in shares(plan):
        if share.module is None:
            root.rest[share.part] += share.bytes
        else:
            root.at(share.module).memory[share.part] += share.bytes
    return root


def shares(plan: Plan) -> tuple[Share, ...]:
    """The bytes of the plan's memory by module; they add up to `peak_bytes`.

    Where the memory was not simulated, they are the tables' figures of parameters and operators,
    and the rest of the peak is not attributed: the batch, workspace, and saved tensors that tables
    have on edges. Where only the parts are known, or the tables have more, no module has any.
    """
    if plan.memory is not None:
        parts = plan.memory.parts().items()
        return plan.memory.shares or tuple(Share(None, part, size) for part, size in parts if size)
    memory: Counter[tuple[str, str]] = Counter()
    for parameter in plan.parameters:
        memory[parameter.name.rpartition(".")[0], "state"] += parameter.bytes
    for op in plan.ops:
        memory[op.source.module, "saved"] += op.saved_bytes
    rest = plan.peak_bytes - memory.total()
    if rest < 0:
        return (Share(None, "unknown", plan.peak_bytes),)
    own = (Share(module, part, Bytes(size)) for (module, part), size in memory.items() if size)
    return (*own, Share(None, "mixed", Bytes(rest))) if rest else tuple(own)


@dataclass(frozen=True, slots=True)
class ModuleRow(Generic[T]):
    """A row of the folded tree: a module, or `count` neighbours of which `path` is the first."""

    name: str
    path: str
    count: int
    content: T
    children: tuple[ModuleRow[T], ...]

    def visit(self, depth: int = 0) -> Iterator[tuple[int, ModuleRow[T]]]:
        """The node and all below it with their depths, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.visit(depth + 1)


def fold(root: Module, describe: Callable[[str, Module], T]) -> ModuleRow[T]:
    """The tree below `root` with the texts that `describe` gives for each path and module.

    Numbered neighbours with equal texts in their whole subtrees become one node, and a module that
    only contains one other is combined with it.
    """
    return _fold(root, "(model)", "", describe)


def _fold(
    module: Module, name: str, path: str, describe: Callable[[str, Module], T]
) -> ModuleRow[T]:
    if module.is_empty and len(module.children) == 1:
        ((child, only),) = module.children.items()
        joined = child if name == "(model)" else f"{name}.{child}"
        return _fold(only, joined, _join(path, child), describe)
    below = (*_children(module, path, describe), *_rest(module, path, describe))
    return ModuleRow(name, path, 1, describe(path, module), below)


def _rest(
    module: Module, path: str, describe: Callable[[str, Module], T]
) -> Iterator[ModuleRow[T]]:
    """Costs outside of modules, each part as a row of its own: `(communication)`."""
    for part, size in module.rest.items():
        only = Module(rest=Counter({part: size}))
        yield ModuleRow(f"({part_name(part)})", path, 1, describe(path, only), ())


def part_name(part: str) -> str:
    """The printed name of a part of memory."""
    return PARTS.get(part) or _TABLES[part]


def _children(
    module: Module, path: str, describe: Callable[[str, Module], T]
) -> Iterator[ModuleRow[T]]:
    blocks = []
    for name, child in module.children.items():
        if _is_list(child):
            for number, item in child.children.items():
                node = _fold(item, "", _join(path, f"{name}.{number}"), describe)
                blocks.append((f"{name}.", number, node))
        else:
            prefix, number = ("", name) if name.isdigit() else (name, "")
            blocks.append((prefix, number, _fold(child, "", _join(path, name), describe)))
    runs = groupby(blocks, key=lambda block: (block[0], block[1] != "", _reads(block[2])))
    for (prefix, numbered, _), found in runs:
        numbers, nodes = zip(*((number, node) for _, number, node in found), strict=True)
        first = nodes[0]
        name = prefix + (span(numbers) if numbered else "") + first.name
        yield ModuleRow(name, first.path, len(nodes), first.content, first.children)


def _reads(node: ModuleRow[T]) -> tuple[object, ...]:
    """All texts of a node except its path."""
    return node.name, node.count, node.content, tuple(_reads(child) for child in node.children)


def _is_list(module: Module) -> bool:
    children = module.children
    return module.is_empty and bool(children) and all(name.isdigit() for name in children)


def span(numbers: Iterable[str]) -> str:
    """Numbers of neighbours in short.

    >>> span(["0", "1", "2"]), span(["0", "2"])
    ('0-2', '0,2')
    """
    found = list(numbers)
    if len(found) == 1:
        return found[0]
    consecutive = int(found[-1]) - int(found[0]) + 1 == len(found)
    return f"{found[0]}-{found[-1]}" if consecutive else ",".join(found)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def moves_data(collective: str) -> bool:
    """Whether this step of a redistribution sends data."""
    return communication_named(collective.partition(" ")[0]) not in LOCAL


def kept_words(ops: Iterable[PlannedOp]) -> Counter[str]:
    """The operators that run once inside of recomputed segments, in the words of `ac=ops(...)`.

    Views, which take no time, are left out.
    """
    return Counter(op_word(op.kind) for op in ops if op.kept and op.seconds)


class Trade(NamedTuple):
    """Saved tensors that are kept, or not, and the time to compute them again, on one rank.

    * `bytes`: by the tables of the search, which add up;
    * `seconds`: of one step, with the redistribution of what is read again.
    """

    bytes: int
    seconds: float

    def without(self) -> str:
        """Recomputing them, as `"384.00 MiB less for 1.92 ms more (200 MiB per ms)"`."""
        return self._text("less", "more")

    def kept(self) -> str:
        """Keeping them, as `"384.00 MiB more for 1.92 ms less (200 MiB per ms)"`."""
        return self._text("more", "less")

    def _text(self, memory: str, time: str) -> str:
        size, milliseconds = self.bytes / 2**20, self.seconds * 1e3
        rate = f" ({size / milliseconds:,.3g} MiB per ms)" if milliseconds else ""
        return f"{size:,.2f} MiB {memory} for {milliseconds:,.2f} ms {time}{rate}"


def recomputed(
    ops: Iterable[PlannedOp],
    transfers: Iterable[PlannedTransfer],
    parameters: Collection[str],
) -> Trade | None:
    """The memory and seconds of all of these operators that run again; None if none does.

    `transfers` are those to these operators. Of `parameters`, whose gathers in the backward pass do
    not depend on recomputation, none counts.
    """
    again = [op for op in ops if op.runs_again]
    moved = (t for t in transfers if t.phase is Phase.RECOMPUTE and t.value not in parameters)
    seconds = sum(op.forward_seconds for op in again) + sum(t.seconds for t in moved)
    return Trade(sum(op.freed_bytes for op in again), seconds) if again else None


def kept(ops: Iterable[PlannedOp]) -> Trade:
    """The memory and seconds of the operators that run once inside of recomputed segments."""
    once = [op for op in ops if op.kept]
    return Trade(sum(op.saved_bytes for op in once), sum(op.forward_seconds for op in once))


def tiling_words(op: PlannedOp) -> str:
    """The split of the operator, such as `dp:batch tp:features`; `whole` for none."""
    return _without(op.splits, "-", op.layout, nothing="whole")


def stored(parameter: PlannedParameter) -> str:
    """The layout of the parameter, such as `dp:S(0) regathered`; `R` where every device has it."""
    layout = _without(parameter.layout.placements, "R", parameter.layout)
    return layout + " regathered" * parameter.regathered


def _without(per_axis: Iterable[object], plain: str, layout: Layout, nothing: str = "R") -> str:
    """`axis:choice` of the axes with another choice than `plain`."""
    named = zip(layout.mesh.names, map(str, per_axis), strict=True)
    return " ".join(f"{axis}:{text}" for axis, text in named if text != plain) or nothing
