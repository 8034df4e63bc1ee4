"""The serial dataflow graph of one training step's forward pass.

Single assignment: every value is a leaf (parameter, buffer, constant or input)
or defined by exactly one operator. Targets are names of torch operators, as
text: this package does not import torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from shardwright.ir.layout import Bytes
from shardwright.ir.options.numerics import EXACT, Numerics

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "bool": 1,
}


# Targets of calls without an operator of torch, by their arguments.
FUNCTION = "shardwright.function.default"  # operands, key of the call, class and arguments
OPAQUE = "shardwright.opaque.default"  # operands, key of the call, class


class VerifyError(Exception):
    """A program that breaks an invariant of the IR: a bug in us, never in the user's model."""


class LeafKind(Enum):
    """The origin of a value that no operator defines."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Ref:
    """A value used as an operator's argument."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that only torch has a word for: a dtype, layout, memory format or device.

    The device is always `Symbol("device", "here")`: a graph does not say where it runs.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


Arg = None | bool | int | float | str | Ref | Symbol | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor argument whose elements are part of the graph: sizes were taken from them.

    Attributes:
        dtype: its dtype, as torch names it; integers or truth values.
        shape: its shape.
        elements: its elements, in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


Constant = None | bool | int | float | str | TensorValue  # an argument that is part of the graph


def whole_number(arg: Arg) -> int:
    """An argument that is a whole number in every call of its operator."""
    assert isinstance(arg, int), arg
    return arg


def whole_numbers(arg: Arg) -> list[int]:
    """An argument that is a tuple of whole numbers in every call of its operator."""
    assert isinstance(arg, tuple), arg
    return [whole_number(one) for one in arg]


