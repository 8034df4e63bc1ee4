"""What is planned of a model at its published size, on the meta device."""

import time
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright.ir.frontier import InfeasibleError
from shardwright.rules.analysis import analyze
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.graph_builder import DROPOUT
from tests.zoo import ZOO

MACHINE = "8xH100"
KINDS = ("written", "found", "replicated")
_META = torch.device("meta")


@dataclass(frozen=True)
class Published:
    """The captured step of a model, the rules of its operators, and its plan.

    * `step`: which step of capture did it;
    * `operators`, `work`: per kind of rule, the share of all operators and of all multiply-adds;
    * `whole`: the largest share of multiply-adds of one operator that no rule can split, and
      that operator.
    """

    step: str
    count: int
    operators: dict[str, float]
    work: dict[str, float]
    whole: tuple[float, str]
    plan: str = ""
    capture_seconds: float = 0.0
    search_seconds: float = 0.0


def published(name, machine=MACHINE):
    """Capture and plan a model of the zoo."""
    with torch.device("meta"):
        model, batch = ZOO[name](True)
    start = time.process_time()
    graph = sw.capture(model, (), batch)
    captured = time.process_time() - start
    text = _planned(graph, sw.Machine.preset(machine))
    seconds = time.process_time() - start - captured
    return described(graph, plan=text, capture_seconds=captured, search_seconds=seconds)


def _planned(graph, machine):
    """The fastest plan that fits, or the smallest where none does, in a few words."""
    frontier = sw.search(graph, machine)
    try:
        plan, fits = frontier.fastest(machine.device.usable_bytes), ""
    except InfeasibleError:
        plan, fits = frontier.smallest("unlimited"), " (does not fit)"
    memory = plan.peak_bytes / 2**30
    return f"{plan.mesh}, {plan.step_seconds * 1e3:.1f} ms, {memory:.1f} GiB{fits}"


def described(graph, **rest):
    """Of a captured graph, what does not depend on a machine."""
    analysis = analyze(graph)
    kinds = dict.fromkeys(analysis.discovered, "found")
    kinds.update(dict.fromkeys(analysis.unknown, "replicated"))
    counts, work = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    largest, known = (0, ""), {}
    for op in graph.ops:
        rule = analysis.rules[op.name]
        mine = multiply_adds(graph, op, analysis, known)
        kind = kinds.get(op.name, "written")
        counts[kind] += 1
        work[kind] += mine
        if mine > largest[0] and len(rule.choices()) - len(rule.linear) == 1:
            largest = (mine, f"{op.target} ({op.source})")
    total, all_work = len(graph.ops), max(1, sum(work.values()))
    return Published(
        step=graph.note.partition(",")[0].removeprefix("captured ") or "plain",
        count=total,
        operators={kind: count / total for kind, count in counts.items()},
        work={kind: count / all_work for kind, count in work.items()},
        whole=(largest[0] / all_work, largest[1]),
        **rest,
    )


def multiply_adds(graph, op, analysis, known):
    """By torch's own count, which knows nothing of rules, or as the rule counts them."""
    return max(_by_torch(graph, op, known), _in_notation(analysis.rules[op.name]))


def _by_torch(graph, op, known):
    """At least one per element touched."""
    tensors = [graph.tensor[name] for name in (*op.operands, *op.outputs)]
    place = {name: str(i) for i, name in enumerate(dict.fromkeys(op.operands))}
    key = (op.target, tuple((t.shape, t.dtype) for t in tensors), _anonymous(op.args, place))
    if key not in known:
        values = {
            name: torch.empty(
                graph.tensor[name].shape,
                dtype=getattr(torch, graph.tensor[name].dtype),
                device=_META,
            )
            for name in op.operands
        }
        with FlopCounterMode(display=False) as counter:
            if op.target != DROPOUT:  # which only a lowered program can call
                call_op(op, values, _META)
        touched = max((t.num_elements for t in tensors), default=0)
        known[key] = max(counter.get_total_flops() // 2, touched)
    return known[key]


def _anonymous(arg, place):
    if isinstance(arg, tuple):
        return tuple(_anonymous(a, place) for a in arg)
    return place.get(arg.name, arg.name) if hasattr(arg, "name") else repr(arg)


def _in_notation(rule):
    """Multiply-adds as the rule counts them."""
    if not rule.work:
        return 0
    work = rule.work_repeats
    for name in rule.work:
        work *= rule.factor[name].size
    return work
