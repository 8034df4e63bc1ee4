"""The table of elementwise operators says what torch says."""

import re

import pytest
import torch

from shardwright.rules.operators.inplace_forms import in_place_form, is_pointwise
from shardwright.rules.operators.table import BUILDERS, ELEMENTWISE, LINEAR, LOSSES, TEXT

KINDS = {*ELEMENTWISE, *LINEAR, *LOSSES, *BUILDERS, *TEXT, *dir(torch.ops.aten)}


AS_WRITTEN = torch.__version__.startswith("2.13.")  # tags change from version to version


def overloads(kind):
    known = getattr(getattr(torch.ops.aten, kind, None), "overloads", list)()
    return [name for name in known if "out" not in name.lower() and name != "grad_input"]


def tagged(kind, overload):
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, kind), overload).tags


def test_tags_and_in_place_forms_are_those_of_torch():
    compared = 0
    in_place = {kind for kind in KINDS if re.fullmatch("[a-z].*_|__i.*__", kind)}
    for kind in sorted(KINDS - in_place):
        for overload in overloads(kind):
            target = f"aten.{kind}.{overload}"
            form = in_place_form(target)
            has_one = overload in overloads(f"{kind}_")
            assert form is None or (has_one and form == f"aten.{kind}_.{overload}"), target
            if AS_WRITTEN:
                assert is_pointwise(target) == tagged(kind, overload), target
                assert (form is not None) == (has_one and tagged(kind, overload)), target
            compared += tagged(kind, overload)
    assert compared > 100


@pytest.mark.parametrize("target", ["shardwright.dropout.default", "aten.mm.default"])
def test_others_are_not(target):
    assert not is_pointwise(target) and in_place_form(target) is None


def test_in_place_forms_are_pointwise_too():
    assert is_pointwise("aten.add_.Tensor") and tagged("add_", "Tensor")
