"""Chooses the precision of a target where the user gives none, and says where it is from.

A Hugging Face config names the dtype of its weights. Frameworks train such a model in mixed
precision: they compute in bfloat16 and keep parameters and the optimizer's state in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.graph import Graph, LeafKind
from shardwright.train.job import Job
from shardwright.train.targets.target_text import ConfigTarget, Target, parse_target

_MIXED = {
    "bf16": "computes in bfloat16, keeps parameters in float32",
    "fp16": "computes in float16 of a scaled loss, keeps parameters in float32",
}
_HINT = f"; --precision bf16 {_MIXED['bf16']}"
_HINT_IN_FLOAT16 = f"; --precision fp16 {_MIXED['fp16']}"


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
    target: Target, job: Job, asked: str | None, *, faster_in_bf16: bool
) -> ChosenPrecision:
    """The precision that is asked for, else that of the config's dtype, else that of the job.

    Args:
        target: what is trained.
        job: its job.
        asked: the option of the command, if given.
        faster_in_bf16: whether the devices compute faster in bfloat16 than in float32; else a
            config that names bfloat16 is trained in float32.
    """
    if asked is not None:
        return ChosenPrecision(asked, "as asked")
    hint = _HINT if faster_in_bf16 else ""
    found = parse_target(target.text, target.batch, target.seq, target.settings)
    if not isinstance(found, ConfigTarget):
        reason = "as the job says" if job.precision in _MIXED else "as the job builds the model"
        return ChosenPrecision(None, reason, hint)
    name, dtype = found.file.name, _dtype(found)
    if dtype == "bfloat16" and faster_in_bf16:
        return ChosenPrecision("bf16", f"from {name}")
    why_not = {
        "bfloat16": f"though {name} names bfloat16, in which this machine is no faster",
        "float16": f"though {name} names float16, which needs loss scaling",
        "float64": f"though {name} names float64",
    }
    if dtype in why_not:
        return ChosenPrecision(
            None, why_not[dtype], _HINT_IN_FLOAT16 if dtype == "float16" else _HINT
        )
    said = f"from {name}" if dtype == "float32" else f"as {name} names no dtype"
    return ChosenPrecision(None, said, hint)


def _dtype(target: ConfigTarget) -> str:
    """The dtype that a config, or `--set`, names for the weights; empty if none."""
    both = (target.given, target.content)
    named = (fields.get(key) for fields in both for key in ("dtype", "torch_dtype"))
    return str(next((name for name in named if name), "")).removeprefix("torch.")
