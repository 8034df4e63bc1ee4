"""Inlines `torch.cond`, `scan` and `map`, higher-order operators, into an exported program.

Export keeps the functions that they are given as graphs of their own. `scan` and `map` have as many
steps as a fixed dimension is long, so their steps are written one after the other. Of `cond`
both branches are computed, and `where` selects: operands of the branch that is not taken get no
gradient, also where its derivative is not finite.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.dead_nodes import remove_dead_nodes
from shardwright.tracing.export.compiler_questions import answered_by_torch
from shardwright.tracing.export.operators import OVERLOAD
from shardwright.tracing.export.patches import Patches
from shardwright.tracing.export.source_location import source_of
from shardwright.tracing.torch_private import without_function_modes

_MOST_NODES = 20_000  # of all steps of a loop
_META = ("nn_module_stack", "stack_trace", "torch_fn")  # names the user's line
_HIGHER_ORDER = "torch._higher_order_ops"
aten: Any = torch.ops.aten
_inside: ContextVar[bool] = ContextVar("_inside", default=False)
_patches = Patches()


def inline_control_flow(program: ExportedProgram, updated: Sequence[str] = ()) -> None:
    """Replace each such operator of `program`, in place, by the operators of its functions.

    `updated` names parameters that the model changes in place, whose new values functions that are
    traced apart do not read: such a model is refused.

    Raises `CaptureError`, with the user's line, for random numbers in a branch of `cond` and for
    loops that are too long.
    """
    owners = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    changed = False
    for owner in reversed(owners):  # a function before those that call it
        for node in list(owner.graph.nodes):
            inlined = _INLINED.get(str(node.target)) if node.op == "call_function" else None
            if inlined is not None and updated:
                raise CaptureError(
                    f"{source_of(node)}: the model changes its parameter {updated[0]} in place, of"
                    f" which torch.{node.target} would read the old value; change it after the"
                    " step",
                    refused=True,
                )
            if inlined is not None:
                _replace(owner, node, inlined)
                changed = True
        if changed:
            remove_dead_nodes(owner.graph)
            owner.recompile()


def _replace(owner: fx.GraphModule, node: fx.Node, inlined: Callable[..., list[fx.Node]]) -> None:
    with owner.graph.inserting_before(node):
        results = inlined(_Writer(owner, node), *node.args)
    for user in list(node.users):  # each selects one result
        at = user.args[1]
        assert isinstance(at, int)
        user.replace_all_uses_with(results[at])
        owner.graph.erase_node(user)
    owner.graph.erase_node(node)


@contextmanager
def traced_control_flow() -> Iterator[None]:
    """A context in which such functions are traced without the modes that watch a call.

    Torch compiles them, and modes would be compiled with them. They may have no effects.
    """
    with _patches.applied(_patch):
        token = _inside.set(True)
        try:
            yield
        finally:
            _inside.reset(token)


def _patch() -> Callable[[], None]:
    """Keep torch's compiler of control flow out of the modes that watch a trace."""
    compiled: Any = torch.compile

    def compile(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = compiled(function, *args, **kwargs)
        of = getattr(function, "__module__", None) or ""
        if not _inside.get() or not of.startswith(_HIGHER_ORDER):
            return made

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            with without_function_modes(__name__.partition(".")[0]), answered_by_torch():
                return made(*args, **kwargs)

        return unwatched

    setattr(torch, "compile", compile)  # noqa: B010  # mypy takes no assignment to a function
    return lambda: setattr(torch, "compile", compiled)


class _Writer:
    """Inserts operators in place of a node of `owner`, with their shapes and its line."""

    def __init__(self, owner: fx.GraphModule, node: fx.Node) -> None:
        self.owner = owner
        self.node = node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.owner.graph.call_function(target, args, kwargs)
        known = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta = {name: self.node.meta[name] for name in _META if name in self.node.meta}
        made.meta["val"] = target(*known[0], **known[1])
        return made

    def function(self, of: fx.Node) -> fx.GraphModule:
        found: fx.GraphModule = getattr(self.owner, str(of.target))
        return found

    def inline(self, body: fx.GraphModule, operands: Sequence[Any]) -> list[fx.Node]:
        """Copies of the operators of `body` on `operands`; its results."""
        given = iter(operands)
        env: dict[fx.Node, Any] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return list(fx.node.map_arg(node.args[0], env.__getitem__))
            elif node.op == "get_attr":  # the graph of a region without gradients, or a constant
                env[node] = self._attribute(body, node)
            elif not isinstance(node.target, OVERLOAD) and node.target is not operator.getitem:
                env[node] = self.owner.graph.node_copy(node, env.__getitem__)
            else:
                args = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = self.call(node.target, *args[0], **args[1])
        raise AssertionError("a function's graph has an output")

    def _attribute(self, body: fx.GraphModule, node: fx.Node) -> fx.Node:
        value, name = getattr(body, str(node.target)), f"{node.target}_of_{self.node.name}"
        while hasattr(self.owner, name):
            name += "_"
        setattr(self.owner, name, value)
        made = self.owner.graph.get_attr(name)
        made.meta = dict(node.meta)
        return made


def _cond(
    writer: _Writer, taken: Any, yes: fx.Node, no: fx.Node, operands: Sequence[Any]
) -> list[fx.Node]:
    """Both branches, and a selection between their results."""
    bodies = [writer.function(yes), writer.function(no)]
    if any(_draws(node) for body in bodies for node in body.graph.nodes):
        raise CaptureError(
            f"{source_of(writer.node)}: a branch of torch.cond draws random numbers, and both"
            " branches of a captured graph would; draw them before, and give them to the branch",
            refused=True,
        )
    if not isinstance(taken, fx.Node):  # known when the model is traced
        return writer.inline(bodies[0 if taken else 1], operands)
    other = writer.call(aten.logical_not.default, taken)
    one, two = (
        writer.inline(body, [_gated(writer, when, operand) for operand in operands])
        for when, body in zip((taken, other), bodies, strict=True)
    )
    return [writer.call(aten.where.self, taken, a, b) for a, b in zip(one, two, strict=True)]


def _gated(writer: _Writer, when: fx.Node, operand: Any) -> Any:
    """`operand`, without its gradient where `when` is False."""
    value = operand.meta["val"] if isinstance(operand, fx.Node) else None
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return operand
    without = writer.call(aten.detach.default, operand)
    return writer.call(aten.where.self, when, operand, without)


def _scan(
    writer: _Writer,
    combine: fx.Node,
    init: Sequence[fx.Node],
    xs: Sequence[fx.Node],
    others: Sequence[Any],
) -> list[fx.Node]:
    """The body once for each step, with what is carried from one to the next."""
    body, steps = writer.function(combine), _steps(writer, combine, xs)
    carried, rows = list(init), []
    for step in range(steps):
        given = [writer.call(aten.select.int, x, 0, step) for x in xs]
        found = writer.inline(body, (*carried, *given, *others))
        carried, row = found[: len(init)], found[len(init) :]
        rows.append(row)
    stacked = [writer.call(aten.stack.default, list(one)) for one in zip(*rows, strict=True)]
    return [*carried, *stacked]


def _map(
    writer: _Writer, function: fx.Node, xs: Sequence[fx.Node], others: Sequence[Any]
) -> list[fx.Node]:
    return _scan(writer, function, (), xs, others)


def _steps(writer: _Writer, function: fx.Node, xs: Sequence[fx.Node]) -> int:
    """The number of steps of a loop over the first dimension of `xs`."""
    steps = int(xs[0].meta["val"].shape[0])
    nodes = len(writer.function(function).graph.nodes)
    if steps * nodes > _MOST_NODES:
        raise CaptureError(
            f"{source_of(writer.node)}: {writer.node.target} has {steps} steps of {nodes}"
            f" operators, and a captured graph, which has them in a row, at most {_MOST_NODES} in"
            " all; give it a shorter dimension, or loop over blocks of it",
            refused=True,
        )
    return steps


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


_INLINED: dict[str, Callable[..., list[fx.Node]]] = {
    "cond": _cond,
    "scan": _scan,
    "map_impl": _map,
}
