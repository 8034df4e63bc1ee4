"""Flattened arguments and results have the tensors of the call, and nothing else keeps them."""

import gc
from collections import namedtuple

import torch

from shardwright.tracing.outputs import split_outputs
from shardwright.tracing.trees import join_tensors, split_tensors

Pair = namedtuple("Pair", "left right")


def nested():
    return {"a": [torch.ones(2), 3], "b": Pair(torch.zeros(1), (None, torch.ones(1)))}


def test_joined_arguments_are_those_that_were_split():
    value = nested()
    structure, tensors = split_tensors(value)
    joined = join_tensors(structure, tensors)
    assert joined["a"][0] is value["a"][0] and joined["b"].right[1] is value["b"].right[1]
    assert (joined["a"][1], type(joined["b"]), len(tensors)) == (3, Pair, 3)


def test_no_tensor_waits_for_the_garbage_collector():
    tree, _ = split_outputs(nested(), ())
    gc.collect()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        structure, tensors = split_tensors(nested())
        joined = join_tensors(structure, tensors)
        returned = tree.with_tensors(tensors, torch.device("cpu"))
        assert returned["b"].left is joined["b"].left
        del structure, tensors, joined, returned
        gc.collect()
        kept = [one for one in gc.garbage if type(one) is torch.Tensor]  # others: of tracing before
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
    assert not kept
