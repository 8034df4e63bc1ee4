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
        self.sent = {}  # (from, to, how many before) -> tensor
        self.arrived = threading.Condition()

    def reduce(self, rank, axes):
        """What `reduced_over` gives one rank: every rank must call it equally often."""
        along = [self.mesh.names.index(axis) for axis in axes]

        def reduce(x, how):
            parts = torch.stack(self.met(rank, along, x))
            return getattr(parts, {"max": "amax", "min": "amin", "product": "prod"}.get(how, how))(
                0
            )

        return reduce

    def met(self, rank, along, x):
        """What the ranks bring that differ from `rank` only along these axes, in order."""
        mine = self.mesh.coordinate(rank)

        def meets(other):
            there = self.mesh.coordinate(other)
            return all(there[i] == mine[i] for i in range(len(mine)) if i not in along)

        self.held[rank] = x
        self.all_here.wait(60)
        found = [self.held[r] for r in range(self.mesh.size) if meets(r)]
        self.all_here.wait(60)
        return found

    def peers(self, rank, axis):
        """What an axis is to `LocalExperts`; gradients find their way back by autograd alone."""
        return Along(self, rank, self.mesh.names.index(axis))

    def line(self, rank, axis):
        """What `line.Group` gives one rank, of those that differ from it only along `axis`."""
        return Line(self, rank, self.mesh.names.index(axis))

    def run(self, function):
        """`function(rank)` on all ranks at once."""
        with ThreadPoolExecutor(self.mesh.size) as pool:
            return list(pool.map(function, range(self.mesh.size)))


class Along:
    """The ranks along one axis."""

    def __init__(self, meeting, rank, axis):
        self.meeting, self.rank, self.axis = meeting, rank, axis
        self.count = meeting.mesh.shape[axis]

    def gather(self, counts):
        return torch.stack(self.meeting.met(self.rank, [self.axis], counts))

    def send(self, parts, sent, received):
        here = self.meeting.mesh.coordinate(self.rank)[self.axis]
        given = list(zip(*(part.split(sent) for part in parts), strict=True))
        found = [of_rank[here] for of_rank in self.meeting.met(self.rank, [self.axis], given)]
        assert all(
            len(part) == n for of_rank, n in zip(found, received, strict=True) for part in of_rank
        )
        return tuple(torch.cat(each) for each in zip(*found, strict=True))


class Line:
    """A `line.Line` of threads."""

    def __init__(self, meeting, rank, axis):
        self.meeting, self.rank, self.axis = meeting, rank, axis
        self.counts = {}

    def exchange(self, sends, receives):
        meeting = self.meeting
        with meeting.arrived:
            for peer, tensor in sends:
                meeting.sent[self._next("to", peer)] = tensor.clone()
            meeting.arrived.notify_all()
        awaited = [(self._next("from", peer), tensor) for peer, tensor in receives]

        def wait():
            for key, tensor in awaited:
                with meeting.arrived:
                    assert meeting.arrived.wait_for(lambda key=key: key in meeting.sent, 60)
                    tensor.copy_(meeting.sent.pop(key))

        return wait

    def _next(self, way, peer):
        """Messages between two ranks are numbered in the order in which they are asked for."""
        there = list(self.meeting.mesh.coordinate(self.rank))
        there[self.axis] = peer
        other = next(
            r
            for r in range(self.meeting.mesh.size)
            if self.meeting.mesh.coordinate(r) == tuple(there)
        )
        number = self.counts.get((way, other), 0)
        self.counts[way, other] = number + 1
        return (self.rank, other, number) if way == "to" else (other, self.rank, number)
