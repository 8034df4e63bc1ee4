"""Machines known by name: `8xH100`, `2x8xA100`, `2xcpu`.

Peaks, memory and link rates are the makers' published figures: dense, without
structured sparsity, float32 without TF32 (PyTorch's default). docs/reference/machines.md names
the documents and where the figures were compared with them. The fractions that
programs reach (`Efficiency`, `_LINK_REACHED`), latencies and launch times are
assumptions: measure the machine instead where possible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from shardwright.ir.layout import Bytes, Seconds
from shardwright.machine.model import (
    Device,
    Efficiency,
    Level,
    Machine,
    MachineError,
    canonical_name,
)

GB = 10**9
GBIT = 1e9 / 8
TERA = 1e12

_REACHED = Efficiency(matmul=0.65, convolution=0.5, attention=0.45, memory=0.75)  # assumed
_LINK_REACHED = 0.8  # assumed, of what links are specified to carry
_LAUNCH = Seconds(5e-6)  # assumed: eager PyTorch, one kernel
_COLLECTIVE_LAUNCH = Seconds(20e-6)  # assumed: one NCCL call
# Assumed: the driver's context, the kernels of cuBLAS and cuDNN with cuBLAS' workspace, and NCCL's
# buffers. `profile` measures it.
_CONTEXT = Bytes(GB)
_NETWORK_LATENCY = Seconds(5e-6)  # assumed: one hop between hosts
_SPECIFIED = (
    "specified: published figures of {source}; efficiency, latencies and context are assumed"
)


@dataclass(frozen=True, slots=True)
class _Server:
    """The usual server of a kind of device.

    `link_bytes_per_s` per device and `network_bytes_per_s` per host, one direction, as specified.
    """

    device: Device
    link: str
    link_bytes_per_s: float
    link_latency_seconds: Seconds
    host_devices: int
    network_bytes_per_s: float
    source: str


def _gpu(kind: str, memory_gb: int, bytes_per_s: float, **tflops: float) -> Device:
    peaks = tuple((dtype, figure * TERA) for dtype, figure in tflops.items())
    memory = Bytes(memory_gb * GB)
    return Device(kind, memory, peaks, bytes_per_s, _LAUNCH, _REACHED, context_bytes=_CONTEXT)


def _nvlink(device: Device, gb_per_s: float, devices: int, network: float, source: str) -> _Server:
    latency = Seconds(1.5e-6)  # assumed
    return _Server(device, "nvlink", gb_per_s * GB, latency, devices, network, source)


def _pcie(device: Device, gb_per_s: float, network: float, source: str) -> _Server:
    latency = Seconds(5e-6)  # assumed; through the host's memory
    return _Server(device, "pcie", gb_per_s * GB, latency, 8, network, source)


_HOPPER = {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9, "float64": 66.9}
_A100 = {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5, "float64": 19.5}

_SERVERS = (
    # NVIDIA H100 data sheet, SXM: 3.35 TB/s, NVLink 900 GB/s both ways; DGX H100: 8 x 400 Gbit/s.
    _nvlink(_gpu("H100", 80, 3.35e12, **_HOPPER), 450, 8, 3200 * GBIT, "H100 SXM and DGX H100"),
    # NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s, else as H100; DGX H200: 8 x 400 Gbit/s.
    _nvlink(_gpu("H200", 141, 4.8e12, **_HOPPER), 450, 8, 3200 * GBIT, "H200 SXM and DGX H200"),
    # NVIDIA A100 data sheet, SXM: 2,039 GB/s (80 GB), 1,555 GB/s (40 GB), tensor cores for float64,
    # NVLink 600 GB/s both ways; DGX A100: 8 x 200 Gbit/s.
    _nvlink(_gpu("A100", 80, 2.039e12, **_A100), 300, 8, 1600 * GBIT, "A100 SXM and DGX A100"),
    _nvlink(_gpu("A100-40", 40, 1.555e12, **_A100), 300, 8, 1600 * GBIT, "A100 SXM and DGX A100"),
    # NVIDIA V100 data sheet, SXM2, 32 GB: no bfloat16 in its tensor cores, so that runs at
    # float32's rate; NVLink 300 GB/s both ways; DGX-1: 4 x 100 Gbit/s.
    _nvlink(
        _gpu("V100", 32, 900e9, bfloat16=15.7, float16=125.0, float32=15.7, float64=7.8),
        150,
        8,
        400 * GBIT,
        "V100 SXM2 and DGX-1",
    ),
    # NVIDIA L4 data sheet (halved where it states sparsity), float64 at 1/64 of float32;
    # PCIe 4.0 x16. The network of a cloud host of eight: 100 Gbit/s.
    _pcie(
        _gpu("L4", 24, 300e9, bfloat16=121.0, float16=121.0, float32=30.3, float64=0.473),
        32,
        100 * GBIT,
        "L4",
    ),
    # NVIDIA Ada GPU architecture paper, RTX 4090: float16 with float32 accumulation, float64 at
    # 1/64 of float32; PCIe 4.0 x16. Network assumed: 25 Gbit/s a host.
    _pcie(
        _gpu("RTX4090", 24, 1.008e12, bfloat16=165.2, float16=165.2, float32=82.6, float64=1.29),
        32,
        25 * GBIT,
        "GeForce RTX 4090",
    ),
)
_BY_KIND = {server.device.kind.lower(): server for server in _SERVERS}
KINDS = (*(server.device.kind for server in _SERVERS), "cpu")


def preset(text: str) -> Machine:
    """The machine that `[HOSTSx]DEVICESxKIND` names.

    More devices than one host of that kind takes are spread over full hosts.

    >>> preset("16xH100").name
    '2x8xH100'
    """
    if not isinstance(text, str):
        raise MachineError(f"machine is a {type(text).__name__}; give a name as '8xH100'")
    found = re.fullmatch(r"\s*(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)\s*", text)
    if found is None or 0 in (int(found[1] or 1), int(found[2])):
        raise MachineError(
            f"machine {text!r} is not [HOSTSx]DEVICESxKIND with at least one of each; write it as"
            " 8xH100 or 2x8xA100, or give a TOML file"
        )
    hosts, devices, kind = found[1] and int(found[1]), int(found[2]), found[3].lower()
    if kind == "cpu":
        return _cpu(hosts or 1, devices)
    server = _BY_KIND.get(kind)
    if server is None:
        close = get_close_matches(kind, _BY_KIND, 3, 0.8)
        near = " or ".join(_BY_KIND[name].device.kind for name in close)
        hint = f"did you mean {near}? " if near else ""
        raise MachineError(
            f"machine {text!r}: no preset for {found[3]!r}; {hint}known kinds are"
            f" {', '.join(KINDS)}; describe another one in a TOML file"
        )
    if devices > server.host_devices:
        if hosts is not None or devices % server.host_devices:
            raise MachineError(
                f"machine {text!r}: a host takes at most {server.host_devices}"
                f" {server.device.kind}; write it as HOSTSxDEVICESx{server.device.kind}, or"
                " describe the host in a TOML file"
            )
        hosts, devices = devices // server.host_devices, server.host_devices
    link = Level(
        server.link, devices, server.link_bytes_per_s * _LINK_REACHED, server.link_latency_seconds
    )
    share = server.network_bytes_per_s / server.host_devices
    network = Level("network", hosts or 1, share * _LINK_REACHED, _NETWORK_LATENCY)
    levels = (link, network) if network.size > 1 else (link,)
    return Machine(
        name=canonical_name(levels, server.device.kind),
        device=server.device,
        levels=levels,
        provenance=_SPECIFIED.format(source=server.source),
        collective_launch_seconds=_COLLECTIVE_LAUNCH,
    )


def _cpu(hosts: int, devices: int) -> Machine:
    """Processes of one core each on CPU hosts, joined by Gloo; all figures are assumed."""
    device = Device(
        kind="cpu",
        memory_bytes=Bytes(8 * GB),
        flop_per_s=(("float32", 80e9), ("float64", 40e9)),
        bytes_per_s=6e9,
        launch_seconds=Seconds(8e-6),
        efficiency=Efficiency(convolution=0.5, attention=0.5),
        channel_block=16,  # AVX-512
    )
    levels = [Level("host", devices, 0.8e9, Seconds(200e-6), gather_bytes_per_s=0.5e9)]
    if hosts > 1:
        levels.append(Level("network", hosts, 10 * GBIT * _LINK_REACHED / devices, Seconds(200e-6)))
    return Machine(
        name=canonical_name(tuple(levels), "cpu"),
        device=device,
        levels=tuple(levels),
        provenance="assumed: one core of a server per process, Gloo over the host's loopback",
        backend="gloo",
        collective_launch_seconds=Seconds(800e-6),
    )
