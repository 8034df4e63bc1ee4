"""Ranks of one process that reduce tensors among each other: threads that wait for one another."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class Meeting:
    """Where the ranks of a mesh meet, those that differ only along given axes."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.held = {}
        self.all_here = threading.Barrier(mesh.size)

    def reduce(self, rank, axes):
        """What `reduced_over` gives one rank: every rank must call it equally often."""
        mine = self.mesh.coordinate(rank)
        along = [self.mesh.names.index(axis) for axis in axes]

        def meets(other):
            there = self.mesh.coordinate(other)
            return all(there[i] == mine[i] for i in range(len(mine)) if i not in along)

        def reduce(x, how):
            self.held[rank] = x
            self.all_here.wait(60)
            parts = torch.stack([self.held[r] for r in range(self.mesh.size) if meets(r)])
            self.all_here.wait(60)
            return parts.sum(0) if how == "sum" else parts.amax(0)

        return reduce

    def run(self, function):
        """`function(rank)` on all ranks at once."""
        with ThreadPoolExecutor(self.mesh.size) as pool:
            return list(pool.map(function, range(self.mesh.size)))
