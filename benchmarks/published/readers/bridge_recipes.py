"""Settings of Megatron-Bridge's recipes, read from their source; nothing of it is executed.

A recipe is a function that sets attributes of a configuration, directly or through functions that
it calls. What depends on a condition is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.published.readers.snapshot import Snapshot

_ROOT = "src/"
_PERF = "src/megatron/bridge/perf_recipes"
_NAMES = {
    "DeepSeekV3": "deepseek_v3",
    "Kimi_K2": "kimi_k2",
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3_70B": "llama3_70b",
    "LLAMA3.1_405B": "llama31_405b",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
    "Qwen3_235B_a22B": "qwen3_235b_a22b",
}
_PRECISIONS = {"fp8-tensorwise": "fp8cs", "fp8-mx": "fp8mx", "bf16": "bf16", "nvfp4": "nvfp4"}
Settings = dict[str, Any]  # by the path of the attribute, as "model.recompute_modules"


def recipe_settings(
    snapshot: Snapshot, model: str, gpu: str, gpus: int, precision: str
) -> Settings | None:
    """What the recipe of pre-training of a model, as pages name it, sets; None without a recipe."""
    name = _NAMES.get(model)
    wanted = f"{name}_pretrain_{gpus}gpu_{gpu.lower()}_{_PRECISIONS.get(precision)}_config"
    for path in snapshot.files(_PERF):
        module = _module(snapshot, path)
        if wanted in module.functions:
            return dict(_set_by(snapshot, module, module.functions[wanted]))
    return None


@dataclass(frozen=True, slots=True)
class _Module:
    """Functions of a file, and what it imports: by local name, the module and the name there."""

    functions: dict[str, ast.FunctionDef]
    imports: dict[str, tuple[str, str]]


@cache
def _module(snapshot: Snapshot, path: str) -> _Module:
    body = ast.parse(snapshot.read(path)).body if path.endswith(".py") else []
    functions = {one.name: one for one in body if isinstance(one, ast.FunctionDef)}
    imports = {
        name.asname or name.name: (one.module, name.name)
        for one in body
        if isinstance(one, ast.ImportFrom) and one.module
        for name in one.names
    }
    return _Module(functions, imports)


def _found(
    snapshot: Snapshot, module: _Module, name: str
) -> tuple[_Module, ast.FunctionDef] | None:
    """The function of a name, in this module or in one that it imports from."""
    if name in module.functions:
        return module, module.functions[name]
    if name not in module.imports:
        return None
    where, there = module.imports[name]
    path = _ROOT + where.replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        if file in _files(snapshot):
            return _found(snapshot, _module(snapshot, file), there)
    return None


@cache
def _files(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(snapshot.files(_ROOT))


def _set_by(
    snapshot: Snapshot, module: _Module, function: ast.FunctionDef
) -> Iterator[tuple[str, Any]]:
    """Paths of attributes and their values, in the order in which they are set."""
    for line in function.body:
        value = line.value if isinstance(line, ast.Assign | ast.Expr) else None
        paths = [
            path
            for target in (line.targets if isinstance(line, ast.Assign) else [])
            for path in _paths(target)
        ]
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            called = _found(snapshot, module, value.func.id)
            is_configuration = paths == [""] or not paths
            if called is not None and is_configuration:
                yield from _set_by(snapshot, *called)
            for path in paths:
                for keyword in value.keywords:
                    yield from _literal(f"{path}.{keyword.arg}", keyword.value)
        elif value is not None:
            for path in paths:
                yield from _literal(path, value)


def _paths(target: ast.expr) -> Iterator[str]:
    """The path behind `cfg` of an assignment's target: "" for `cfg` itself, none for others."""
    names: list[str] = []
    while isinstance(target, ast.Attribute):
        names.append(target.attr)
        target = target.value
    if isinstance(target, ast.Name) and target.id == "cfg":
        yield ".".join(reversed(names))


def _literal(path: str, value: ast.expr) -> Iterator[tuple[str, Any]]:
    try:
        yield path, ast.literal_eval(value)
    except ValueError:
        return
