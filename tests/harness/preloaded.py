"""Imported by the server of `ranks` before it forks: what ranks would import one by one.

A rank's first export imports eight hundred modules, which takes two seconds. Nothing here starts a
thread, which a forked process would not have.
"""
# ruff: noqa: F401

import gc

import pytest
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.decomposition
import torch.distributed.tensor
import torch.export._trace
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama

import shardwright.api
from tests.harness import torch_speed

torch_speed.speed_up()
gc.freeze()  # ranks need not look through all of this, nor copy the pages it is on
