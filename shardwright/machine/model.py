"""The hardware that a plan is made for: equal devices and the levels of links between them.

Figures only: the cost model turns them into seconds. `toml` reads and writes
machine files, `presets` has known hardware.

One convention for bandwidth, at every level: what *one device* sends, in one
direction, while all devices send at once. A network card of 100 Gbit/s that
four devices share is a level of 25 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import TypeVar

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.options.mixed_precision import HALF_DTYPES
from shardwright.machine.backends import BACKENDS, BackendSpec
from shardwright.machine.calls import Timing
from shardwright.machine.efficiency_curve import Curve
from shardwright.machine.expert_loads import ExpertSkew, wrong_skew
from shardwright.machine.measurement import Measured

_Figure = TypeVar("_Figure", Bytes, float)

NO_TIME, NO_MEMORY = Seconds(0.0), Bytes(0)
PLAIN_BLOCK = 8  # channels; `Device.channel_block` without wide vectors


class MachineError(ValueError):
    """A machine that cannot exist or cannot be read: wrong text, names, units or figures."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Part of the device's figures that operators reach, per class of operators.

    Each is one number above 0 and at most 1 for all sizes, or a `Curve` over the work of one
    kernel.

    Attributes:
        matmul: matrix products, of `Device.flop_per_s`.
        float8: those in 8 bits, of their own peak; None: as `matmul`.
        convolution: convolutions, of `Device.flop_per_s`.
        attention: fused attention, of `Device.flop_per_s`.
        memory: operators bound by memory, of `Device.bytes_per_s`.
        update: operators that write in place, of `Device.bytes_per_s`; None: what `memory` is for
            large tensors.
        functions: elementwise exponentials and the like, of `Device.bytes_per_s`; None: as
            `memory`.
        pooling: windows, forward, of `Device.bytes_per_s`; None: as `memory`.
    """

    matmul: float | Curve = 1.0
    convolution: float | Curve = 1.0
    attention: float | Curve = 1.0
    memory: float | Curve = 1.0
    update: float | Curve | None = None
    functions: float | Curve | None = None
    pooling: float | Curve | None = None
    float8: float | Curve | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, float | int) and not 0 < part <= 1:
                raise MachineError(
                    f"efficiency.{field.name} is {part}; give a part, more than 0 and at most 1"
                )

    @property
    def streaming(self) -> float:
        """The fraction of `memory` for large tensors."""
        return self.memory.last if isinstance(self.memory, Curve) else self.memory

    @property
    def in_place(self) -> float | Curve:
        """The fraction for operators that write in place."""
        return self.streaming if self.update is None else self.update

    @property
    def of_functions(self) -> float | Curve:
        """The fraction for elementwise functions."""
        return self.memory if self.functions is None else self.functions

    @property
    def of_float8(self) -> float | Curve:
        """The fraction for matrix products in 8 bits."""
        return self.matmul if self.float8 is None else self.float8

    @property
    def of_pooling(self) -> float | Curve:
        """The fraction for pooling, forward."""
        return self.memory if self.pooling is None else self.pooling

    def lower(self, other: Efficiency) -> Efficiency:
        """The minimum of both in every class."""
        both = (self, other)
        return Efficiency(
            _lower(self.matmul, other.matmul),
            _lower(self.convolution, other.convolution),
            _lower(self.attention, other.attention),
            _lower(self.memory, other.memory),
            _lower_if_given(self.in_place, other.in_place, [e.update for e in both]),
            _lower_if_given(self.of_functions, other.of_functions, [e.functions for e in both]),
            _lower_if_given(self.of_pooling, other.of_pooling, [e.pooling for e in both]),
            _lower_if_given(self.of_float8, other.of_float8, [e.float8 for e in both]),
        )


def _longer(one: Seconds | None, other: Seconds | None) -> Seconds | None:
    return max((time for time in (one, other) if time is not None), default=None)


def _least(one: _Figure | None, other: _Figure | None) -> _Figure | None:
    """The smaller figure; None if one of the devices has none."""
    return None if one is None or other is None else min(one, other)


def _lower_if_given(
    one: float | Curve, other: float | Curve, given: Sequence[float | Curve | None]
) -> float | Curve | None:
    """The minimum of both; None if neither machine has the figure (`given`)."""
    return None if all(part is None for part in given) else _lower(one, other)


def _lower(one: float | Curve, other: float | Curve) -> float | Curve:
    if not isinstance(one, Curve) and not isinstance(other, Curve):
        return min(one, other)
    curves = [c if isinstance(c, Curve) else Curve(((1.0, c),)) for c in (one, other)]
    return curves[0].lower(curves[1])


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one process' share of a CPU.

    Attributes:
        kind: its name.
        memory_bytes: bytes of its memory.
        flop_per_s: pairs (dtype, dense peak), as `(("bfloat16", 989.4e12), ...)`.
        bytes_per_s: bandwidth of its memory, reads and writes together.
        launch_seconds: what an operator costs however small it is.
        efficiency: parts of these figures that operators reach.
        dispatch_seconds: what an operator of the optimizer costs on a parameter as it is stored;
            None: the update is one kernel.
        parameter_seconds: what it costs to bring a trained parameter in and its gradient back.
        packing_seconds: what it costs to put a small tile into a bucket, or to take a copy out of
            one; None: a launch for both.
        context_bytes: what the driver and its libraries take of the memory.
        workspace_bytes: what libraries of matrix products keep of the memory of torch's allocator.
        channel_block: convolutions pad channels to multiples of it (oneDNN: 16 with AVX-512).
        issue_seconds: what the host needs to issue a kernel, while the device computes those issued
            before; 0 where the host itself computes.
        units: multiprocessors, among which a matrix product is cut into tiles; 0: its efficiency
            does not depend on its shape.
        product_depth: steps along the depth of a tile that its start and its end take as long as.
        host_memory_bytes: its share of the memory of its host; None: the host keeps nothing for it.
        host_bytes_per_s: of copies between its memory and that of its host, in one direction, while
            all devices of the host copy; None: unknown.
        timings: of single operators at the sizes that plans have; not part of machine files
            (`profile/timing_cache.py`).
    """

    kind: str
    memory_bytes: Bytes
    flop_per_s: tuple[tuple[str, float], ...]
    bytes_per_s: float
    launch_seconds: Seconds
    efficiency: Efficiency = Efficiency()
    dispatch_seconds: Seconds | None = None
    parameter_seconds: Seconds = NO_TIME
    packing_seconds: Seconds | None = None
    context_bytes: Bytes = NO_MEMORY
    workspace_bytes: Bytes = NO_MEMORY
    channel_block: int = PLAIN_BLOCK
    issue_seconds: Seconds = NO_TIME
    units: int = 0
    product_depth: int = 0
    host_memory_bytes: Bytes | None = None
    host_bytes_per_s: float | None = None
    timings: tuple[Timing, ...] = ()

    def __post_init__(self) -> None:
        if not self.flop_per_s:
            raise MachineError(f"device {self.kind} has no compute figure; give one per dtype")
        for dtype, figure in self.flop_per_s:
            _require_positive(f"compute.{dtype}", figure, "100TFLOP/s")
        _require_positive("memory", self.memory_bytes, "80GB")
        _require_positive("memory_bandwidth", self.bytes_per_s, "900GB/s")
        _require_not_negative("launch", self.launch_seconds, "5us")
        _require_not_negative("dispatch", self.dispatch_seconds or 0.0, "20us")
        _require_not_negative("parameter", self.parameter_seconds, "20us")
        _require_not_negative("packing", self.packing_seconds or 0.0, "20us")
        _require_not_negative("context", self.context_bytes, "1GB")
        _require_not_negative("workspace", self.workspace_bytes, "64MiB")
        _require_not_negative("issue", self.issue_seconds, "10us")
        _require_not_negative("units", self.units, "108")
        _require_not_negative("product_depth", self.product_depth, "128")
        if self.host_memory_bytes is not None:
            _require_positive("host_memory", self.host_memory_bytes, "256GB")
        if self.host_bytes_per_s is not None:
            _require_positive("host_bandwidth", self.host_bytes_per_s, "25GB/s")
        if self.channel_block < 1:
            raise MachineError(
                f"channel_block is {self.channel_block}; give at least 1: 16 with AVX-512, else 8"
            )
        if self.usable_bytes <= 0:
            taken = f"context is {self.context_bytes} bytes"
            if self.workspace_bytes:
                taken += f" and workspace {self.workspace_bytes} bytes"
            raise MachineError(f"{taken} of {self.memory_bytes} of memory; leave some for tensors")

    @property
    def usable_bytes(self) -> Bytes:
        """The memory for tensors: without context and workspaces."""
        return Bytes(self.memory_bytes - self.context_bytes - self.workspace_bytes)

    def peak_flop_per_s(self, dtype: str) -> float:
        """Peak FLOP/s for `dtype`; without one that of float32, else the lowest."""
        peaks = dict(self.flop_per_s)
        return peaks.get(dtype) or peaks.get("float32") or min(peaks.values())

    @property
    def fast_halves(self) -> tuple[str, ...]:
        """Of bfloat16 and float16 those with a higher peak than float32; none without figures."""
        slow = self.peak_flop_per_s("float32")
        return tuple(d for d in HALF_DTYPES if self.peak_flop_per_s(d) > slow)

    def multiplies_in(self, dtype: str) -> bool:
        """Whether it has products in this dtype of 8 bits, which are faster than in bfloat16."""
        return dict(self.flop_per_s).get(dtype, 0.0) > self.peak_flop_per_s("bfloat16")

    def slower(self, other: Device) -> Device:
        """A device with the worse of both figures everywhere, for clusters of mixed devices.

        All ranks run the same program on tiles of equal size and wait for the slowest.
        """
        dtypes = dict.fromkeys(name for device in (self, other) for name, _ in device.flop_per_s)
        kinds = dict.fromkeys((*self.kind.split("+"), *other.kind.split("+")))
        context = max(self.context_bytes, other.context_bytes)
        workspace = max(self.workspace_bytes, other.workspace_bytes)
        usable = min(self.usable_bytes, other.usable_bytes)
        return Device(
            kind="+".join(kinds),
            memory_bytes=Bytes(usable + context + workspace),
            flop_per_s=tuple(
                (dtype, min(self.peak_flop_per_s(dtype), other.peak_flop_per_s(dtype)))
                for dtype in dtypes
            ),
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
            launch_seconds=max(self.launch_seconds, other.launch_seconds),
            efficiency=self.efficiency.lower(other.efficiency),
            dispatch_seconds=_longer(self.dispatch_seconds, other.dispatch_seconds),
            parameter_seconds=max(self.parameter_seconds, other.parameter_seconds),
            packing_seconds=_longer(self.packing_seconds, other.packing_seconds),
            context_bytes=context,
            workspace_bytes=workspace,
            channel_block=max(self.channel_block, other.channel_block),
            issue_seconds=max(self.issue_seconds, other.issue_seconds),
            units=max(self.units, other.units),
            product_depth=max(self.product_depth, other.product_depth),
            host_memory_bytes=_least(self.host_memory_bytes, other.host_memory_bytes),
            host_bytes_per_s=_least(self.host_bytes_per_s, other.host_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Level:
    """Links that join `size` devices, or `size` groups of the next inner level.

    Attributes:
        name: such as `"nvlink"` or `"network"`.
        size: number of devices or groups.
        bytes_per_s: per device, one direction, while all send.
        latency_seconds: of one hop: the smallest message from one device to the next.
        gather_bytes_per_s: of collectives that gather instead of reduce, where the library is
            slower at those; None: the same.
    """

    name: str
    size: int
    bytes_per_s: float
    latency_seconds: Seconds
    gather_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise MachineError(f"level {self.name}: size is {self.size}; it must be at least 1")
        _require_positive(f"level {self.name}: bandwidth", self.bytes_per_s, "50GB/s")
        _require_not_negative(f"level {self.name}: latency", self.latency_seconds, "5us")
        if self.gather_bytes_per_s is not None:
            name = f"level {self.name}: gather_bandwidth"
            _require_positive(name, self.gather_bytes_per_s, "50GB/s")


EXPERT_SKEW = 1.25
_MOST_DEVICES = 2**20
SKEWED_SECONDS = 10e-3
INDEPENDENT = 0.5  # `Machine.arrival_skew_power`


@dataclass(frozen=True, slots=True)
class Machine:
    """Equal devices under levels of links, innermost (fastest) level first.

    Rank r is device r; neighbouring ranks are joined by the innermost level.

    * `backend`: the library of collectives; `collective_launch_seconds`: its overhead per call;
    * `overlap`: the fraction of a collective's time that is hidden while the device computes, for
      collectives that are waited for late, such as gradient reductions; `gather_overlap`: for those
      waited for soon, such as gathers of sharded parameters (None: as `overlap`);
    * `contention`: the fraction of a collective's time by which it delays another in flight along
      another axis: 1 where they share all links, 0 where they share none;
    * `expert_skew`: rows of the busiest device over the mean, where devices hold different experts,
      or rows of each expert (`machine/expert_loads.py`); depends on the router and the data, by
      default as with a load-balancing loss;
    * `arrival_skew_seconds`: mean wait for the slowest rank after `SKEWED_SECONDS` of computing; it
      grows with that time to the power `arrival_skew_power`: 0.5 for independent disturbances, 1
      where one rank is permanently slower;
    * not in machine files: `charged_skew_seconds` of every launch, for waiting, which
      `simulate/time/stragglers.py` sets; `charges_hidden`, set by a search: whether tables charge
      the hidden part of messages, too;
    * `provenance`: whether figures are specified, assumed or measured; `measured`: when and how
      well.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    provenance: str = ""
    backend: str = "nccl"
    collective_launch_seconds: Seconds = NO_TIME
    overlap: float = 0.0
    gather_overlap: float | None = None
    contention: float = 1.0
    measured: Measured | None = None
    expert_skew: ExpertSkew = EXPERT_SKEW
    arrival_skew_seconds: Seconds = NO_TIME
    arrival_skew_power: float = INDEPENDENT
    charged_skew_seconds: Seconds = NO_TIME
    charges_hidden: bool = False

    def __post_init__(self) -> None:
        if not self.levels:
            raise MachineError(f"machine {self.name} has no level of links; give at least one")
        if self.devices > _MOST_DEVICES:
            raise MachineError(
                f"machine {self.name} has {self.devices} devices; plan for at most {_MOST_DEVICES}"
            )
        if self.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise MachineError(f"backend {self.backend!r} is not known; choose one of {known}")
        _require_not_negative("collective_launch", self.collective_launch_seconds, "20us")
        _require_not_negative("arrival_skew", self.arrival_skew_seconds, "300us")
        for name in ("overlap", "gather_overlap", "contention"):
            part = getattr(self, name)
            if part is not None and not 0 <= part <= 1:
                raise MachineError(f"{name} is {part}; give a part, at least 0 and at most 1")
        if not 0 < self.arrival_skew_power <= 1:
            raise MachineError(
                f"arrival_skew_power is {self.arrival_skew_power}; give more than 0 and at most 1"
            )
        if wrong := wrong_skew(self.expert_skew):
            raise MachineError(wrong)

    @property
    def devices(self) -> int:
        """Number of devices: the product of the levels' sizes."""
        return prod(level.size for level in self.levels)

    @property
    def soon_overlap(self) -> float:
        """The hidden fraction of collectives that are waited for soon."""
        return self.overlap if self.gather_overlap is None else self.gather_overlap

    @property
    def most_overlap(self) -> float:
        """The largest hidden fraction of any collective."""
        return max(self.overlap, self.soon_overlap)

    @property
    def settles(self) -> bool:
        """Whether all plans are ranked by their simulated steps; on presets only the best are."""
        return self.measured is not None

    @property
    def backend_spec(self) -> BackendSpec:
        """The facts of the machine's backend."""
        return BACKENDS[self.backend]

    def with_devices(self, devices: int) -> Machine:
        """The machine reduced to `devices` of its devices.

        Inner levels stay as full as possible, with equally many devices in every group.

        >>> from shardwright.machine.presets import preset
        >>> preset("2x8xA100").with_devices(12).name
        '2x6xA100'
        """
        if not isinstance(devices, int) or isinstance(devices, bool):
            raise MachineError(f"devices is {devices!r}; give a whole number")
        if devices == self.devices:
            return self
        sizes = _spread(devices, [level.size for level in self.levels]) if devices > 0 else None
        if sizes is None:
            raise MachineError(
                f"{devices} devices asked of {self.name}, which has {self.devices} in equal groups"
                f" of {self.levels[0].size}; ask for 1 to {self.devices} that split evenly"
            )
        levels = tuple(
            replace(level, size=size)
            for i, (level, size) in enumerate(zip(self.levels, sizes, strict=True))
            if i == 0 or prod(sizes[i:]) > 1
        )
        plain = self.name == canonical_name(self.levels, self.device.kind)
        name = canonical_name(levels, self.device.kind)
        return replace(self, levels=levels, name=name if plain else f"{devices} of {self.name}")

    def __str__(self) -> str:
        return self.name


def canonical_name(levels: tuple[Level, ...], kind: str) -> str:
    """`[HOSTSx]DEVICESxKIND` of these levels."""
    return "x".join([*(str(level.size) for level in reversed(levels)), kind])


def _spread(devices: int, sizes: list[int]) -> list[int] | None:
    """Sizes of the levels, innermost first and as full as possible, that hold `devices` exactly."""
    if not sizes:
        return [] if devices == 1 else None
    for size in range(min(devices, sizes[0]), 0, -1):
        if devices % size == 0:
            outer = _spread(devices // size, sizes[1:])
            if outer is not None:
                return [size, *outer]
    return None


def _require_positive(name: str, figure: float, example: str) -> None:
    if not 0 < figure < float("inf"):
        raise MachineError(f"{name} is {figure}; give more than zero, as in {example!r}")


def _require_not_negative(name: str, figure: float, example: str) -> None:
    if not 0 <= figure < float("inf"):
        raise MachineError(f"{name} is {figure}; give zero or more, as in {example!r}")
