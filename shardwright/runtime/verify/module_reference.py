"""Runs a module itself, eagerly, to compare a captured graph or a plan with it.

The module runs as its author wrote it: its own operators, its own autograd, its own hooks. Two
things are replaced. Floating-point numbers are float64, also where the module casts to a narrower
dtype, so that a wrong gradient stands out from rounding. And random operators return what the
captured graph draws: the same elements are dropped on both sides.

Every replacement happens below autograd, in a `TorchDispatchMode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx, nn
from torch.func import functional_call

from shardwright.runtime.graph_modules.opaque_module import OpaqueModule
from shardwright.runtime.random.dropout import GlobalAttention, GlobalDropout, GlobalUniform
from shardwright.runtime.random.fused_rng import seed_of, seeded
from shardwright.runtime.sharded_ops.chunked import ChunkedDroppedMlp
from shardwright.tracing.call import select_outputs
from shardwright.tracing.decompose.tables import random_ops
from shardwright.tracing.patched_forward import replaced_forward
from shardwright.tracing.torch_private import TorchDispatchMode, tree_map

aten: Any = torch.ops.aten
_FLOAT64 = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_UNIFORM = torch.ops.shardwright.uniform.default
_DRAWN = random_ops.table()
_DRAWN_IN_PLACE = {
    aten.bernoulli_.float: _DRAWN[aten.bernoulli.p],
    aten.bernoulli_.Tensor: lambda x, p, **options: _DRAWN[aten.bernoulli.default](p, **options),
    aten.uniform_.default: _DRAWN[aten.uniform.default],
    aten.normal_.default: _DRAWN[aten.normal_functional.default],
    aten.exponential_.default: _DRAWN[aten.exponential.default],
}


class IncomparableError(ValueError):
    """A module that cannot be run beside its captured graph."""


@dataclass(frozen=True)
class Outcome:
    """One forward and backward pass of a module: what a plan must reproduce.

    `gradients` and `parameters` (after one optimizer step) go by each parameter's first name,
    `buffers` by all names.
    """

    loss: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    leaves: Mapping[str, torch.Tensor]  # the parameters that were differentiated


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of `outputs`, each element of which has a weight of its own."""
    found = torch.zeros(())
    for output in outputs:
        if not output.is_floating_point():
            continue
        if output.dim():
            weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
            output = (output * weights.view(output.shape)).sum()
        found = found + output
    return found


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy on the CPU, in float64 if it is narrower."""
    return tensor.detach().cpu().to(_FLOAT64.get(tensor.dtype, tensor.dtype), copy=True)


def run_module(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    program: fx.GraphModule,
    state: torch.Tensor,
    *,
    wide: bool,
) -> Outcome:
    """One training pass of `model`, in float64 if `wide`, on copies of its parameters and buffers.

    `program` is that of the captured graph for one device and `state` its random state: random
    operators of the module return what the program draws. Raises `IncomparableError` where the
    module draws something else than the program, and whatever the module itself raises.
    """
    leaves: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in leaves:
            copy = widened(tensor) if wide else tensor.detach().cpu().clone()
            leaves[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return leaves[id(tensor)]

    parameters = {k: copied(p) for k, p in model.named_parameters(remove_duplicate=False)}
    buffers = {k: copied(b) for k, b in model.named_buffers(remove_duplicate=False)}
    everything = {**parameters, **buffers}
    mode = _Reference(program, state, wide=wide)
    with torch.enable_grad(), mode.opaque_modules(model), mode:
        returned = functional_call(model, everything, tuple(args), dict(kwargs))
        outputs = select_outputs(returned)[1]
        loss = loss_of(outputs)
        loss.backward()
    for leaf in leaves.values():
        if leaf.grad is not None and leaf.grad.is_sparse:  # of an embedding; a graph's are dense
            leaf.grad = leaf.grad.to_dense()
    mode.check_end()
    firsts = [key for key, _ in model.named_parameters()]
    return Outcome(
        loss=loss.detach(),
        outputs=tuple(output.detach() for output in outputs),
        gradients={key: parameters[key].grad for key in firsts},
        buffers={key: everything[key].detach() for key in buffers},
        leaves={key: parameters[key] for key in firsts},
    )


@final
class _Reference(TorchDispatchMode):
    """Widens dtypes and replaces random operators, operator by operator, below autograd."""

    def __init__(self, program: fx.GraphModule, state: torch.Tensor, *, wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.wide = state, wide
        modules = [
            program.get_submodule(str(node.target))
            for node in program.graph.nodes
            if node.op == "call_module"
        ]
        self.expected = [
            m.dropout if isinstance(m, GlobalAttention | ChunkedDroppedMlp) else m
            for m in modules
            if isinstance(m, GlobalDropout | GlobalUniform | GlobalAttention | ChunkedDroppedMlp)
        ]
        self.opaque: dict[str, list[OpaqueModule]] = {}
        for m in modules:
            if isinstance(m, OpaqueModule):
                self.opaque.setdefault(m.call.path, []).append(m)
        self.drawn = 0  # of those expected
        self.paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        if func in _DRAWN_IN_PLACE:
            return self._drawn_in_place(func, args, kwargs)
        if self.wide:
            written = _written(func, args, kwargs)
            args, kwargs = tree_map(lambda leaf: _wide(leaf, written), (args, kwargs))
        if func is aten.linalg_pinv.atol_rtol_tensor:
            return _elsewhere(func, args, kwargs)
        if self.wide and func is aten._grouped_mm.default:
            return _grouped_product(*args, **kwargs)
        if func is _UNIFORM:
            return self._uniform(*args, **kwargs)
        if func is aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if func in _DRAWN:
            with self:
                return _DRAWN[func](*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args):
            raise IncomparableError(f"the module draws random numbers by {func}")
        return func(*args, **kwargs)

    @contextmanager
    def opaque_modules(self, model: nn.Module) -> Iterator[None]:
        """Inside, sub-modules that are kept whole draw the same numbers as in the program."""
        with ExitStack() as stack:
            for path, calls in self.opaque.items():
                stack.enter_context(self._seeded(model.get_submodule(path), iter(calls)))
            yield

    @contextmanager
    def _seeded(self, module: nn.Module, calls: Iterator[OpaqueModule]) -> Iterator[None]:
        """A context in which each call of an opaque module draws what its program draws."""
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = next(calls, None)
            if call is None:
                raise IncomparableError(
                    f"{type(module).__name__} is called more often than captured"
                )
            seed = seed_of(self.state, "module", call.number)
            before, self.paused = self.paused, True
            try:
                with seeded(seed, torch.device("cpu")):
                    return run(*args, **kwargs)
            finally:
                self.paused = before

        with replaced_forward(module, forward):
            yield

    def check_end(self) -> None:
        """Raise `IncomparableError` if the program draws more than the module did."""
        if self.drawn < len(self.expected):
            raise IncomparableError(
                f"the module drew random numbers {self.drawn} times, its graph draws them"
                f" {len(self.expected)} times"
            )

    def _next(self, kind: type[nn.Module], size: Sequence[int]) -> Any:
        """The program's next random numbers, which must be of this kind and size."""
        while self.drawn < len(self.expected):
            found = self.expected[self.drawn]
            self.drawn += 1
            if isinstance(found, GlobalDropout) and found.probability >= 1.0:
                continue  # torch draws nothing for it
            if isinstance(found, kind):
                return found
            break
        raise IncomparableError(
            f"the module draws {tuple(size)} random numbers where its captured graph draws others"
        )

    def _uniform(self, size: Sequence[int], number: int, **options: Any) -> torch.Tensor:
        module = self._next(GlobalUniform, size)
        if tuple(module.size) != tuple(size):
            raise IncomparableError(
                f"the module draws {tuple(size)} random numbers, its captured graph {module.size}"
            )
        drawn: torch.Tensor = module(self.state)
        return drawn.to(options.get("dtype") or drawn.dtype)

    def _keep(self, like: torch.Tensor, probability: float) -> torch.Tensor:
        """The mask of elements that the program's next dropout keeps."""
        module = self._next(GlobalDropout, like.shape)
        if abs(module.probability - probability) > 1e-12:
            raise IncomparableError(
                f"the module drops out with probability {probability:.6g}, its captured graph with"
                f" {module.probability:.6g}"
            )
        drawn = module.bits(self.state).numel()
        if drawn != like.numel():
            raise IncomparableError(
                f"the module drops out of {tuple(like.shape)}, its captured graph of {drawn} other"
                " elements; it may draw numbers that nothing reads"
            )
        ones = torch.ones(like.shape, dtype=torch.float64)
        training, module.training = module.training, True
        try:
            dropped: torch.Tensor = module(ones, self.state)
        finally:
            module.training = training
        return dropped != 0

    def _dropout(
        self, x: torch.Tensor, probability: float, train: bool | None = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False or probability in (0.0, 1.0):
            found: tuple[torch.Tensor, torch.Tensor] = aten.native_dropout.default(
                x, probability, train
            )
            return found
        keep = self._keep(x, probability)
        return torch.where(keep, x * (1.0 / (1.0 - probability)), 0.0), keep

    def _drawn_in_place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """A tensor filled with random numbers; torch's dropout on CPUs is such a draw."""
        x: torch.Tensor = args[0]
        at = self.drawn
        while at < len(self.expected) and getattr(self.expected[at], "probability", 0.0) >= 1.0:
            at += 1
        following = self.expected[at] if at < len(self.expected) else None
        if func is aten.bernoulli_.float and isinstance(following, GlobalDropout):
            keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return x.copy_(self._keep(x, 1.0 - keep))
        with self:
            return x.copy_(_DRAWN_IN_PLACE[func](*args, **kwargs))


def _elsewhere(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The call on a thread that nothing watches.

    In a dispatch mode torch ignores that a tensor is conjugated lazily, as inside of this operator.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.no_grad()(func), *args, **kwargs).result()


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """`a @ b` for each group, in float64, which torch's operator does not take.

    `offs` are the ends of the groups along the rows of `a` (R K, G K N -> R N), along the columns
    of `b` (G M K, K C -> M C), or along what is summed (M S, S N -> G M N).
    """
    if offs is None:
        return torch.bmm(a, b)
    ends = offs.tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    if a.dim() == 2:
        found = a.new_zeros(a.shape[0], b.shape[-1])
        for group, (i, j) in enumerate(spans):
            found[i:j] = a[i:j] @ b[group]
        return found
    found = a.new_zeros(a.shape[1], b.shape[1])
    for group, (i, j) in enumerate(spans):
        found[:, i:j] = a[group] @ b[:, i:j]
    return found


def _draws_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of a random operator draws nothing: attention without dropout."""
    names = [one.name for one in func._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return (args[at] if at < len(args) else 0.0) == 0.0


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Identities of the tensors that an operator writes; they keep their dtype."""
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False)]
    given += [(one, kwargs[one.name]) for one in schema if one.name in kwargs]
    found: list[Any] = []
    for one, value in given:
        if one.alias_info is not None and one.alias_info.is_write:
            found += value if isinstance(value, list | tuple) else [value]
    return frozenset(map(id, found))


def _wide(leaf: Any, written: frozenset[int]) -> Any:
    """An argument of an operator in float64, if it is a narrower tensor or dtype."""
    if isinstance(leaf, torch.dtype):
        return _FLOAT64.get(leaf, leaf)
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _FLOAT64 and id(leaf) not in written:
        return leaf.to(_FLOAT64[leaf.dtype])
    return leaf
