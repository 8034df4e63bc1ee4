"""A region says whether its operators save tensors where hooks see them."""

import pytest

from shardwright.ir.graph import Op, Ref
from shardwright.program.instructions import Compute
from shardwright.program.step.region import Region


@pytest.mark.parametrize(
    "target, seen",
    [
        ("aten.cross_entropy_loss.default", True),
        ("shardwright.cross_entropy_loss.default", True),
        ("shardwright.function.default", False),
        ("mine.loss.default", False),
    ],
)
def test_losses_that_cast_save_as_those_of_torch_do(target, seen):
    linear = Op("y", "aten.linear.default", (Ref("x"), Ref("w")), (), ("y",))
    loss = Op("l", target, (Ref("y"), Ref("t")), (), ("l",))
    calls = Compute(linear, ((4, 7),)), Compute(loss, ((),))
    region = Region((calls,), ("x", "w", "t"), ("l",), (True,) * 3, (True,), (False, True, False))
    assert region.is_of_torch is seen
