"""Adds rules found by experiment to a graph's operators that have none.

Where no rule is written the user may have stated one; else the operator is run
to find one out. Findings are kept in memory and, for torch's own operators, on
disk: an operator of the user's may be another tomorrow. The file's name says by which code and for
which torch its rules were found, so that what an older experiment took for a rule is never read.
A rule that the user stated is tried once for each call.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.ir.graph import Arg, Graph, Op, Ref
from shardwright.ir.numerics import EXACT, Numerics
from shardwright.rules.analysis import notation_of
from shardwright.rules.notation import parse
from shardwright.rules.user_rules import stated
from shardwright.tracing.arguments import require_call, require_module
from shardwright.tracing.capture import capture_call
from shardwright.tracing.discovery import experiment, recombine, samples, trial
from shardwright.tracing.discovery.experiment import discover
from shardwright.tracing.discovery.user_rule_check import check_statement
from shardwright.tracing.export.opaque import OPAQUE
from shardwright.tracing.export.operators import FUNCTION
from shardwright.tracing.gradients.autograd_functions import known, rule_of
from shardwright.tracing.graph_builder import Captured

_found: dict[str, str] = {}  # operator and argument pattern -> notation, empty if there is none
_checked: set[tuple[str, str]] = set()  # notations that were stated, and the calls they hold for


def capture_with_rules(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    habits: Numerics = EXACT,
    outputs: str = "loss",
) -> Captured:
    """The captured call; operators without a written rule carry what was stated or found out."""
    require_module(model)
    require_call(args, kwargs)
    captured = capture_call(model, args, kwargs, habits, outputs)
    with known(captured.opaque):
        return replace(captured, graph=with_rules(captured.graph))


def with_rules(graph: Graph) -> Graph:
    """`graph` with `Op.rule` filled in where no rule is written."""
    unwritten = {
        op.name for op in graph.ops if op.target != OPAQUE and notation_of(graph, op) is None
    }
    if not unwritten:
        return graph
    ops = tuple(
        replace(op, rule=_rule(graph, op)) if op.name in unwritten else op for op in graph.ops
    )
    return replace(graph, ops=ops)


def _rule(graph: Graph, op: Op) -> str:
    key = _pattern(graph, op)
    if op.target == FUNCTION:
        return rule_of(op, key, lambda least: discover(op, graph, least))
    if (text := stated(op.target)) is not None:
        if (text, key) not in _checked:
            _check(graph, op, text)
            _checked.add((text, key))
        return text
    if key not in _found:
        ours = op.target.startswith("aten.")
        known = _read() if ours else {}
        if key in known:
            _found[key] = known[key]
        else:
            _found[key] = discover(op, graph) or ""
            if ours:
                _write({**known, key: _found[key]})
    return _found[key]


def _check(graph: Graph, op: Op, text: str) -> None:
    """Raise `CaptureError` for a statement that is false; one that does not fit is told later."""
    check_statement(op, graph, text, partial(parse, text))


def _pattern(graph: Graph, op: Op) -> str:
    """The call with its values replaced by dtype and shape."""
    position = {name: i for i, name in enumerate(dict.fromkeys(op.operands))}

    def text(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return f"%{position[arg.name]}"
        if isinstance(arg, tuple):
            return f"[{', '.join(map(text, arg))}]"
        return str(arg)

    given = [text(a) for a in op.args] + [f"{key}={text(value)}" for key, value in op.kwargs]
    operands = [str(graph.tensor[name]) for name in position]
    return f"{op.target}({', '.join(given)}) of {', '.join(operands)}"


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"rules-torch-{torch.__version__}-{_method()}.json"
    return Path(cache).expanduser() / "shardwright" / name


@lru_cache(maxsize=1)
def _method() -> str:
    """A digest of the code of the experiment."""
    code = "".join(inspect.getsource(part) for part in (experiment, recombine, samples, trial))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _read() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):  # none yet, or one that was cut short: found out again
        return {}
    return found if isinstance(found, dict) else {}


def _write(findings: Mapping[str, str]) -> None:
    """Whole or not at all, since other processes read and write it too."""
    path = _file()
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(findings, indent=1))
        part.replace(path)
    except OSError:  # a cache that cannot be kept costs time, not correctness
        part.unlink(missing_ok=True)
