"""What the parts of a rank's memory are, beside the modules that take it."""

import pytest
import torch

from shardwright.ir.graph import Op, Ref
from shardwright.program.instructions import Dropout
from shardwright.runtime.random.dropout import GlobalDropout
from shardwright.simulate.memory.step.rank_step import random_key_bytes


@pytest.mark.parametrize(
    "positions",
    [
        (((2, 3, 6),),),
        (((2, 3, 6),), ((0, 4, 4),)),
        (((2, 3, 6),), ((0, 2, 2), (1, 2, 4)), ((3, 5, 8),)),
    ],
)
def test_positions_of_random_numbers_take_what_the_module_keeps(positions):
    one = Dropout(Op("y", "shardwright.dropout.default", (Ref("x"), 0.5, 0), (), ("y",)), positions)
    module = GlobalDropout(one, torch.device("cpu"))
    assert random_key_bytes(one) == sum(buffer.nbytes for buffer in module.buffers())
