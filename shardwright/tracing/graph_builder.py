"""Builds the `Graph` from an exported program: names, sources, live code, autograd facts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from shardwright.ir.graph import (
    Arg,
    Graph,
    Leaf,
    LeafKind,
    Op,
    Ref,
    Symbol,
    Tensor,
    verify,
)
from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.rules.mixtures.dense_experts import dense_experts, dense_experts_note
from shardwright.tracing.arguments import signature_of
from shardwright.tracing.call import CaptureError, rebuild_outputs
from shardwright.tracing.decompose.cached_decompositions import Functional
from shardwright.tracing.export.export import FlatCall
from shardwright.tracing.export.kernels import UNIFORM
from shardwright.tracing.export.operators import OVERLOAD
from shardwright.tracing.export.source_location import (
    PREFIX,
    error,
    part_of,
    require_fixed_sizes,
    source_of,
)
from shardwright.tracing.gradients.autograd_probe import AutogradProbe
from shardwright.tracing.outputs import OutputTree
from shardwright.tracing.renumber import renumbered
from shardwright.tracing.rewrites.batched_attention import with_batched_attention
from shardwright.tracing.rewrites.canonical import canonical
from shardwright.tracing.rewrites.constant_masks import without_constant_masks
from shardwright.tracing.rewrites.dense_mixtures import with_dense_mixtures
from shardwright.tracing.rewrites.joined_slices import with_joined_slices
from shardwright.tracing.rewrites.loss_casts import with_loss_casts
from shardwright.tracing.rewrites.mixtures import with_mixtures
from shardwright.tracing.rewrites.norms import with_fused_norms

DROPOUT = "shardwright.dropout.default"  # args: x, probability, number of this draw in the graph
_SPARSE = {  # the argument that requests a sparse gradient, whose values a dense one has too
    "aten.embedding.default": 4,
    "aten._embedding_bag.default": 5,
    "aten.embedding_bag.default": 5,
    "aten.embedding_bag.padding_idx": 5,
}
_QUIET = (  # operators that may draw random numbers; they are decomposed if they do
    UNIFORM,
    "aten.scaled_dot_product_attention.default",
    "aten.lstm.input",
    "aten.gru.input",
    "aten.rnn_tanh.input",
    "aten.rnn_relu.input",
)


@dataclass(frozen=True)
class Captured:
    """A graph with the Python objects that belong to it: constants, outputs, opaque modules."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    output_keys: tuple[str, ...]
    opaque: Mapping[str, Any] = field(default_factory=dict)  # by key
    signature: inspect.Signature | None = None  # of the module's forward
    returned: OutputTree | None = None  # where the graph returns all that the module does

    def outputs(self, tensors: Sequence[torch.Tensor], device: torch.device) -> Any:
        """The results of a call whose graph returned these tensors."""
        if self.returned is None:
            return rebuild_outputs(self.output_keys, tensors)
        return self.returned.with_tensors(tensors, device)


def build(
    program: Functional,
    call: FlatCall,
    numerics: Numerics = EXACT,
    note: str = "",
    opaque: Mapping[str, Any] = MappingProxyType({}),
) -> Captured:
    """The graph of an exported program; raises `CaptureError` for what it cannot express."""
    builder = _Builder(call.model, opaque)
    constants = builder.add_leaves(program, call)
    for node in program.graph.nodes:
        if node.op == "call_function":
            builder.add_node(node)
    outputs, updates = builder.add_outputs(program)
    if changed := call.returned.updated:
        at = len(outputs) - len(changed)
        outputs, updates = outputs[:at], (*updates, *zip(changed, outputs[at:], strict=True))
    graph = Graph(
        leaves=tuple(builder.leaves),
        ops=tuple(builder.ops),
        outputs=outputs,
        values=tuple(builder.tensors.values()),
        updates=updates,
        constants=tuple(call.constants.items()),
        note=note,
        numerics=numerics,
    )
    graph = with_mixtures(with_joined_slices(canonical(without_constant_masks(graph))))
    dense = dense_experts(graph)
    graph = with_batched_attention(with_dense_mixtures(graph))
    if numerics.norms == "fused":
        graph = with_fused_norms(graph)
    if numerics.logits == "fused":
        graph = with_loss_casts(graph)
    graph, names = renumbered(_without_dead_code(graph))
    notes = (note, dense_experts_note(graph, dense), _note_on_sparse(program, call.model))
    graph = replace(graph, note="; ".join(filter(None, notes)))
    constants = {names[old]: value for old, value in constants.items() if old in names}
    verify(graph)
    signature = signature_of(call.model)
    returned = call.returned
    return Captured(graph, constants, returned.keys, dict(opaque), signature, returned.whole)


