"""Divides the seconds of a backward pass between its two parts: to inputs, and to weights."""

from __future__ import annotations

from shardwright.program.instructions import reads, writes
from shardwright.program.step.instructions import Backward, Forward, Gradients
from shardwright.program.step.region import Region
from shardwright.program.step.step_program import StepProgram

_HALF = 0.5  # gradients of inputs and of weights take about as long


def parts_to_inputs(program: StepProgram) -> dict[str, list[tuple[str, float]]]:
    """For calls with two parts of the backward pass, the operators and their shares of the first.

    The first part computes gradients of inputs; a share is a fraction of the operator's backward
    seconds.
    """
    weights = {
        one.call: {*(i for i, name in enumerate(one.made) if name), *(i for i, _ in one.totals)}
        for one in program.instructions
        if isinstance(one, Backward) and one.part is Gradients.WEIGHTS
    }
    found = {}
    for one in program.instructions:
        if isinstance(one, Forward) and one.call in weights:
            region = program.regions[one.region]
            parts = _of_instructions(region, weights[one.call])
            found[one.call] = list(zip(one.ops, parts, strict=True))
    return found


def _of_instructions(region: Region, weights: set[int]) -> list[float]:
    """For each instruction of a region, the fraction of its backward pass that leads to inputs."""
    of_weights = {region.inputs[i] for i in weights}
    fed = {name for i, name in enumerate(region.inputs) if region.trained[i] and i not in weights}
    found = []
    for one in region.variants[0]:
        to_inputs, to_weights = fed.intersection(reads(one)), of_weights.intersection(reads(one))
        if to_inputs:
            fed.update(writes(one))
        elif to_weights:
            of_weights.update(writes(one))
        found.append(_HALF if to_inputs and to_weights else 1.0 if to_inputs else 0.0)
    return found
