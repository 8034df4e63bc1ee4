"""Captures that tests remember: copies of a model are captured once for all plans and ranks.

Most of the time of ranks that train copies of a small model under many plans went into capturing it
again. Tests opt in, those of `tests/ranks` by default; `run_ranks` hands on what is known, and of
ranks that need another capture one makes it. A call is recognised by all that it is made of:
classes, attributes and values of the model, shapes and dtypes of inputs, options; one that holds
anything else is captured as ever. Functions and classes that change meanwhile are not seen.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import os
import pickle
import time
import types
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import torch
from torch import nn

from shardwright.tracing.arguments import signature_of
from shardwright.tracing.call import EXAMPLE, split_call
from shardwright.tracing.discovery import discover

_PLAIN = (type(None), bool, int, float, str, bytes, complex)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_NAMED += (types.MethodDescriptorType, types.WrapperDescriptorType)
_MOST_BYTES = 2**22  # of the values of a model
_PATIENCE = 60.0  # seconds, if the process that captures was killed
_known = None  # outlines of calls and what was captured; None where nothing is remembered


def known():
    """What is remembered so far, to be taken along to other processes; None if nothing is."""
    return _known


@contextmanager
def remembered(before=None, folder=None):
    """Within, equal calls of equal models are captured once, by one of the processes with `folder`.

    Another process that needs it at the same time waits for it.
    """
    global _known
    outer, capture = _known, discover.capture_call
    _known = {} if before is None else before

    def captured(model, args=(), kwargs=None, numerics=discover.EXACT, outputs="loss"):
        key = outline_of(model, args, kwargs or {}, numerics) if outputs == "loss" else None
        if key is None:
            return capture(model, args, kwargs, numerics, outputs)
        if key not in _known:
            with _told(folder, key) as result:
                if result.known is None:
                    found = capture(model, args, kwargs, numerics, outputs)
                    if not _belongs_to_its_model(found):
                        result.known = replace(found, signature=None)  # it may not be picklable
            if result.known is None:
                return found
            _known[key] = result.known
        return replace(_known[key], signature=signature_of(model))

    discover.capture_call = captured
    try:
        yield
    finally:
        discover.capture_call, _known = capture, outer


def _belongs_to_its_model(captured):
    """Whether it has modules or recorded tensors of its model, or values of its batch."""
    examples = any(name.startswith(EXAMPLE) for name, _ in captured.graph.constants)
    return captured.opaque or examples or any(t.is_meta for t in captured.constants.values())


@contextmanager
def _told(folder, key):
    """The result of another process; or none yet, and the others are told what it becomes."""
    result = types.SimpleNamespace(known=None)
    if folder is None:
        yield result
        return
    mine, done = Path(folder, f"{key}.mine"), Path(folder, f"{key}.done")
    try:
        os.close(os.open(mine, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        end = time.monotonic() + _PATIENCE
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.005)
        if done.exists():
            result.known = pickle.loads(done.read_bytes())
        yield result
        return
    try:
        yield result
    finally:  # after an error too, so that the others meet it themselves
        part = mine.with_suffix(".part")
        part.write_bytes(pickle.dumps(result.known))
        part.rename(done)


def outline_of(model, args, kwargs, numerics):
    """A digest of all that a capture can depend on; None where something is not recognised."""
    outline = _Outline()
    try:
        outline.add(model)
        tensors, constants = split_call(args, kwargs)
        for key, tensor in sorted(tensors.items()):
            outline.text(key, tensor.shape, tensor.dtype, tensor.requires_grad)
        outline.text(sorted(constants.items()), numerics)
        outline.text(torch.get_default_dtype(), torch.is_autocast_enabled("cpu"))
    except (_UnknownError, ValueError, RecursionError):
        return None
    return outline.digest.hexdigest()


class _UnknownError(Exception):
    """Something that has no outline."""


class _Outline:
    """Objects as text: equal for copies, and for models that are built twice with one seed."""

    def __init__(self):
        self.digest = hashlib.sha256()
        self.numbers, self.storages = {}, {}
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
        if tensor.is_meta:
            return
        place = tensor.untyped_storage().data_ptr()
        self.text(self.storages.setdefault(place, len(self.storages)))
        self.bytes += tensor.nbytes
        if self.bytes > _MOST_BYTES or tensor.layout is not torch.strided:
            raise _UnknownError
        values = tensor.detach().cpu().contiguous().reshape(-1)
        self.digest.update(values.view(torch.uint8).numpy().tobytes())

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
        if isinstance(thing, nn.Module):
            forward = inspect.unwrap(kind.forward)
            self.text("forward", forward.__module__, forward.__qualname__)
        if hasattr(thing, "__dict__"):
            self.text("attributes")
            for key, value in vars(thing).items():
                self.text(key)
                self.add(value)
