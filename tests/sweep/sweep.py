"""Every factor of every operator of an entry split over two ranks, against the module run eagerly.

An entry is *exact* if the captured graph equals the module and each split equals the graph, in
float64: loss, every gradient and every buffer. It is *whole* if nothing of it can be split, and
*refused* if it cannot be captured and one line says why.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.placements import tiling_text, tilings
from shardwright.rules.rule import PassPartial
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.verify.module_comparison import TOLERANCE, ModuleComparison, errors_between
from shardwright.runtime.verify.module_comparison import measure as measured
from shardwright.runtime.verify.module_reference import widened
from shardwright.runtime.verify.verify import one_device, to_float64
from shardwright.runtime.verify.verify_reference import comparable
from shardwright.tracing.call import CaptureError
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.sweep.entries import Entry, entries

ROOT = Path(__file__).resolve().parents[2]
MESH = Mesh.parse("a=2")
FLOOR = 1e-4  # of gradients' errors, relative to the largest gradient


@dataclass
class Finding:
    """The verdict on one entry: exact, whole, refused, wrong or crash."""

    name: str
    verdict: str = "exact"
    samples: int = 0
    assignments: int = 0  # splits that were run
    known: int = 0  # splits that were run for an entry before
    whole: dict[str, str] = field(default_factory=dict)  # operators that cannot be split, and why
    texts: list[str] = field(default_factory=list)  # why it was refused, or what is wrong
    commit: str = ""  # of the code that was checked

    def note(self, verdict: str, text: str) -> None:
        order = ("exact", "whole", "refused", "crash", "wrong")
        self.verdict = max(self.verdict, verdict, key=order.index)
        text = text.replace(f"{ROOT}/", "")
        if text not in self.texts:
            self.texts.append(text)


@dataclass(frozen=True)
class Subject:
    """A captured module in float64 beside itself on one device.

    `wrong` says how the graph differs from the module; empty where it does not.
    """

    captured: Any
    analysis: Analysis
    payload: dict[str, Any]
    serial: dict[str, Any]
    wrong: str = ""

    @staticmethod
    def of(module: nn.Module, captured: Any, tensors: tuple[torch.Tensor, ...]) -> Subject:
        """Compare the graph with the module and measure it."""
        graph = comparable(to_float64(captured.graph))
        captured = replace(captured, graph=graph)
        batch = {f"args.{i}": tensor for i, tensor in enumerate(tensors)}
        payload = {
            "output_keys": list(captured.output_keys),
            "weights": {k: widened(p) for k, p in module.named_parameters()},
            "buffers": {k: widened(b) for k, b in module.named_buffers(remove_duplicate=False)},
            "constants": {k: widened(c) for k, c in captured.constants.items()},
            "batch": {k: widened(v) for k, v in batch.items()},
        }
        sides = ModuleComparison(
            copy.deepcopy(module), captured, payload, batch, torch.optim.SGD, one_device
        )
        compared = sides.run(graph)
        wrong = ""
        if not compared.ok:
            reason = compared.not_compared or f"{compared.worst} differs by {compared.error:.1e}"
            wrong = f"graph against module: {reason}"
        whole = payload | {"opaque": captured.opaque}
        serial = (
            {} if wrong else measured(one_device(graph, whole), torch.optim.SGD, whole["batch"])
        )
        return Subject(captured, analyze(graph), whole, serial, wrong)


def check_all(names: list[str], file: str, commit: str = "") -> None:
    """On each of two ranks: check the entries of these names; rank 0 appends findings to `file`.

    They say that they hold for `commit`.
    """
    warnings.simplefilter("ignore")
    device_mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
    known = {entry.name: entry for entry in entries()}
    tried = set[Any]()
    for name in names:
        found = check(known[name], device_mesh, tried)
        if dist.get_rank() == 0:
            with Path(file).open("a") as out:
                out.write(json.dumps(asdict(replace(found, commit=commit))) + "\n")


def check(entry: Entry, device_mesh: DeviceMesh, tried: set[Any]) -> Finding:
    """The verdict on one entry, on this rank; calls of operators that were `tried` are known."""
    found = Finding(entry.name)
    for module, tensors in entry.make():
        found.samples += 1
        try:
            captured = capture_with_rules(module, tensors)
        except CaptureError as e:
            text = str(e)
            found.note("refused" if "\n" not in text.strip() else "crash", text)
            continue
        except Exception as e:
            found.note("crash", f"capture: {type(e).__name__}: {_line(e)}")
            continue
        try:
            _check_splits(found, module, tensors, captured, device_mesh, tried)
        except Exception as e:
            found.note("crash", f"{type(e).__name__}: {_line(e)}")
    if found.verdict == "exact" and found.samples and not found.assignments + found.known:
        found.verdict = "whole"
    return found


def _check_splits(
    found: Finding,
    module: nn.Module,
    tensors: tuple[torch.Tensor, ...],
    captured: Any,
    device_mesh: DeviceMesh,
    tried: set[Any],
) -> None:
    subject = Subject.of(module, captured, tensors)
    if subject.wrong:
        found.note("wrong", subject.wrong)
        return
    captured, analysis, whole = subject.captured, subject.analysis, subject.payload
    graph, serial = captured.graph, subject.serial
    # A partial sum is zero on all ranks but one, and infinity times zero is no number.
    finite = all(t.isfinite().all() for t in (*tensors, serial["loss"]))
    for name, tiling in _splits(found, graph, analysis, tried):
        if not finite and any(isinstance(choice, PassPartial) for choice in tiling):
            continue
        try:
            parallel = parallel_module(captured, analysis, whole, {name: tiling}, device_mesh)
            errors = errors_between(
                serial, measured(parallel, torch.optim.SGD, whole["batch"]), FLOOR
            )
        except Exception as e:
            text = " ".join(tiling_text(tiling))
            found.note("crash", f"{name} split {text}: {type(e).__name__}: {_line(e)}")
            dist.barrier()
            continue
        found.assignments += 1
        worst = max(errors, key=lambda key: errors[key])
        if errors[worst] > TOLERANCE:
            text = " ".join(tiling_text(tiling))
            found.note(
                "wrong", f"{name} split {text}: {' '.join(worst)} differs by {errors[worst]:.1e}"
            )


def _splits(found: Finding, graph: Any, analysis: Analysis, tried: set[Any]) -> list[Any]:
    """Operators with each of their tilings that splits; calls that were tried come once."""
    splits = []
    for op in graph.ops:
        operands = tuple(str(graph.tensor[name]).partition(" ")[2] for name in op.operands)
        key = (op.target, str(op.args), str(op.kwargs), operands, str(analysis.rules[op.name]))
        options = [t for t, _ in tilings(analysis.rules[op.name], MESH) if t != (None,)]
        if key in tried:
            found.known += len(options)
            continue
        tried.add(key)
        if why := analysis.rules[op.name].why_unsplittable:
            found.whole.setdefault(op.target, why)
        splits += [(op.name, tiling) for tiling in options]
    return splits


def parallel_module(
    captured: Any, analysis: Analysis, payload: Any, split: Any, device_mesh: DeviceMesh
) -> ParallelModule:
    """This rank's part of a graph whose operators in `split` have these tilings, others none."""
    graph = captured.graph
    weights = dict(payload["weights"])
    for leaf in graph.leaves:
        weights.update((key, weights[leaf.keys[0]]) for key in leaf.keys if leaf.keys[0] in weights)
    return ParallelModule(
        captured,
        analysis,
        Decisions(
            MESH,
            {op.name: (None,) for op in graph.ops} | split,
            {leaf.name: Layout.replicated(MESH) for leaf in graph.leaves},
        ),
        ModuleOptions(weights, payload["buffers"], seed=1),
        device_mesh,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
