"""Follows the values of a call's inputs while the call is traced, where sizes depend on them.

A trace has no values. Some models take sizes from them all the same: from the grid sizes of their
images, from how many elements of a mask are True. Here what is computed from nothing but such
inputs is computed beside the trace too, on the example batch. What Python code reads of it is then
a number. Inputs of which it reads the values become constants of the plan, and a call with other
values is refused. The number of selected elements is a constant too, which operators check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import FrameType
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.tables.ctc import padded_arguments
from shardwright.tracing.values.raising_checks import line_of, running_frame, unraised
from shardwright.tracing.values.selection import all_true, expected, positions

_MOST_ELEMENTS = 2**20  # of a value that is computed beside the trace
_MOST_DECISIONS = 64
_FINITE = "numbers that are finite"  # an input that stands for what is not known yet is assumed
_OF_GRADIENTS = frozenset(("__set__", "requires_grad_", "retain_grad", "register_hook"))
_LOSSES = (F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.ctc_loss)
_ALWAYS: frozenset[str] = frozenset()  # the inputs of what is true of every batch
_FINITENESS = frozenset(("isfinite", "isinf", "isnan"))
_READS = frozenset(("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "numpy"))
_MADE = frozenset(
    (
        "arange", "zeros", "ones", "full", "empty", "tensor", "as_tensor", "eye", "linspace",
        "scalar_tensor", "meshgrid",
    )
)  # fmt: skip
_OF_SIZES = frozenset(
    (
        *_MADE, "view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_full",
        "new_empty", "narrow", "unfold", "tile", "pad", "interpolate", "unflatten", "topk", "chunk",
        "split", "roll", "rand", "randn",
    )
)  # fmt: skip
_OF_VALUES = frozenset(
    ("unique", "unique_consecutive", "bincount", "repeat_interleave", "tensor_split")
)  # functions whose results have sizes that depend on values
_OF_REDUCTIONS = ("weight", "ignore_index", "reduction")
_SELECTS = frozenset(("nonzero", "argwhere", "masked_select", "where"))


class ReadInputsError(Exception):
    """Raised when the model reads values of inputs that are no constants of the plan yet."""

    def __init__(self, names: frozenset[str], line: str) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names
        self.line = line


class _Known(NamedTuple):
    """A value beside the trace, the inputs that it is computed from, and its traced tensor."""

    value: Tensor
    inputs: frozenset[str]
    traced: Tensor  # kept, so that no other gets the same identity
    storage: int  # the address of the value's storage


@final
class KnownValues(TorchFunctionMode):
    """A mode in which functions of tensors with known values have known results.

    `given` are the inputs of the call as they are traced, by name, and `values` their values.
    `constants` are the values of constants of the plan, by name; the attribute has their tensors on
    `device`, with which the model is to be called. `data` has, afterwards, the inputs whose
    elements are looked up in tables or are targets of a loss: those differ from batch to batch.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._known: dict[int, _Known] = {}
        self._names = {id(tensor): name for name, tensor in given.items()}
        self._written: dict[int, frozenset[str]] = {}  # inputs of what was written, by storage
        self._spoiled: set[int] = set()  # storages of values that were overwritten unseen
        self._fixed = frozenset(constants)  # names
        # What no decision may depend on: numbers that differ from batch to batch.
        reals = (name for name, t in given.items() if t.is_floating_point())
        self._reals = frozenset((*reals, _FINITE))
        self._worker = ThreadPoolExecutor(1)  # a thread of its own traces nothing
        self._decisions: list[Tensor] = []
        self._of_masks: set[int] = set()  # truth values and counts that are computed from masks
        self._drawn: dict[int, Tensor] = {}  # numbers from 0 to 1, by identity
        self._sources: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # of selections, by identity
        self.data: set[str] = set()
        for name, tensor in given.items():
            if name in values and values[name].numel() <= _MOST_ELEMENTS:
                self._note(tensor, values[name], frozenset((name,)))
        self.used: set[str] = set()  # inputs that counts and decisions are computed from
        self._device = device
        self.constants = {
            name: self._constant(tensor, frozenset((name,))) for name, tensor in constants.items()
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__get__" and not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        self._note_data(func, args, kwargs)
        if name in _READS:
            return self._read(func, name, args, kwargs)
        if name in _OF_SIZES:
            own = 0 if name in _MADE else 1
            args = (*args[:own], *(self._numbers(arg) for arg in args[own:]))
            kwargs = {key: self._numbers(value) for key, value in kwargs.items()}
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._index(args[1]), *args[2:])
            if name == "__getitem__" and isinstance(args[1], Tensor):
                mask = self._of(args[1])
                if mask is not None and mask.value.dtype == torch.bool:
                    selected = self._selected(args[0], args[1], mask)
                    self._sources[id(selected)] = (args[0], args[1], selected)
                    return selected
            args = (args[0], self._with_positions(args[1]), *args[2:])
        if func is F.ctc_loss:
            source = self._sources.get(id(args[1])) if len(args) > 3 else None
            return func(
                *(args if source is None else padded_arguments(*source[:2], *args)), **kwargs
            )
        if (masked := self._reduced(func, name, args, kwargs)) is not None:
            return masked
        if name in _SELECTS and (found := self._chosen(name, args, kwargs)) is not None:
            return found
        known_inputs = self._all_known(args, kwargs) if name in _OF_VALUES else None
        if known_inputs is not None and not known_inputs & (self._reals | self.data):
            known = known_inputs
            self._require_constant(known)
            return self._constant(self._beside(func, args, kwargs), known)
        result = func(*args, **kwargs)
        if name in _FINITENESS and self._all_known(args, kwargs) is None:
            # A step that gets numbers that are not finite is not one to plan for.
            finite, shape = name == "isfinite", tuple(args[0].shape)
            every = self._aside(lambda: torch.full((), finite, device="cpu").expand(shape))
            self._note(result, every, frozenset((_FINITE,)))
            return result
        if name == "rand":
            self._drawn[id(result)] = result
        of_drawn = name in ("__lt__", "lt") and id(args[0]) in self._drawn
        if of_drawn and isinstance(args[1], int | float) and args[1] <= 0:
            shape = tuple(result.shape)
            self._note(result, self._aside(lambda: torch.zeros(shape, dtype=torch.bool)), _ALWAYS)
            return result
        self._follow(func, name, args, kwargs, result)
        return result

    def _note(self, traced: Tensor, value: Tensor, inputs: frozenset[str]) -> None:
        try:
            storage = self._aside(lambda: value.untyped_storage().data_ptr())
        except NotImplementedError:  # inside of `vmap`, where a tensor stands for many
            return
        self._known[id(traced)] = _Known(value, inputs, traced, storage)
        if type(traced) is not Tensor and value.dim():
            # Those of traced tensors read one element after the other, each in the trace.
            of: Any = traced
            of.tolist = lambda: self._read(Tensor.tolist, "tolist", (traced,), {})

    def _of(self, value: Any) -> _Known | None:
        """The known value of a tensor; None if it is not known."""
        known = self._known.get(id(value))
        if known is None or known.storage in self._spoiled:
            return None
        written = self._written.get(known.storage)
        return known if written is None else known._replace(inputs=known.inputs | written)

    def _all_known(self, args: Any, kwargs: Any) -> frozenset[str] | None:
        """The inputs that all tensors among arguments are computed from; None if one is unknown."""
        inputs: frozenset[str] = frozenset()
        for tensor in _tensors((args, tuple(kwargs.values()))):
            known = self._of(tensor)
            if known is None:
                return None
            inputs |= known.inputs
        return inputs

    def _beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call on the known values, computed where nothing is traced."""

        def value(arg: Any) -> Any:
            if isinstance(arg, Tensor):
                return self._known[id(arg)].value
            if isinstance(arg, torch.device):
                return torch.device("cpu")
            if isinstance(arg, slice):
                return slice(value(arg.start), value(arg.stop), value(arg.step))
            if isinstance(arg, tuple) and hasattr(arg, "_fields"):
                return type(arg)(*map(value, arg))
            return type(arg)(map(value, arg)) if type(arg) in (tuple, list) else arg

        return self._aside(
            lambda: func(*value(args), **{key: value(arg) for key, arg in kwargs.items()})
        )

    def _aside(self, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, without a trace of it."""

        def call() -> Any:
            with torch.no_grad():
                return compute()

        return self._worker.submit(call).result()

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of a traced call's results beside the trace, if they are known."""
        given = list(_tensors((args, tuple(kwargs.values()))))
        made = list(_tensors(result))
        known = self._all_known(args, kwargs)
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if known is None or (not given and name not in _MADE):
            if writes and given and (target := self._known.get(id(given[0]))) is not None:
                self._spoiled.add(target.storage)
            return
        if name in _OF_GRADIENTS:
            return
        if writes and given and (target := self._known.get(id(given[0]))) is not None:
            self._written[target.storage] = self._written.get(target.storage, known) | known
        if not writes and sum(t.numel() for t in made) > _MOST_ELEMENTS:
            return
        try:
            values = list(_tensors(self._beside(func, args, kwargs)))
        except Exception:  # e.g. it names a device
            values = []
        if len(values) != len(made) and writes:
            self._spoiled.update(one.storage for t in given[:1] if (one := self._of(t)))
        masks = [t for t in given if t.dim() and t.dtype == torch.bool]
        for traced, value in zip(made, values, strict=False):
            counts = name == "sum" and not value.is_floating_point()
            if masks and (value.dtype == torch.bool or counts):
                self._of_masks.add(id(traced))
            if tuple(traced.shape) == tuple(value.shape):
                self._note(traced, value, known)

    def _note_data(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record inputs that are looked up, or that are targets."""
        given: tuple[Any, ...] = ()
        if func is F.embedding:
            given = (*args[:1], kwargs.get("input"))
        elif func in _LOSSES:
            given = (*args[1:2], kwargs.get("target"))
        for tensor in given:
            known = self._of(tensor)
            if name := self._names.get(id(tensor)):
                self.data.add(name)
            elif known is not None and func is not F.embedding:
                self.data.update(known.inputs)

    def _read(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The number or list that Python code reads of a tensor."""
        frame = running_frame()
        if name == "__bool__" and frame is not None and (checked := unraised(frame)) is not None:
            self._decide(args[0], checked, frame, checks=True)
            return checked
        known = self._of(args[0])
        if known is None:
            return func(*args, **kwargs)
        found = self._beside(func, args, kwargs)
        if not self._is_read(args[0], known, found, frame):
            return func(*args, **kwargs)
        return found

    def _is_read(self, read: Tensor, known: _Known, found: Any, frame: FrameType | None) -> bool:
        """Whether Python code may read `found`, which is noted.

        Of data that are truth values of a mask: whether one, any or all of it is True, or how many.
        """
        if not known.inputs & (self._reals | self.data):
            self._require_constant(known.inputs, frame)
            return True
        if id(read) in self._of_masks and (isinstance(found, bool) or read.dtype != torch.bool):
            self.used |= known.inputs
            self._decide(read, found, frame)
            return True
        return False

    def _decide(
        self, read: Tensor, found: Any, frame: FrameType | None, *, checks: bool = False
    ) -> None:
        """Note a number, a list of numbers or a truth value of data that Python code reads."""
        if isinstance(found, bool):
            same = read != 0
        else:
            same = (read == torch.tensor(found, device=self._device)).all()
        wanted = found if isinstance(found, bool) else True
        self._decisions.append(expected(same.reshape(()), wanted, line_of(frame), checks))
        if len(self._decisions) > _MOST_DECISIONS:
            raise CaptureError(
                f"{line_of(frame)} reads more than {_MOST_DECISIONS} values of data: take what"
                " depends on them out of forward",
                refused=True,
            )

    def with_decisions(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the model, the first of which checks what the model decided by data."""
        if not self._decisions or not outputs:
            return list(outputs)
        same = torch.stack(self._decisions).all()
        return [torch.where(same, outputs[0], outputs[0]), *outputs[1:]]

    def _require_constant(self, inputs: Iterable[str], frame: FrameType | None = None) -> None:
        missing = frozenset(inputs) - self._fixed
        if missing:
            raise ReadInputsError(missing, line_of(frame or running_frame()))

    def _constant(self, result: Any, inputs: frozenset[str]) -> Any:
        """Known values as tensors of the trace, which export makes constants of the graph."""

        def traced(value: Any) -> Any:
            if isinstance(value, Tensor):
                tensor = value.to(self._device)
                self._note(tensor, value, inputs)
                return tensor
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(traced, value))
            return type(value)(map(traced, value)) if type(value) in (tuple, list) else value

        return traced(result)

    def _numbers(self, arg: Any) -> Any:
        """`arg` with numbers in place of known tensors of no dimension."""
        if isinstance(arg, Tensor) and arg.dim() == 0 and not arg.is_floating_point():
            known = self._of(arg)
            if known is None:
                return arg
            found = self._aside(known.value.item)
            return found if self._is_read(arg, known, found, running_frame()) else arg
        return type(arg)(map(self._numbers, arg)) if type(arg) in (tuple, list) else arg

    def _index(self, index: Any) -> Any:
        """An index with numbers as the ends of its slices."""
        if isinstance(index, slice):
            return slice(*map(self._numbers, (index.start, index.stop, index.step)))
        return tuple(map(self._index, index)) if type(index) is tuple else index

    def _positions(self, mask: Tensor, known: _Known) -> tuple[Tensor, ...]:
        """The positions of a mask's True elements, a tensor per dimension."""
        self.used |= known.inputs
        if known.inputs <= self._fixed:
            found = self._aside(lambda: known.value.nonzero(as_tuple=True))
            return tuple(self._constant(found, known.inputs))
        return tuple(positions(mask, self._aside(lambda: int(known.value.sum()))).unbind(1))

    def _with_positions(self, index: Any) -> Any:
        """An index with positions in place of known masks."""
        if type(index) is not tuple:
            index = (index,)
        found: list[Any] = []
        for one in index:
            known = self._of(one) if isinstance(one, Tensor) else None
            if known is not None and known.value.dtype == torch.bool and known.value.dim():
                found += self._positions(one, known)
            else:
                found.append(one)
        return tuple(found) if len(found) != 1 else found[0]

    def _selected(self, x: Tensor, mask: Tensor, known: _Known) -> Tensor:
        """`x[mask]`, for a known mask."""
        self.used |= known.inputs
        given, inputs = self._of(x), known.inputs
        if not self._aside(lambda: bool(known.value.all())) or inputs <= self._fixed:
            found = x[self._positions(mask, known)]
        else:
            rest = (1,) * (x.dim() - mask.dim())
            every = all_true(mask).view(*mask.shape, *rest)
            found, inputs = torch.where(every, x, x).flatten(0, mask.dim() - 1), _ALWAYS
        if given is not None:
            value = self._aside(lambda: given.value[known.value])
            self._note(found, value, given.inputs | inputs)
        return found

    def _reduced(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """A sum, mean or cross entropy of selected elements as one of masked elements.

        Those have a fixed size, however many are selected. None for other calls.
        """
        x, mask, _ = self._sources.get(id(args[0]) if args else 0, (None, None, None))
        if x is None or mask is None:
            return None
        if name in ("sum", "mean") and len(args) == 1 and not kwargs:
            rest = (1,) * (x.dim() - mask.dim())
            total: Tensor = torch.where(mask.view(*mask.shape, *rest), x, torch.zeros_like(x)).sum()
            return total if name == "sum" else total / (mask.sum() * prod(x.shape[mask.dim() :]))
        other = self._sources.get(id(args[1]) if len(args) > 1 else id(kwargs.get("target")))
        if func is not F.cross_entropy or other is None or other[1] is not mask:
            return None
        given = {key: value for key, value in kwargs.items() if key in _OF_REDUCTIONS}
        kept = ("target", *_OF_REDUCTIONS)
        others = [v for k, v in kwargs.items() if k not in kept and (isinstance(v, Tensor) or v)]
        exact = not others and len(args) <= 2 and given.get("reduction") != "none"
        if not exact or x.dim() != mask.dim() + 1:
            return None
        targets = torch.where(mask, other[0], given.get("ignore_index", -100)).flatten()
        loss: Tensor = F.cross_entropy(x.flatten(0, -2), targets, **given)
        return loss

    def _chosen(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a function that selects by a known mask; None for other calls."""
        if name == "masked_select":
            x, mask = (*args, *kwargs.values())[:2]
            known = self._of(mask)
            if known is None or tuple(x.shape) != tuple(mask.shape):
                return None
            selected = self._selected(x, mask, known)
            self._sources[id(selected)] = (x, mask, selected)
            return selected
        known = self._of(args[0]) if args else None
        if known is None or (name == "where" and len(args) + len(kwargs) > 1):
            return None
        mask = args[0] if known.value.dtype == torch.bool else args[0] != 0
        value = self._aside(lambda: known.value != 0)
        found = self._positions(mask, known._replace(value=value))
        as_tuple = name == "where" or kwargs.get("as_tuple", False)
        return found if as_tuple else torch.stack(found, 1)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))
