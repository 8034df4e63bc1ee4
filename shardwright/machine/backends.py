"""The libraries that run collectives: what each does natively, for prices and for the runtime.

How each is called is in `runtime/backend`: as NCCL is, unless it has a class there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Facts of one backend of `torch.distributed`.

    * `device`: the type of device whose ranks it joins, as torch names it;
    * `receives_terms`: whether a rank receives the terms of a scattered sum from every other rank,
      side by side, and adds them up itself;
    * `alone_bytes`: a gathered copy of at least so many bytes has a message of its own, because to
      copy it out of one that several share takes longer; None: every copy of a bucket shares one;
    * `allocation_bytes`: torch's allocator on its device hands out multiples of it.
    """

    name: str
    device: str
    receives_terms: bool
    alone_bytes: int | None
    allocation_bytes: int


# Gloo's 1 MiB: measured on two ranks of one host, where copying shares the memory with sending.
_SPECS = (
    BackendSpec("nccl", "cuda", False, None, 512),
    BackendSpec("gloo", "cpu", True, 2**20, 1),
)
BACKENDS = {spec.name: spec for spec in _SPECS}


def backend_on(device: str) -> BackendSpec:
    """The backend that joins ranks on devices of this type: "cuda" or "cpu"; else `ValueError`."""
    for spec in _SPECS:
        if spec.device == device:
            return spec
    known = ", ".join(spec.device for spec in _SPECS)
    raise ValueError(f"no backend joins ranks on {device!r}; there are those on {known}")
