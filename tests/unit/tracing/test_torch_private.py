"""Private names of torch are in one file, and do there what the others rely on."""

import ast
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import shardwright
from shardwright.tracing.torch_private import (
    TorchDispatchMode,
    tree_leaves,
    tree_map,
    version_of,
    without_function_modes,
)

PACKAGE = Path(shardwright.__file__).parent
ALLOWED = {
    "tracing/torch_private.py",
    "tracing/gradients/hooks.py",
    "runtime/parameters/dtensor_access.py",
    "runtime/parameters/dtensor_spec.py",
}
OF_TENSORS = ("_version", "_spec", "_local_tensor", "_backward_hooks", "_base")


def private_names(path):
    """Modules of torch with a private part that a file imports, and private fields of tensors."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(attr=attr, value=value) if attr in OF_TENSORS:
                if not (isinstance(value, ast.Name) and value.id == "self"):
                    yield attr
                continue
            case _:
                continue
        yield from (
            name
            for name in modules
            if name.split(".")[0] == "torch" and any(p.startswith("_") for p in name.split("."))
        )


def test_no_other_file_has_private_names_of_torch():
    found = {
        file: names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (file := str(path.relative_to(PACKAGE))) not in ALLOWED
        and (names := list(private_names(path)))
    }
    assert found == {}
    assert all(
        list(private_names(PACKAGE / file)) for file in ALLOWED - {"tracing/gradients/hooks.py"}
    )


def test_versions_count_writes():
    x = torch.zeros(3)
    before = version_of(x)
    x.add_(1)
    x[0] = 2
    assert version_of(x) == version_of(x.view(3)) == before + 2
    with torch.inference_mode():
        made = torch.zeros(3)
    with pytest.raises(RuntimeError):
        version_of(made)


def test_a_dispatch_mode_sees_operators_below_autograd():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    with Seen() as seen:
        torch.nn.functional.linear(x, x).sum().backward()
    assert {"aten.mm.default", "aten.sum.default"} <= set(seen.names)


def test_function_modes_of_a_package_are_left_out_and_come_back_in_order():
    class Named(TorchFunctionMode):
        def __init__(self, seen, name):
            super().__init__()
            self.seen, self.name = seen, name

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(self.name)
            return function(*args, **(kwargs or {}))

    class Other(Named):
        __module__ = "other.modes"

    seen = []
    with Named(seen, "outer"), Other(seen, "other"), Named(seen, "inner"):
        with without_function_modes("tests"):
            torch.zeros(1).add(1)
        assert seen == ["other", "other"]
        torch.zeros(1)
    assert seen[2:] == ["inner", "other", "outer"]


def test_trees_are_containers_and_their_leaves():
    tree = {"a": [1, (2, None)], "b": 3}
    assert tree_leaves(tree) == [1, 2, None, 3]
    assert tree_map(str, tree) == {"a": ["1", ("2", "None")], "b": "3"}
