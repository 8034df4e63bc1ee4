"""What is freed is had again: pages that the system maps anew are counted."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.runtime import parallel
from shardwright.runtime.backend.malloc_tuning import keep_freed_memory

PAGES = """
import resource, sys, torch
from shardwright.runtime.backend.malloc_tuning import keep_freed_memory

kept = keep_freed_memory() and keep_freed_memory()

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for mib in (1, 3, 48) * 4:
    torch.empty(mib * 2**18).fill_(1)
before = pages()
for mib in (1, 3, 48) * 4:
    torch.empty(mib * 2**18).fill_(1)
print(kept, pages() - before)
"""


def test_blocks_of_every_size_are_not_mapped_again():
    if not keep_freed_memory({}):
        pytest.skip("another malloc than glibc's")
    ended = subprocess.run(
        [sys.executable, "-c", PAGES], capture_output=True, text=True, timeout=120, check=True
    )
    kept, pages = ended.stdout.split()
    assert kept == "True"
    assert int(pages) < 13_312  # a quarter of what is allocated; else all of it


@pytest.mark.parametrize(
    "name, value",
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_MAX_", "65536"),
        ("MALLOC_MMAP_THRESHOLD_", "33554432"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_user_has_set_stays(name, value):
    assert not keep_freed_memory({name: value})


def test_what_is_parallelized_keeps_what_it_frees(monkeypatch):
    kept = []
    monkeypatch.setattr(parallel, "keep_freed_memory", lambda: kept.append(True))
    model = nn.Linear(4, 4)
    plan = sw.plan(model, (torch.randn(2, 4),), machine=sw.Machine.preset("1xcpu"))
    sw.parallelize(model, plan)
    assert kept == [True]
