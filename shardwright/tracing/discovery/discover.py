"""Adds rules found by experiment to a graph's operators that have none.

An operator without a written rule takes the rule that the user stated, or the one that an
experiment finds. Found rules are cached in memory and, for torch's own operators only, on disk,
because a user's operator may change between runs. The name of the cache file contains a digest of
the experiment's code and torch's version, so that results of an older experiment are never read. A
user's rule is checked once for each call pattern.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.ir.graph import FUNCTION, OPAQUE, Arg, Graph, Op, Ref
from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.rules.analysis import notation_of
from shardwright.rules.notation import parse
from shardwright.rules.operators.loss_chunks import LossChunksError, with_loss_chunks
from shardwright.rules.operators.mlp_chunks import MlpChunksError, with_mlp_chunks
from shardwright.rules.user_rules import user_rule
from shardwright.tracing.arguments import require_call, require_module
from shardwright.tracing.capture import capture_call
from shardwright.tracing.discovery import experiment, recombine, samples, trial
from shardwright.tracing.discovery.experiment import discover
from shardwright.tracing.discovery.user_rule_check import check_user_rule
from shardwright.tracing.gradients.autograd_functions import calls_runnable, rule_of
from shardwright.tracing.graph_builder import Captured

_found: dict[str, str] = {}  # operator and argument pattern -> notation, empty if there is none
_checked: set[tuple[str, str]] = set()  # checked pairs of a user rule and a call


def capture_with_rules(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    numerics: Numerics = EXACT,
    outputs: str = "loss",
) -> Captured:
    """Capture a call of `model`, and give rules to the operators that have no written one.

    An operator gets the rule that the user stated, or one found by experiment. The arguments are
    those of `capture_call`. Loss and MLPs are in as many chunks as `numerics` say, and whole in a
    graph that does not permit them. Raises `CaptureError` for a call that cannot be captured, and
    for a stated rule that is false, `NumericsError` for products in 8 bits by a recipe that is not
    executed.
    """
    require_module(model)
    require_call(args, kwargs)
    numerics.require_executed()
    captured = capture_call(model, args, kwargs, numerics, outputs)
    with calls_runnable(captured.opaque):
        graph = with_rules(captured.graph)
    with suppress(LossChunksError):
        graph = with_loss_chunks(graph, numerics.loss_chunks)
    with suppress(MlpChunksError):
        graph = with_mlp_chunks(graph, numerics.mlp_chunks)
    return replace(captured, graph=graph)


def with_rules(graph: Graph) -> Graph:
    """`graph` with `Op.rule` set for operators without a written rule; empty if none is found.

    Opaque modules get none. Raises `CaptureError` for a stated rule that is false.
    """
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
    """The rule of a call: the user's, a known one of the cache, or one by experiment."""
    key = _pattern(graph, op)
    if op.target == FUNCTION:
        return rule_of(op, key, lambda least: discover(op, graph, least))
    if (text := user_rule(op.target)) is not None:
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
    """Raise `CaptureError` for a false user rule; one that does not fit the shapes fails later."""
    check_user_rule(op, graph, text, partial(parse, text))


def _pattern(graph: Graph, op: Op) -> str:
    """The text of a call with its operands replaced by their positions, dtypes and shapes."""
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
    name = f"rules-torch-{torch.__version__}-{_code_digest()}.json"
    return Path(cache).expanduser() / "shardwright" / name


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """A digest of the code of the experiment."""
    code = "".join(inspect.getsource(part) for part in (experiment, recombine, samples, trial))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _read() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):  # missing or truncated: rules are derived again
        return {}
    return found if isinstance(found, dict) else {}


def _write(findings: Mapping[str, str]) -> None:
    """Write the cache file atomically, because other processes read and write it too."""
    path = _file()
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(findings, indent=1))
        part.replace(path)
    except OSError:  # e.g. a read-only disk: rules are derived again
        part.unlink(missing_ok=True)