def _note_on_sparse(program: Functional, model: nn.Module) -> str:
    """A sentence on the embeddings that ask for sparse gradients; empty if none does."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    names += [source_of(node).module for node in program.graph.nodes if _asks_for_sparse(node)]
    if not names:
        return ""
    where = ", ".join(name or "the model" for name in dict.fromkeys(names))
    return (
        f"gradients of {where} are dense, with the same values: sparse=True is not used, and"
        " optimizers of sparse gradients alone, as SparseAdam, cannot train them"
    )


class _Builder:
    """The graph under construction, node by node."""

    def __init__(self, model: nn.Module, opaque: Mapping[str, Any]) -> None:
        self.model = model
        self.observer = AutogradProbe(model, opaque)
        self.leaves: list[Leaf] = []
        self.ops: list[Op] = []
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[fx.Node, str | tuple[str, ...]] = {}  # a list of results is a tuple
        self.draws = 0  # of random numbers

    def add_leaves(self, program: Functional, call: FlatCall) -> dict[str, torch.Tensor]:
        """Add parameters, buffers, inputs and constants; return the values of the last."""
        aliases = _all_names(self.model)
        paths = iter(call.paths)
        constants: dict[str, torch.Tensor] = {}
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        for spec in program.graph_signature.input_specs:
            node, value = nodes[spec.arg.name], nodes[spec.arg.name].meta["val"]
            requires_grad = False
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                assert spec.target is not None
                keys = aliases[spec.target.removeprefix(PREFIX)]
                kind = LeafKind.BUFFER
                if spec.kind is InputKind.PARAMETER:
                    kind = LeafKind.PARAMETER
                    requires_grad = self.model.get_parameter(keys[0]).requires_grad
                name = keys[0]
            elif spec.kind is InputKind.USER_INPUT:
                keys, kind = (next(paths),), LeafKind.INPUT
                name = keys[0]
                requires_grad = name in call.differentiable
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                assert spec.target is not None
                kind = LeafKind.CONSTANT
                name = f"constant.{len(constants)}"
                keys = (name,)
                constants[name] = program.constants[spec.target].detach()
            else:
                raise CaptureError(f"the model takes an input of kind {spec.kind.name}: {spec.arg}")
            self.names[node] = name
            if name not in self.tensors:  # tied weights come once for each of their names
                self.leaves.append(Leaf(name, kind, keys))
                self._describe(name, value, requires_grad)
        return constants

    def add_node(self, node: fx.Node) -> None:
        """Add the operator of a node, or only a name for what it leaves unchanged."""
        if node.target is operator.getitem:
            results, index = self.names[node.all_input_nodes[0]], node.args[1]
            assert isinstance(results, tuple) and isinstance(index, int)
            self.names[node] = results[index]
            return
        target = str(node.target)
        if not isinstance(node.target, OVERLOAD):
            raise error(
                node,
                f"{target} is no operator that a graph can have: of those that take functions,"
                " cond, scan and map are captured; write a loop with a fixed number of steps, or"
                " scaled_dot_product_attention with a mask for flex_attention",
            )
        if target == "aten.cat.default" and (only := self._only_nonempty_operand(node)) is not None:
            self.names[node] = only
            return
        if target in ("aten.alias.default", "aten.detach.default") and not self._blocks_gradient(
            node
        ):
            self.names[node] = self.names[node.all_input_nodes[0]]
            return
        if target == "aten.native_dropout.default":
            self._add_dropout(node)
            return
        if torch.Tag.nondeterministic_seeded in node.target.tags and target not in _QUIET:
            raise error(
                node,
                f"{target} draws random numbers of its own, which no two ranks could agree on; draw"
                " with torch.rand, randn, randint, bernoulli or dropout",
            )
        if target == "aten.instance_norm.default" and node.args[3] is not None and node.args[5]:
            raise error(
                node,
                "instance norm with track_running_stats=True changes its buffers unseen by export,"
                " and each rank would keep the statistics of its own tile; use"
                " track_running_stats=False",
            )
        values = node.meta["val"]
        if target == "aten.lstm.input":
            require_states(node, values)
        several = isinstance(values, tuple | list)
        require_fixed_sizes(node, values if several else (values,))
        results = tuple(f"{node.name}.{i}" for i in range(len(values))) if several else (node.name,)
        try:
            args = tuple(self._arg(a) for a in _dense_arguments(node))
        except CaptureError as e:
            raise error(node, f"{target}: {e}") from e
        if target == UNIFORM:
            args = (args[0], self.draws)
            self.draws += 1
        kwargs = tuple((k, self._arg(v)) for k, v in node.kwargs.items() if k != "pin_memory")
        op = Op(node.name, target, args, kwargs, results, source_of(node), part_of=part_of(node))
        try:
            self._add(op, values if several else (values,))
        except (NotImplementedError, RuntimeError) as e:
            raise error(
                node,
                f"{target} does not tell what it gives, or what of it has a gradient, without"
                f" computing it ({_first_line(e)}); use another operator, or compute it outside the"
                " model",
            ) from e
        self.names[node] = results if several else results[0]

    def add_outputs(
        self, program: Functional
    ) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """The names of outputs, and of buffers with their new contents."""
        (node,) = (n for n in program.graph.nodes if n.op == "output")
        outputs, updates = [], []
        for spec, value in zip(program.graph_signature.output_specs, node.args[0], strict=True):
            name = self.names[value]
            assert isinstance(name, str)
            if spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(name)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                updates.append((str(spec.target).removeprefix(PREFIX), name))
            else:
                inputs = {n.name: self.names.get(n, n.name) for n in program.graph.nodes}
                target = str(spec.target)
                changed = inputs.get(target, target.removeprefix(PREFIX))
                raise CaptureError(
                    f"{source_of(value)}: the model changes {changed} in place, which is no buffer;"
                    " work on a copy (x = x.clone()) instead"
                )
        return tuple(outputs), tuple(updates)

    def _add(self, op: Op, values: Any) -> None:
        facts = self.observer.facts(op, self.tensors, values)
        operands = list(dict.fromkeys(op.operands))
        for i, (name, value) in enumerate(zip(op.outputs, values, strict=True)):
            at = facts.alias_of[i]
            alias = operands[at] if at >= 0 else ""
            self._describe(name, value, facts.requires_grad[i], alias)
        saves = [operands[i] for i in facts.saved_operands]
        saves += [op.outputs[i] for i in facts.saved_results]
        self.ops.append(
            replace(op, saves=tuple(saves), extra_saved=facts.extra_saved, flop=facts.flop)
        )

    def _add_dropout(self, node: fx.Node) -> None:
        """Dropout as an operator of ours: its mask is a function of seed, step and global index."""
        _, probability, train = node.args
        name = self.names[node.all_input_nodes[0]]
        assert isinstance(name, str) and isinstance(probability, float | int)
        if train is False or probability == 0:
            self.names[node] = (name, "")
            return
        op = Op(
            node.name,
            DROPOUT,
            (Ref(name), float(probability), self.draws),
            (),
            (node.name,),
            source_of(node),
        )
        self.draws += 1
        source = self.tensors[name]
        mask_bytes = source.num_elements if source.requires_grad else 0
        self.tensors[node.name] = replace(source, name=node.name, alias_of="")
        self.ops.append(replace(op, extra_saved=mask_bytes, part_of=part_of(node)))
        self.names[node] = (node.name, "")  # nothing reads the mask

    def _describe(self, name: str, value: Any, grad: bool = False, alias_of: str = "") -> None:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"%{name} is a {type(value).__name__}; only tensors can be planned")
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors[name] = Tensor(name, tuple(value.shape), dtype, grad, alias_of)

    def _arg(self, arg: Any) -> Arg:
        """An argument as a graph holds it: names, numbers, texts and symbols."""
        if isinstance(arg, fx.Node):
            name = self.names[arg]
            assert isinstance(name, str)
            return Ref(name)
        if isinstance(arg, list | tuple):
            return tuple(self._arg(a) for a in arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        for kind, known in _SYMBOLS.items():
            if isinstance(arg, known):
                name = "here" if kind == "device" else str(arg).removeprefix("torch.")
                return Symbol(kind, name)
        raise CaptureError(f"the argument {arg} is a {type(arg).__name__}, which no plan can hold")

    def _only_nonempty_operand(self, node: fx.Node) -> str | None:
        """The operand that a `cat` returns unchanged, if all its other operands are empty."""
        parts = _nonempty_arguments(node)[0]
        name = self.names[parts[0]] if len(parts) == 1 else None
        return name if isinstance(name, str) else None

    def _blocks_gradient(self, node: fx.Node) -> bool:
        """Whether removing this `detach` would let a gradient pass."""
        name = self.names[node.all_input_nodes[0]]
        assert isinstance(name, str)
        return str(node.target) == "aten.detach.default" and self.tensors[name].requires_grad


_SYMBOLS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


def require_states(node: fx.Node, values: Sequence[torch.Tensor]) -> None:
    """Raise `CaptureError` where torch gives the states of an LSTM a shape that they do not have.

    `torch.export` of torch 2.11 does on CPUs: (layers, 1, batch, hidden).
    """
    pair = node.args[1]
    assert isinstance(pair, list | tuple)
    states = [given.meta["val"] for given in pair if isinstance(given, fx.Node)]
    if any(one.dim() != given.dim() for one, given in zip(values[1:], states, strict=True)):
        raise CaptureError(  # no module is named, because keeping it whole would not help
            f"{source_of(node)}: torch.export of torch {torch.__version__} gives the states of an"
            " LSTM a wrong shape; take a newer torch"
        )


def _first_line(error: Exception) -> str:
    """The first sentence of a torch error."""
    return str(error).strip().partition("\n")[0].partition(". ")[0]


def _nonempty_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a node; for `cat`, without the empty tensors that a fresh cache starts with."""
    if str(node.target) != "aten.cat.default":
        return node.args
    parts = [p for p in node.args[0] if p.meta["val"].numel() > 0]  # type: ignore[union-attr]
    return (parts or node.args[0], *node.args[1:])


