"""Finds the checks of values in a user's code: conditions that raise.

A trace has no values, so it cannot raise as the code would. The line of a condition tells whether
one of its two values does nothing but raise.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from types import FrameType

from shardwright.tracing.decompose.buffers import is_users
from shardwright.tracing.export.source_location import importable


def running_frame() -> FrameType | None:
    """The frame of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """File and line of the user's code that runs in `frame`."""
    if frame is None:
        return "an unknown line"
    return f"{importable(frame.f_code.co_filename)}:{frame.f_lineno}"


def unraised(frame: FrameType) -> bool | None:
    """The value of the condition that runs in `frame` for which it raises nothing.

    None unless the line is the condition of an `if` whose branch ends with `raise`, or of an
    `assert`: such a check of values is an operator of the graph.
    """
    lines = linecache.getlines(frame.f_code.co_filename)
    block = inspect.getblock(lines[frame.f_code.co_firstlineno - 1 :])
    try:
        tree = ast.parse(textwrap.dedent("".join(block)))
    except SyntaxError:
        return None
    line = frame.f_lineno - frame.f_code.co_firstlineno + 1
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert) and _covers(node.test, line):
            checks = isinstance(node, ast.Assert) or isinstance(node.body[-1], ast.Raise)
            wanted = set(_operands(node.test, isinstance(node, ast.Assert)))
            return wanted.pop() if checks and len(wanted) == 1 else None
    return None


def _operands(test: ast.expr, wanted: bool) -> Iterator[bool]:
    """For each operand of a condition, the value with which the condition can be `wanted`."""
    if isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _operands(operand, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, not wanted)
    else:
        yield wanted


def _covers(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
