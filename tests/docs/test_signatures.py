"""Functions take few parameters, as what travels together is one value, and are short."""

import ast

from tests.docs.test_layers import FILES, PACKAGE

MOST = 8
WIDER = {
    "api.py:capture": "the public contract",
    "api.py:search": "the public contract",
    "api.py:plan": "the public contract",
    "runtime/parallel.py:parallelize": "the public contract",
    "tracing/own_operators/linear_cross_entropy.py:linear_cross_entropy": "an operator's signature",
    "tracing/export/formulas.py:_embedding_bag": "the signature of torch's function",
    "tracing/own_operators/lookup.py:embedding_bags": "the signature of an operator",
    "tracing/own_operators/experts.py:experts": "the signature of an operator",
    "runtime/sharded_ops/experts.py:LocalExperts.forward": "the signature of that operator",
}


def wide(source):
    """Functions of more than `MOST` parameters beside `self` and `cls`, with the classes around."""
    found = []

    def visit(node, path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            path = f"{path}.{node.name}" if path else node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([a for a in args if a.arg not in ("self", "cls")]) > MOST:
                found.append(path)
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    visit(ast.parse(source), "")
    return found


def test_functions_take_at_most_eight_parameters():
    found = {
        f"{file.relative_to(PACKAGE)}:{name}" for file in FILES for name in wide(file.read_text())
    }
    assert found - WIDER.keys() == set(), "give what travels together to one dataclass"


def test_what_is_wide_is_found():
    parameters = ", ".join("abcdefghi")
    assert wide(f"def f({parameters}): ...") == ["f"]
    assert wide(f"class C:\n    def f(self, {parameters[3:]}): ...") == []
    assert wide(f"class C:\n    async def f(self, *, {parameters}): ...") == ["C.f"]


LONGEST = 70  # lines beside its docstring


def long(source):
    """Functions of more than `LONGEST` lines."""
    functions = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [f.name for f in functions if f.end_lineno - f.lineno - _described(f) >= LONGEST]


def _described(function):
    """The lines of its docstring."""
    first = function.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0


def test_functions_are_short():
    found = {str(file.relative_to(PACKAGE)): long(file.read_text()) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}, "split them by concept"


def test_what_is_long_is_found():
    body = "    x = 1\n" * (LONGEST - 1)
    assert long(f"def f():\n{body}") == []
    assert long(f'def f():\n    """A\n\n    b."""\n{body}') == []
    assert long(f"class C:\n  def f(self):\n{body}    x = 2\n") == ["f"]
