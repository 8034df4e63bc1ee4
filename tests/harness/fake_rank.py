"""One rank of a large world in one process: its step on the meta device, with nobody to talk to.

Groups are torch's fake ones, collectives are recorded and leave their buffers as they are, and
tensors have no values. What a step must not do on a GPU fails here: to read a value, to make a
tensor on the host, to begin a collective that is no instruction, to make a group.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.machine.backends import BackendSpec
from shardwright.runtime.backend import registry
from shardwright.runtime.backend.base import Backend

SPEC = BackendSpec("fake", "meta", True, None, 512)  # as NCCL, but for the device


class Done:
    def wait(self):
        """Nothing was sent, so nothing is waited for."""


class RecordingBackend(Backend):
    """Notes kind, size of the group and bytes of the collectives of instructions and messages.

    Those within operators, for which they wait, are in `within`.
    """

    def __init__(self):
        super().__init__(SPEC)
        self.begun, self.messages, self.within = [], [], []

    def _note(self, kind, group, x, known=None):
        (self.begun if known is None else known).append((kind, group.size(), x.nbytes))
        return Done()

    def reduce(self, group, x, op=dist.ReduceOp.SUM):
        self._note("all_reduce", group, x, self.within)

    def begin_reduce(self, group, x, op=dist.ReduceOp.SUM):
        return self._note("all_reduce", group, x)

    def begin_exchange(self, group, found, given, received, sent):
        return self._note("all_to_all", group, given)

    def begin_gather(self, group, buffer, rank):
        return self._note("all_gather", group, buffer)

    def begin_reduce_scatter(self, group, own, given, rank):
        return self._note("reduce_scatter", group, given)

    def begin_send(self, group, x, peer):
        return self._note("send", group, x, self.messages)

    def begin_receive(self, group, x, peer):
        return self._note("receive", group, x, self.messages)

    def begin_messages(self, group, sends, receives):
        sent = [self.begin_send(group, x, peer) for peer, x in sends]
        return [*sent, *(self.begin_receive(group, x, peer) for peer, x in receives)]


class StepGuard(TorchDispatchMode):
    """Counts operators, and notes those that a step on a device must not call.

    Reading a value of a meta tensor is torch's own error. Tensors without elements are allowed on
    the host: they mark places in autograd's graph.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.forbidden = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, returned)) if isinstance(x, torch.Tensor)]
        if function.namespace in ("c10d", "_c10d_functional"):
            self.forbidden.append(str(function))
        self.forbidden += [str(function) for x in tensors if not x.is_meta and x.numel()]
        if not function.is_view and not str(function).startswith(_WITHOUT_KERNEL):
            self.kernels += 1
        return returned


_WITHOUT_KERNEL = ("aten.detach", "aten.empty", "aten.new_empty", "aten._unsafe_view")


@contextmanager
def fake_world(rank, world):
    """Be `rank` of `world` fake ranks; yields the backend. The process group of before is ended."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    backend = RecordingBackend()

    def same(found, mine, group=None):
        found[:] = [mine] * len(found)

    with (
        mock.patch.dict(registry._KNOWN, {"fake": backend}),
        mock.patch.object(dist, "all_gather_object", same),
    ):
        yield backend


@contextmanager
def guarded():
    """A step within may not make groups; yields the `StepGuard`."""
    refused = mock.Mock(side_effect=AssertionError("a step made a group"))
    with mock.patch.object(dist, "new_group", refused), StepGuard() as guard:
        yield guard