def _asks_for_sparse(node: fx.Node) -> bool:
    """Whether an operator is to give a sparse gradient."""
    at = _SPARSE.get(str(node.target))
    return at is not None and len(node.args) > at and bool(node.args[at])


def _dense_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a node, without the request for a sparse gradient."""
    args, at = _nonempty_arguments(node), _SPARSE.get(str(node.target))
    return args if at is None or len(args) <= at else (*args[:at], False, *args[at + 1 :])


def _all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer, by each of its names, in the module's order."""
    by_identity: dict[int, list[str]] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        by_identity.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_identity[id(tensor)]) for name, tensor in named}


def _without_dead_code(graph: Graph) -> Graph:
    """The graph of the operators that outputs and updates need; all parameters and inputs stay."""
    needed = {*graph.outputs, *(name for pair in graph.updates for name in pair)}
    ops = []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            needed.update(op.operands)
            needed.update(op.outputs)
            ops.append(op)
    always = (LeafKind.PARAMETER, LeafKind.INPUT)
    leaves = [leaf for leaf in graph.leaves if leaf.kind in always or leaf.name in needed]
    needed.update(leaf.name for leaf in leaves)
    return replace(
        graph,
        leaves=tuple(leaves),
        ops=tuple(reversed(ops)),
        values=tuple(value for value in graph.values if value.name in needed),
    )
