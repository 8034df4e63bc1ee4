"""Copies values between the memory of a device and that of its host.

On accelerators the host's buffers are pinned, and each direction has a stream of its own. On a CPU
both memories are the host's: offloaded values are in mapped memory outside of torch's allocator,
which counts the other one, and copies are done when they have started.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from functools import cache
from math import prod
from typing import final
from weakref import finalize

import torch

from shardwright.program.step.host_copies import Fetch, HostCopy, StoreGradient

Streams = tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]


@cache
def copy_streams(device: torch.device) -> Streams:
    """The streams of copies to the host and from it, of all modules; None on CPUs."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def mapped(size: int) -> torch.Tensor:
    """Memory of a CPU's host, int8 [size], that torch's allocator does not count."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


@final
class HostMemory:
    """The memory of the host that a device's offloaded values take; buffers are used again.

    `bytes` are in use now, and `peak` is the most that were.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = self.peak = 0
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by bytes
        self._streams = copy_streams(device)

    def start(self, one: HostCopy, value: torch.Tensor | None) -> HostCopyInFlight:
        """Start a copy; one of a missing gradient has an empty result."""
        if value is None:
            return HostCopyInFlight(torch.empty(0), torch.empty(0), None)
        match one:
            case Fetch():
                made = torch.empty(one.shape, dtype=value.dtype, device=self.device)
                return HostCopyInFlight(value, made, self._streams[1])
            case StoreGradient():
                made = self._new(prod(one.shape) * value.element_size())
                made = made.view(value.dtype).view(one.shape)
                source = value.reshape(one.shape)
                return HostCopyInFlight(source, made, self._streams[0], host_waits=True)
        return self.offload(value, one.shape)

    def offload(self, value: torch.Tensor, shape: tuple[int, ...]) -> HostCopyInFlight:
        """Start to copy a value of this shape to the host."""
        size = prod(shape) * value.element_size()
        buffer = self._free[size].pop() if self._free[size] else self._new(size)
        made = buffer.view(value.dtype).view(shape)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        finalize(made, self._release, buffer).atexit = False
        return HostCopyInFlight(value, made, self._streams[0])

    def _release(self, buffer: torch.Tensor) -> None:
        """Take back the buffer of a value that nothing refers to."""
        self.bytes -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer)

    def _new(self, size: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return mapped(size)


@final
class HostCopyInFlight:
    """A copy from `source` to `made`, on a `stream` of its own if there is one.

    That stream waits for what was computed before, and later operators wait for the copy: so memory
    of the source is not given back, nor that of the result read, before it has ended. If the host
    itself reads the result, `host_waits` for the end of the copy.
    """

    def __init__(
        self,
        source: torch.Tensor,
        made: torch.Tensor,
        stream: torch.cuda.Stream | None,
        *,
        host_waits: bool = False,
    ) -> None:
        self._source: torch.Tensor | None = source
        self._made, self._stream, self._host_waits = made, stream, host_waits
        if stream is None:
            made.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            made.copy_(source, non_blocking=True)
            self._ended = stream.record_event()

    def results(self) -> list[torch.Tensor]:
        """Let what is computed from now on wait for the copy; the value in the other memory."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._ended)
            if self._host_waits:
                self._ended.synchronize()
        self._source = None
        return [self._made]
