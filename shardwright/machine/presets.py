"""Machines known by name: `8xH100`, `2x8xA100`, `2xcpu`.

Peaks, memory and link rates are the makers' published figures: dense, without
structured sparsity, float32 without TF32 (PyTorch's default). docs/reference/machines.md names
the documents and where the figures were compared with them. The fractions that
programs reach (`Efficiency`, `_LINK_REACHED`), latencies and launch times are
assumptions: measure the machine instead where possible.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from shardwright.ir.layout import Bytes, Seconds
from shardwright.machine.fitted import FITTED, HOST_LINK_REACHED, OVERLAP
from shardwright.machine.gpus import GPUS, TERA, Gpu
from shardwright.machine.model import (
    Device,
    Efficiency,
    Level,
    Machine,
    MachineError,
    canonical_name,
)

GB = 10**9
GIB = 2**30
GBIT = 1e9 / 8

_CPU_LINK_REACHED = 0.8  # assumed, of what links are specified to carry
_CONVOLUTION = 0.5  # assumed
# Assumed: the driver's context, the kernels of cuBLAS and cuDNN, and NCCL's buffers; `profile`
# measures it.
_CONTEXT = Bytes(GB)
# Of matrix products, each with a workspace: the thread of the forward pass has one, and autograd's.
HANDLES = 2
_LINK_LATENCY = {"nvlink": Seconds(1.5e-6), "xgmi": Seconds(2e-6), "pcie": Seconds(5e-6)}  # assumed
_NETWORK_LATENCY = Seconds(5e-6)  # assumed: one hop between hosts
_SPECIFIED = (
    "specified: published figures of {source}; fitted to published measurements: efficiencies,"
    " launches and links; `shardwright doctor --machine` lists the origin of each figure"
)


_BY_KIND = {gpu.kind.lower(): gpu for gpu in GPUS}
KINDS = (*(gpu.kind for gpu in GPUS), "cpu")


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
            f" {_meant(text) or '8xH100 or 2x8xA100'}, or give a TOML file"
        )
    hosts, devices, kind = found[1] and int(found[1]), int(found[2]), found[3].lower()
    if kind == "cpu":
        return _cpu(hosts or 1, devices)
    gpu = _BY_KIND.get(kind)
    if gpu is None:
        close = get_close_matches(kind, _BY_KIND, 3, 0.8)
        near = " or ".join(_BY_KIND[name].kind for name in close)
        hint = f"did you mean {near}? " if near else ""
        raise MachineError(
            f"machine {text!r}: no preset for {found[3]!r}; {hint}known kinds are"
            f" {', '.join(KINDS)}; describe another one in a TOML file"
        )
    if devices > gpu.host_gpus:
        if hosts is not None or devices % gpu.host_gpus:
            raise MachineError(
                f"machine {text!r}: a host takes at most {gpu.host_gpus}"
                f" {gpu.kind}; write it as HOSTSxDEVICESx{gpu.kind}, or"
                " describe the host in a TOML file"
            )
        hosts, devices = devices // gpu.host_gpus, gpu.host_gpus
    return _servers(gpu, hosts or 1, devices)


def _servers(gpu: Gpu, hosts: int, devices: int) -> Machine:
    """So many servers with so many devices each."""
    part = FITTED["link bandwidth"].of(gpu.architecture)
    reached = gpu.link_gb_per_s * GB * part
    link = Level(gpu.link, devices, reached, _LINK_LATENCY[gpu.link])
    share = gpu.network_gbit * GBIT / gpu.host_gpus
    network = Level("network", hosts, share * part, _NETWORK_LATENCY)
    levels = (link, network) if hosts > 1 else (link,)
    return Machine(
        name=canonical_name(levels, gpu.kind),
        device=_device(gpu),
        levels=levels,
        provenance=_SPECIFIED.format(source=gpu.source),
        collective_launch_seconds=_microseconds("collective_launch", gpu),
        overlap=OVERLAP,
    )


def _device(gpu: Gpu) -> Device:
    def part(name: str) -> float:
        return FITTED[f"efficiency.{name}"].of(gpu.architecture)

    return Device(
        gpu.kind,
        Bytes(int(gpu.memory_gib * GIB)),
        tuple((dtype, figure * TERA) for dtype, figure in gpu.tflops),
        gpu.tb_per_s * TERA,
        _microseconds("launch", gpu),
        Efficiency(part("matmul"), _CONVOLUTION, part("attention"), part("memory")),
        context_bytes=_CONTEXT,
        workspace_bytes=Bytes(HANDLES * gpu.workspace_bytes),
        issue_seconds=_microseconds("issue", gpu),
        units=gpu.units,
        product_depth=int(FITTED["product_depth"].of(gpu.architecture)),
        host_memory_bytes=Bytes(int(gpu.host_gib * GIB)),
        host_bytes_per_s=gpu.host_gb_per_s * GB * HOST_LINK_REACHED,
    )


def _microseconds(name: str, gpu: Gpu) -> Seconds:
    return Seconds(FITTED[name].of(gpu.architecture) * 1e-6)


def _meant(text: str) -> str:
    """The preset that a text may mean, in which a kind and numbers stand in another form.

    >>> _meant("8h100"), _meant("8 x H100"), _meant("H100*8"), _meant("H100")
    ('8xH100', '8xH100', '8xH100', '')
    """
    kinds = sorted(KINDS, key=len, reverse=True)  # H100-PCIe before H100
    kind = next((kind for kind in kinds if kind.lower() in text.lower()), "")
    start = text.lower().find(kind.lower())
    counts = re.findall(r"\d+", text[:start] + " " + text[start + len(kind) :])
    if not kind or len(counts) not in (1, 2) or "0" in counts:
        return ""
    return "x".join([*counts, kind])


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
        host_memory_bytes=Bytes(8 * GB),
        host_bytes_per_s=3e9,  # as the bandwidth of its memory, read and written
    )
    levels = [Level("host", devices, 0.8e9, Seconds(200e-6), gather_bytes_per_s=0.5e9)]
    if hosts > 1:
        levels.append(
            Level("network", hosts, 10 * GBIT * _CPU_LINK_REACHED / devices, Seconds(200e-6))
        )
    return Machine(
        name=canonical_name(tuple(levels), "cpu"),
        device=device,
        levels=tuple(levels),
        provenance="assumed: one core of a server per process, Gloo over the host's loopback",
        backend="gloo",
        collective_launch_seconds=Seconds(800e-6),
    )
