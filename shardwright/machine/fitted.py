"""Figures of presets that were fitted to published measurements, and those that are assumed.

`python -m benchmarks.published.fit` prints the fitted ones from the rows in
`benchmarks/published/rows`; docs/published.md says how well they predict sources that were left
out of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fitted:
    """A figure by architecture of the GPU, or one for all.

    Attributes:
        values: by architecture; the entry "" is for those without rows.
        unit: of the values, as machine files write it.
        rows: the rows that it was fitted to; architectures without rows have the nearest one's.
    """

    values: Mapping[str, float]
    unit: str
    rows: str

    def of(self, architecture: str) -> float:
        """The value for an architecture."""
        return self.values.get(architecture, self.values[""])

    def text(self, architecture: str) -> str:
        """The value with its unit."""
        return f"{self.of(architecture):g}{self.unit}"


_SOURCES = "rows of vtrain, llm-foundry, torchtitan, fms-fsdp and calculon, 2026-11"
_HOPPER = f"{_SOURCES}; GPUs that are neither Ampere nor Hopper have no rows and take Hopper's"
_HOSTS = (
    "mean of a guess, of the host that rows of vtrain suggest, and of 40us measured on one H200"
    " (benchmarks/gpu)"
)
FITTED: dict[str, Fitted] = {
    "efficiency.matmul": Fitted({"ampere": 0.82, "": 0.63}, "", _HOPPER),
    "efficiency.attention": Fitted({"ampere": 0.48, "": 0.38}, "", _HOPPER),
    "efficiency.memory": Fitted({"": 0.80}, "", _SOURCES),
    "launch": Fitted({"": 2.1}, "us", _SOURCES),
    "issue": Fitted({"": 39.0}, "us", _HOSTS),
    "product_depth": Fitted({"": 68.0}, "", _SOURCES),
    "link bandwidth": Fitted({"": 0.85}, " of what is specified", _SOURCES),
    "collective_launch": Fitted({"": 60.0}, "us", _SOURCES),
}
HOST_LINK_REACHED = 0.8
OVERLAP = 0.8  # the part of messages of parameters and of their gradients that operators hide
CONTEXT_SOURCE = "driver, kernels of cuBLAS and cuDNN, buffers of NCCL"
WORKSPACE_SOURCE = "cuBLAS, for two threads; 1 % of an H200's peaks is left (benchmarks/gpu)"
HOST_MEMORY_SOURCE = "of usual servers with this GPU, shared evenly"
ASSUMED: dict[str, tuple[str, str]] = {
    "overlap": (
        f"{OVERLAP:g}",
        "of gathers of parameters and sums of gradients: the least error of published rows of FSDP",
    ),
    "efficiency.convolution": ("0.5", "no published row trains convolutions"),
    "contention": ("1", "links are shared in full by collectives along two axes"),
    "host link": (
        f"{HOST_LINK_REACHED:g} of what is specified",
        "of pinned copies, all GPUs at once; halve host_bandwidth where two share lanes",
    ),
    "expert_skew": (
        "1.25",
        "published rows of experts that are priced force tokens to be balanced: no row says",
    ),
}
