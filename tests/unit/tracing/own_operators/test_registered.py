"""Operators that exist once their library is imported."""

import sys

import pytest
import torch

from shardwright.tracing.own_operators import registered as module
from shardwright.tracing.own_operators.registered import registered

LIBRARY = """
import torch

torch.library.define("late::twice", "(Tensor x) -> Tensor")
torch.library.impl("late::twice", "CompositeImplicitAutograd", lambda x: 2 * x)
"""


def test_the_library_of_an_operator_is_imported_once_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "late_operators.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AttributeError, match="twice"):
        registered("late.twice.default")
    monkeypatch.setattr(module, "_LIBRARIES", {"late": "late_operators"})
    assert "late_operators" not in sys.modules
    assert registered("late.twice.default")(torch.ones(1)).item() == 2
    del sys.modules["late_operators"]
    assert registered("late.twice.default")(torch.ones(1)).item() == 2  # it is known by now
    assert "late_operators" not in sys.modules
