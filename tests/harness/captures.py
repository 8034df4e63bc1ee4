"""Captures that tests remember: copies of a model are captured once for all plans and ranks.

Most of the time of tests went into capturing the same small models again, for another plan, on
another rank or in another file. All tests remember but those of `tests/conftest.py`'s list; all
processes of a run share a folder, and of several that need a capture one makes it. A call is
recognised by all that it is made of: classes, attributes and values of the model, shapes and dtypes
of inputs, options; one that holds anything else is captured as ever. Functions that its methods
call, and that change meanwhile, are not seen.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import inspect
import pickle
import tempfile
import types
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardwright.tracing.arguments import signature_of
from shardwright.tracing.call import EXAMPLE, split_call
from shardwright.tracing.discovery import discover
from shardwright.tracing.graph_builder import Captured

_PLAIN = (type(None), bool, int, float, str, bytes, complex)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_NAMED += (types.MethodDescriptorType, types.WrapperDescriptorType)
_MOST_BYTES = 2**22  # of the values of a model
_known = None  # outlines of calls and what was captured; None where nothing is remembered
_folder = None  # where other processes find what was captured


def folder():
    """The folder of what is remembered, for other processes; None if nothing is."""
    return _folder


@contextmanager
def remembered(shared=None):
    """Within, equal calls of equal models are captured once, by one of the processes that do this
    with the folder `shared`; without one, by this process and those that it tells `folder()`.

    A process that needs what another one is capturing waits for it.
    """
    global _known, _folder
    with ExitStack() as stack:
        shared = shared or stack.enter_context(tempfile.TemporaryDirectory())
        outer, capture = (_known, _folder), discover.capture_call
        _known, _folder = {}, str(shared)
        anew = capture.args[0] if isinstance(capture, partial) else capture
        discover.capture_call = partial(_captured, anew)
        try:
            yield
        finally:
            discover.capture_call = capture
            _known, _folder = outer


def _captured(capture, model, args=(), kwargs=None, numerics=discover.EXACT, outputs="loss"):
    outline = outline_of(model, args, kwargs or {}, numerics, outputs)
    if outline is None:
        return capture(model, args, kwargs, numerics, outputs)
    key = outline.digest.hexdigest()
    if key not in _known:
        with _told(_folder, key) as result:
            if result.known is None:
                found = capture(model, args, kwargs, numerics, outputs)
                result.known = _Remembered.of(found, outline)
        if result.known is None:
            return found
        _known[key] = result.known
    return _known[key].of_model(model, outline)


@dataclass(frozen=True)
class _Remembered:
    """What was captured of one model, for all that are equal to it."""

    captured: Captured
    places: Mapping[str, int]  # of constants without memory, among all that an outline is made of

    @classmethod
    def of(cls, captured, outline):
        """None if there are modules of the model in it, other tensors, or values of its batch."""
        examples = any(name.startswith(EXAMPLE) for name, _ in captured.graph.constants)
        empty = {name: one for name, one in captured.constants.items() if one.is_meta}
        places = {name: outline.place(one) for name, one in empty.items()}
        if captured.opaque or examples or None in places.values():
            return None
        constants = {name: None if name in places else t for name, t in captured.constants.items()}
        # A signature may be none that is pickled.
        return cls(replace(captured, signature=None, constants=constants), places)

    def of_model(self, model, outline):
        own = {name: outline.kept[place].detach() for name, place in self.places.items()}
        constants = {**self.captured.constants, **own}
        return replace(self.captured, signature=signature_of(model), constants=constants)


@contextmanager
def _told(folder, key):
    """The result of another process; or none yet, and the others are told what it becomes."""
    result, done = types.SimpleNamespace(known=None), Path(folder, f"{key}.done")
    with open(Path(folder, f"{key}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with the process that has it
        if not done.exists():
            try:
                yield result
            finally:  # after an error too, so that the others meet it themselves
                part = done.with_suffix(".part")
                part.write_bytes(pickle.dumps(result.known))
                part.rename(done)
            return
        result.known = pickle.loads(done.read_bytes())
    yield result


def outline_of(model, args, kwargs, numerics, outputs):
    """All that a capture can depend on; None where something is not recognised."""
    outline = _Outline()
    try:
        outline.add(model)
        tensors, constants = split_call(args, kwargs)
        for key, tensor in sorted(tensors.items()):
            outline.text(key, tensor.shape, tensor.dtype, tensor.requires_grad)
        outline.text(sorted(constants.items()), numerics, outputs)
        outline.text(torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    except (_UnknownError, ValueError, RecursionError):
        return None
    return outline


class _UnknownError(Exception):
    """Something that has no outline."""


class _Outline:
    """Objects as text: equal for copies, and for models that are built twice with one seed."""

    def __init__(self):
        self.digest = hashlib.sha256()
        self.numbers, self.storages, self.classes = {}, {}, set()
        self.kept = []  # an object that is gone would leave its `id` to another one
        self.bytes = 0

    def text(self, *items):
        self.digest.update(repr(items).encode())

    def add(self, thing):
        if isinstance(thing, _PLAIN):
            self.text(type(thing).__qualname__, thing)
            return
        if type(thing) in (dict, list, tuple):  # the same one or an equal one
            self.items(thing)
            return
        if id(thing) in self.numbers:
            self.text("again", self.numbers[id(thing)])
            return
        self.numbers[id(thing)] = len(self.numbers)
        self.kept.append(thing)
        if isinstance(thing, torch.Tensor):
            self.tensor(thing)
        elif isinstance(thing, _NAMED):
            self.function(thing)
        elif isinstance(thing, types.MethodType):
            self.text("method", thing.__func__.__qualname__)
            self.add(thing.__self__)
        else:
            self.object(thing)

    def tensor(self, tensor):
        self.text(type(tensor).__qualname__, tensor.shape, tensor.dtype, tensor.requires_grad)
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise _UnknownError
        self.text(str(tensor.device), tensor.stride(), tensor.storage_offset())
        storage = tensor.untyped_storage()
        place = id(storage) if tensor.is_meta else storage.data_ptr()
        self.text(self.storages.setdefault(place, len(self.storages)))
        if tensor.is_meta:
            return
        self.bytes += tensor.nbytes
        if self.bytes > _MOST_BYTES or tensor.layout is not torch.strided:
            raise _UnknownError
        values = tensor.detach().cpu().contiguous().reshape(-1)
        self.digest.update(values.view(torch.uint8).numpy().tobytes())

    def place(self, tensor):
        """Which of the tensors without memory is this one; None if it is none."""
        for number, one in enumerate(self.kept):
            if isinstance(one, torch.Tensor) and one.is_meta and _is_same(one, tensor):
                return number
        return None

    def function(self, function):
        home = getattr(function, "__module__", None)  # methods of C have none
        self.text("named", home, function.__qualname__)
        if "<" in function.__qualname__:  # a local one, which may close over anything
            raise _UnknownError

    def items(self, thing):
        self.text(type(thing).__qualname__, len(thing))
        pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
        for key, value in pairs:
            self.add(key)
            self.add(value)

    def methods(self, kind):
        """What a class of modules does: files of one name, and patched classes, differ in it."""
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for name, method in sorted(vars(base).items()):
                method = inspect.unwrap(method) if inspect.isfunction(method) else method
                if code := getattr(method, "__code__", None):
                    self.text(name, code.co_filename, code.co_firstlineno, code.co_code)

    def object(self, thing):
        kind = type(thing)
        self.function(kind)
        if isinstance(thing, dict | list | tuple):
            self.items(thing)
        elif isinstance(thing, set | frozenset):
            if not all(isinstance(one, _PLAIN) for one in thing):
                raise _UnknownError
            self.text(sorted(map(repr, thing)))
        elif is_dataclass(thing) and not hasattr(thing, "__dict__"):
            self.items({field.name: getattr(thing, field.name) for field in fields(thing)})
        elif not hasattr(thing, "__dict__"):
            raise _UnknownError
        if isinstance(thing, nn.Module) and kind not in self.classes:
            self.classes.add(kind)
            self.methods(kind)
        if hasattr(thing, "__dict__"):
            self.text("attributes")
            for key, value in vars(thing).items():
                self.text(key)
                self.add(value)


def _is_same(one, other):
    where = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other)]
    return where[0] == where[1] and one.untyped_storage() is other.untyped_storage()
