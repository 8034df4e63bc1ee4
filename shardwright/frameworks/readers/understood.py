"""Values between a reader and `read_config`, and arithmetic that readers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.settings import Settings

STEP, MICRO = "tokens of the step", "micro-batches"  # what a loss is a mean of
SCRIPT = "what the training script says"


@dataclass(frozen=True, slots=True)
class Given:
    """Facts that the caller knows beside the file.

    Attributes:
        devices: ranks of the job; None: only what the file says.
        companion: reads another file that the config names; raises `FrameworkError`.
    """

    devices: int | None
    companion: Callable[[str], Document]


@dataclass(frozen=True, slots=True, kw_only=True)
class Understood:
    """The findings of a reader.

    Attributes:
        dialect: the kind of file.
        fields: of `Strategy`, those that the file decides.
        batch: what a step computes.
        model: what is said of the model.
        loss_mean: `STEP`, `MICRO` or `SCRIPT`.
        clip: the norm to which gradients are clipped; None: not, or unknown.
    """

    dialect: str
    fields: Mapping[str, Any]
    batch: Batch
    model: ModelHints = field(default=ModelHints())
    loss_mean: str = STEP
    clip: float | None = None


def devices_of(settings: Settings, given: Given, named: str, in_file: int | None) -> int:
    """The ranks of the job; raises `FrameworkError` where file and call disagree or say nothing.

    Args:
        settings: the keys of the file.
        given: what is known beside it.
        named: the key that gives the ranks, for messages.
        in_file: its value.
    """
    if in_file is not None and given.devices is not None and in_file != given.devices:
        settings.refuse(named, f"the file says {in_file} devices, and {given.devices} are given")
    devices = in_file if in_file is not None else given.devices
    if devices is None:
        raise FrameworkError(
            f"{settings.document.name}: it does not say on how many devices it runs; give --devices"
        )
    return devices


def rest_of(settings: Settings, devices: int, others: Mapping[str, int]) -> int:
    """The degree that is left of the devices; `others` are degrees by the key that gives them."""
    product = 1
    for degree in others.values():
        product *= degree
    if devices % product:
        shown = " x ".join(f"{settings.where(name)}" for name, n in others.items() if n > 1)
        raise FrameworkError(
            f"{settings.document.name}: {devices} devices are not divided by the {product} ranks of"
            f" {shown}"
        )
    return devices // product


def micro_batches(settings: Settings, named: str, samples: int, each: int) -> int:
    """The number of `each` samples that fit into `samples`; raises `FrameworkError`."""
    if samples % each:
        settings.refuse(
            named, f"a multiple of the {each} samples that all ranks take at once is needed"
        )
    return samples // each


MIXED_BF16 = {
    "param_dtype": "bfloat16",
    "reduce_dtype": "float32",
    "grad_dtype": "float32",
    "state_dtype": "float32",
}
WHOLE = dict.fromkeys(MIXED_BF16, "float32")
