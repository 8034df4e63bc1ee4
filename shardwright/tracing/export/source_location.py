"""Source locations of the nodes of an exported program, and errors that name them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

from shardwright.ir.graph import Source
from shardwright.tracing.call import CaptureError

_ATTENTION = "scaled_dot_product_attention"
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])  # the package `tracing`
_POSITIONS = (
    "torch.where with one argument, and nonzero, list positions: keep the mask, and compute with"
    " torch.where(mask, x, 0) or with a product by it, or give torch.nonzero_static a size"
)
_SELECTED = "give it a fixed size, as torch.where(mask, x, 0) has where x[mask] has not"
_FIXED = {  # what to write instead, by kinds of operators
    "where": _POSITIONS,
    "nonzero": _POSITIONS,
    "nonzero_numpy": _POSITIONS,
    "argwhere": _POSITIONS,
    "index": _SELECTED,
    "masked_select": _SELECTED,
    "repeat_interleave": (
        "give repeat_interleave output_size, if the sum of the numbers is the same for every batch,"
        " or repeat each row by one number that is no tensor"
    ),
}
PREFIX = "model."  # FlatCall holds the user's model under this name


def require_fixed_sizes(node: fx.Node, values: tuple[Any, ...]) -> None:
    """Raise `CaptureError` where the type or size of a node's result depends on data."""
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise error(
                node,
                f"{node.target} takes a number out of a tensor, which depends on the data; keep it"
                " a tensor, without .item()",
                by_value=True,
            )
        shape = tuple(getattr(value, "shape", ()))
        if not all(isinstance(size, int) for size in shape):
            raise error(
                node,
                f"{node.target} gives a tensor of {_shape_text(shape)}, as many as the data say;"
                f" {_advice(node)}",
                by_value=True,
            )


def _advice(node: fx.Node) -> str:
    """Advice for an operator whose result has as many elements as the data say."""
    words = str(node.target).split(".")
    kind = words[1] if len(words) > 1 else words[0]
    return _FIXED.get(kind, "give it a fixed size")


def error(node: fx.Node, message: str, *, by_value: bool = False) -> CaptureError:
    """The error for a node that cannot be captured, with its source line and module."""
    source = source_of(node)
    return CaptureError(f"{source}: {message}", source.module, by_value=by_value)


def _shape_text(shape: tuple[Any, ...]) -> str:
    return " x ".join(str(size) if isinstance(size, int) else "?" for size in shape) + " elements"


def part_of(node: fx.Node) -> str:
    """The attention call that a node belongs to, if attention was replaced by its formula."""
    call, _ = node.meta.get("torch_fn") or ("", "")
    whole = str(node.target).startswith(f"aten.{_ATTENTION}.")
    return call if call.startswith(_ATTENTION) and not whole else ""


def source_of(node: fx.Node) -> Source:
    """The module whose call made a node, and the line of the user's code in it."""
    module = ""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        module = path
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    users = [(f, int(n)) for f, n in frames if not f.startswith((_TORCH, _OURS, "<"))]
    file, line = users[-1] if users else ("", 0)
    file = importable(file)
    module = re.sub(r"@\d+$", "", module)
    return Source("" if module == "model" else module.removeprefix(PREFIX), file, line)


def importable(file: str) -> str:
    """The path relative to the import folder, which is short and equal on all machines."""
    folders = [f for f in (os.getcwd(), *sys.path) if f and file.startswith(f + os.sep)]
    return file[len(max(folders, key=len)) + 1 :] if folders else file