@dataclass(frozen=True, slots=True)
class Source:
    """The place in the user's code that an operator comes from.

    Attributes:
        module: path of the module.
        file: file of its code.
        line: line of the call.
    """

    module: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.module or '(model)'} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph.

    Attributes:
        name: its name in the graph.
        shape: its global shape.
        dtype: its dtype, as torch names it.
        requires_grad: whether a gradient flows back through it.
        alias_of: the operand whose memory it shares (the result of a `view`, say); else empty.
        gathered_as: of a parameter that is cast before it is gathered, that dtype; else empty.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False
    alias_of: str = ""
    gathered_as: str = ""

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> Bytes:
        return Bytes(self.num_elements * ITEM_BYTES[self.dtype])

    def __str__(self) -> str:
        grad = "'" if self.requires_grad else ""
        return f"{self.dtype}{list(self.shape)}{grad}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that no operator defines.

    Attributes:
        name: its name in the graph.
        kind: parameter, buffer, input or constant.
        keys: the user's names: all names of a parameter in the module (tied weights have several),
            or the path of an input in the call, as `kwargs.input_ids`.
    """

    name: str
    kind: LeafKind
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Op:
    """One operator call.

    Attributes:
        name: its name in the graph.
        target: `namespace.name.overload`, for example `aten.mm.default`.
        args: positional arguments; tensors as references to values.
        kwargs: keyword arguments.
        outputs: names of its results.
        source: module, file and line of the user's code.
        saves: operands and results that autograd keeps for the backward pass.
        extra_saved: bytes that it keeps besides, such as a mask or a log-sum-exp.
        extra_rows: of the `extra_saved` of a mixture of experts, those that do not depend on the
            inner width of the experts.
        rule: its index notation where none is written, found by experiment or stated by the user;
            empty if there is none.
        part_of: the call that this operator is a part of, where that was decomposed at a cost; else
            empty.
        flop: of a module kept whole, forward and backward; 0 for other operators.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[str, ...]
    source: Source = Source()
    saves: tuple[str, ...] = ()
    extra_saved: int = 0
    extra_rows: int = 0
    rule: str = ""
    part_of: str = ""
    flop: int = 0

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the values read, in order of appearance, repeats included."""
        return tuple(_refs((*self.args, *(value for _, value in self.kwargs))))

    def with_operands(self, names: Sequence[str], **others: Any) -> Op:
        """The call with its operands, in order of appearance, replaced by `names`.

        `others` are other attributes to replace. Programs have a call for each operator and plan,
        so this copies the attributes, which takes a third of the time of `dataclasses.replace`.

        >>> op = Op("y", "aten.add.Tensor", (Ref("a"), 2, (Ref("b"),)), (), ("y",))
        >>> str(op.with_operands(["c", "d"], outputs=("z",)))
        '%z = aten.add.Tensor(%c, 2, [%d])'
        """
        left = iter(names)
        args = tuple([_with_refs(arg, left) for arg in self.args])
        kwargs = tuple([(key, _with_refs(value, left)) for key, value in self.kwargs])
        assert next(left, None) is None, "there is an operand for each name"
        made = object.__new__(Op)
        made.__dict__.update(
            self.__dict__, args=args, kwargs=kwargs, operands=tuple(names), **others
        )
        return made

    @property
    def kind(self) -> str:
        """The operator without namespace and overload.

        >>> Op("y", "aten.mm.default", (), (), ("y",)).kind
        'mm'
        """
        return self.target.split(".")[1]

    def __str__(self) -> str:
        given = [text_of(a) for a in self.args] + [f"{k}={text_of(v)}" for k, v in self.kwargs]
        outputs = ", ".join(f"%{name}" for name in self.outputs)
        return f"{outputs} = {self.target}({', '.join(given)})"


def _with_refs(arg: Arg, names: Iterator[str]) -> Arg:
    """An argument whose values are the next of `names`."""
    if isinstance(arg, Ref):
        return Ref(next(names))
    if isinstance(arg, tuple):
        return tuple([_with_refs(one, names) for one in arg])
    return arg


def argument(op: Op, index: int, name: str, default: Arg = None) -> Arg:
    """Positional argument `index`, or keyword `name`, or the default."""
    return op.args[index] if index < len(op.args) else dict(op.kwargs).get(name, default)


def with_argument(op: Op, index: int, name: str, value: Arg) -> Op:
    """The call with another value for the argument at `index`, or else for the keyword `name`."""
    if index < len(op.args):
        return replace(op, args=(*op.args[:index], value, *op.args[index + 1 :]))
    kwargs = tuple(pair for pair in op.kwargs if pair[0] != name)
    return replace(op, kwargs=(*kwargs, (name, value)))


def extra_scales_with(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """The value with which `extra_saved` scales when it is sharded.

    The first result (a mask, a log-sum-exp), unless more is kept than it has
    bytes: then a reduction keeps something of the size of its first operand.
    """
    first = op.outputs[0]
    if op.kind == "linear":  # its input in 8 bits
        return op.operands[0]
    if op.operands and op.extra_saved > tensors[first].bytes < tensors[op.operands[0]].bytes:
        return op.operands[0]
    return first


@dataclass(frozen=True)
class Graph:
    """A serial dataflow graph: leaves, then operators in topological order.

    Attributes:
        leaves: parameters, buffers, inputs and constants.
        ops: the operators, each with its operands, results and the user's file and line.
        outputs: names of the values that are returned.
        values: name, shape and dtype of every value.
        updates: pairs (buffer, value): the buffer's content after the step.
        constants: arguments of the call whose values are part of the graph, by path: those that
            are no tensors, and tensors that sizes were taken from.
        note: what was unusual about the capture; empty if nothing was.
        numerics: how far the graph departs from one device (`rng`, `batch_norm`, `precision`).
    """

    leaves: tuple[Leaf, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    values: tuple[Tensor, ...]
    updates: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, Constant], ...] = ()
    note: str = ""
    numerics: Numerics = EXACT

    @cached_property
    def tensor(self) -> dict[str, Tensor]:
        """Every value by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def op(self) -> dict[str, Op]:
        """Every operator by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> dict[str, Op]:
        """The operator that defines each value that is not a leaf."""
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Op, ...]]:
        """The operators that read each value, each once, in order."""
        found: dict[str, list[Op]] = {value.name: [] for value in self.values}
        for op in self.ops:
            for name in dict.fromkeys(op.operands):
                found[name].append(op)
        return {name: tuple(ops) for name, ops in found.items()}

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that get a gradient: those on which a returned value depends."""
        reached = {name for name in self.outputs if self.tensor[name].requires_grad}
        for op in reversed(self.ops):
            if not reached.isdisjoint(op.outputs):
                reached |= {name for name in op.operands if self.tensor[name].requires_grad}
        return frozenset(leaf.name for leaf in self.leaves_of(LeafKind.PARAMETER)) & reached

    def leaves_of(self, *kinds: LeafKind) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind in kinds)

    @cached_property
    def fingerprint(self) -> str:
        """Names the computation: equal for equal operators, shapes and names, wherever captured."""
        lines = [f"{leaf.name} {leaf.kind.value} {' '.join(leaf.keys)}" for leaf in self.leaves]
        lines += [str(op) for op in self.ops]
        lines += [f"{value.name}: {value}" for value in self.values]
        lines += [" ".join(self.outputs), str(self.updates)]
        lines += [] if str(self.numerics) == str(EXACT) else [str(self.numerics)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [
            f"%{leaf.name}: {self.tensor[leaf.name]} = {leaf.kind.value} {', '.join(leaf.keys)}"
            for leaf in self.leaves
        ]
        for op in self.ops:
            types = ", ".join(str(self.tensor[name]) for name in op.outputs)
            lines.append(f"{op}: {types}")
        lines += [f"update %{buffer} <- %{value}" for buffer, value in self.updates]
        lines.append("return " + ", ".join(f"%{name}" for name in self.outputs))
        return "\n".join(lines)


def verify(graph: Graph) -> None:
    """Raise `VerifyError` unless each value is described once and defined once before its use."""
    for name, count in Counter(value.name for value in graph.values).items():
        if count > 1:
            raise VerifyError(f"%{name} is described {count} times")
    described = set(graph.tensor)
    defined: set[str] = set()
    for name in (leaf.name for leaf in graph.leaves):
        _define(name, defined, described)
    for op in graph.ops:
        for name in op.operands:
            if name not in defined:
                raise VerifyError(f"{op}: reads %{name} before it is defined")
        for name in op.outputs:
            _define(name, defined, described)
    leaves = {leaf.name: leaf.kind for leaf in graph.leaves}
    for name in (*graph.outputs, *(value for _, value in graph.updates)):
        if name not in defined:
            raise VerifyError(f"%{name} is returned but never defined")
    for name, _ in graph.updates:
        if leaves.get(name) not in (LeafKind.BUFFER, LeafKind.PARAMETER):
            raise VerifyError(f"%{name} is updated but is no buffer and no parameter")
    if extra := described - defined:
        raise VerifyError(f"%{min(extra)} is described but never defined")


def _define(name: str, defined: set[str], described: set[str]) -> None:
    if name in defined:
        raise VerifyError(f"%{name} is defined twice")
    if name not in described:
        raise VerifyError(f"%{name} has no shape and dtype")
    defined.add(name)


def json_argument(arg: Arg, number: Mapping[str, int]) -> Any:
    """An argument as a JSON value: values by their `number`, dtypes and memory formats by name.

    Raises `ValueError` for another symbol, and `KeyError` for a value without a number.
    """
    if isinstance(arg, Ref):
        return {"value": number[arg.name]}
    if isinstance(arg, Symbol):
        if arg.kind not in ("dtype", "memory_format"):
            raise ValueError(f"{arg} is a {arg.kind}")
        return {arg.kind: arg.name}
    if isinstance(arg, tuple):
        return [json_argument(one, number) for one in arg]
    return arg


def _refs(args: tuple[Arg, ...]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def text_of(arg: Arg) -> str:
    """An argument as a graph prints it."""
    if isinstance(arg, tuple):
        return "[" + ", ".join(text_of(a) for a in arg) + "]"
    return str(arg)
