"""Instructions that copy values between the memory of a device and that of its host."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.layout import Bytes
from shardwright.program.instructions import Shape


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Starts to copy `value`, of this shape and dtype, to the other memory.

    `result` is there after the `Wait` for `handle`. Copies in one direction run on a `channel` of
    their own, in the order in which they are started, and no other rank takes part.
    """

    channel: ClassVar[str] = ""

    value: str
    result: str
    shape: Shape
    dtype: str
    handle: str

    @property
    def bytes(self) -> Bytes:
        return Bytes(prod(self.shape) * ITEM_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Offload(HostCopy):
    """Starts to copy a value to the memory of the host."""

    channel: ClassVar[str] = "to host"

    def __str__(self) -> str:
        return f"{self.handle} = offload(%{self.value}: {self.dtype}{list(self.shape)})"


@dataclass(frozen=True, slots=True)
class Fetch(HostCopy):
    """Starts to copy a value from the memory of the host to new memory of the device."""

    channel: ClassVar[str] = "from host"

    def __str__(self) -> str:
        return f"{self.handle} = fetch(%{self.value}: {self.dtype}{list(self.shape)})"


@dataclass(frozen=True, slots=True)
class StoreGradient(HostCopy):
    """Starts to copy a gradient to the memory of the host, which reads it there.

    So the host itself waits for the end of the copy, not only what the device runs next.
    """

    channel: ClassVar[str] = Offload.channel

    def __str__(self) -> str:
        return f"{self.handle} = store(%{self.value}: {self.dtype}{list(self.shape)})"


HOST_CHANNELS = (Offload.channel, Fetch.channel)
