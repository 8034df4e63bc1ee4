"""Chooses the precision of a target where the user gives none, and says where it is from.

A Hugging Face config names the dtype of its weights. Frameworks train such a model in mixed
precision: they compute in 16 bits and keep parameters and the optimizer's state in float32. Where
devices have both, that is bfloat16, whose range needs no scaled loss; also of weights in float16.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.options.mixed_precision import HALF_DTYPES
from shardwright.train.job import Job
from shardwright.train.targets.target_text import ConfigTarget, Target, parse_target

_MIXED = {
    "bf16": "computes in bfloat16, keeps parameters in float32",
    "fp16": "computes in float16 of a scaled loss, keeps parameters in float32",
}
_HINTS = {"bfloat16": f"; --precision bf16 {_MIXED['bf16']}"}
_HINTS["float16"] = f"; --precision fp16 {_MIXED['fp16']}"


@dataclass(frozen=True, slots=True)
class ChosenPrecision:
    """The option `precision` of a capture, and the reason for it.

    Attributes:
        option: "model", "bf16", "fp16" or "tf32"; None keeps that of the job.
        reason: words that follow the name of the dtype.
        hint: follows the reason where the model is captured in float32.
    """

    option: str | None
    reason: str
    hint: str = ""

    def sentence(self, graph: Graph) -> str:
        """The precision of a captured graph and its reason, as "float32, from config.json"."""
        if (mixed := graph.numerics.precision) in _MIXED:
            return f"{mixed} mixed precision, {self.reason}: {_MIXED[mixed]}"
        if mixed == "tf32":
            return f"float32 with products in TF32, {self.reason}"
        leaves = graph.leaves_of(LeafKind.PARAMETER)
        dtypes = {graph.tensor[leaf.name].dtype for leaf in leaves}
        found = " and ".join(sorted(name for name in dtypes if "float" in name)) or "float32"
        return f"{found}, {self.reason}{self.hint if found == 'float32' else ''}"


def chosen_precision(
    target: Target, job: Job, asked: str | None, *, fast_halves: tuple[str, ...]
) -> ChosenPrecision:
    """The precision that is asked for, else that of the config's dtype, else that of the job.

    Args:
        target: what is trained.
        job: its job.
        asked: the option of the command, if given.
        fast_halves: of bfloat16 and float16 those in which devices compute faster than in float32;
            a config that names another one is trained in float32.
    """
    if asked is not None:
        return ChosenPrecision(asked, "as asked")
    hint = next((_HINTS[half] for half in fast_halves), "")
    found = parse_target(target.text, target.batch, target.seq, target.settings)
    if not isinstance(found, ConfigTarget):
        reason = "as the job says" if job.precision in _MIXED else "as the job builds the model"
        return ChosenPrecision(None, reason, hint)
    name, dtype = found.file.name, _dtype(found)
    if dtype in HALF_DTYPES and "bfloat16" in fast_halves:
        half = "" if dtype == "bfloat16" else ", which names float16"
        return ChosenPrecision("bf16", f"from {name}{half}")
    if dtype == "float16" and dtype in fast_halves:
        return ChosenPrecision("fp16", f"from {name}")
    if dtype in HALF_DTYPES:
        slow = f"though {name} names {dtype}, in which this machine is no faster"
        return ChosenPrecision(None, slow, hint)
    if dtype == "float64":
        return ChosenPrecision(None, f"though {name} names float64", hint)
    said = f"from {name}" if dtype == "float32" else f"as {name} names no dtype"
    return ChosenPrecision(None, said, hint)


def _dtype(target: ConfigTarget) -> str:
    """The dtype that a config, or `--set`, names for the weights; empty if none.

    A model of several towers may name it in the config of its text alone.
    """
    text = target.content.get("text_config")
    places = (target.given, target.content, text if isinstance(text, dict) else {})
    named = (fields.get(key) for fields in places for key in ("dtype", "torch_dtype"))
    return str(next((name for name in named if name), "")).removeprefix("torch.")
