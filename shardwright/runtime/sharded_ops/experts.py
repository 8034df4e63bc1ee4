"""Expert-parallel mixture of experts: rows are sent to their experts and back.

No row is dropped, however many rows choose one expert: devices exchange the numbers of rows before
the rows ("dropless"; Hwang et al., "Tutel", MLSys 2023). Along several axes rows are sent along one
axis after the other, the outermost first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.program.lower.routing import Routing
from shardwright.runtime.backend.base import all_gather_single
from shardwright.runtime.backend.registry import backend_of
from shardwright.tracing.own_operators.experts import added, scales_inside, through


class Peers(Protocol):
    """The devices along one mesh axis, this one among them."""

    @property
    def count(self) -> int:
        """The number of peers."""

    def gather(self, counts: Tensor) -> Tensor:
        """The `counts` of all of them: (E,) -> (peers, E)."""

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The first `sent[0]` rows to the first of them, and so on; the `received` ones in turn."""


@dataclass(slots=True)
class Skew:
    """Rows of the busiest device over the mean, as one mixture has seen it, call by call."""

    calls: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, loads: Sequence[float]) -> None:
        """One call, in which devices have so many rows each."""
        mean = sum(loads) / len(loads)
        found = max(loads) / mean if mean else 1.0
        self.calls, self.total = self.calls + 1, self.total + found
        self.most = max(self.most, found)


@final
class LocalExperts(nn.Module):
    """A mixture as `shardwright.experts`, on a device that holds some of its experts."""

    def __init__(self, routing: Routing, peers: Sequence[Peers], device: torch.device) -> None:
        super().__init__()
        self.routing, self.peers = routing, tuple(peers)
        self.skew = Skew()
        here = slice(routing.start, routing.start + routing.length)
        self._tile = routing.split[routing.start]
        self._split = torch.tensor(routing.split, device=device)
        self._hops = []
        for _, owners in routing.hops:
            mine = [e for e, owner in enumerate(owners) if owner == owners[routing.start]]
            whose = torch.tensor(owners, device=device)
            self._hops.append((whose, torch.tensor(mine, device=device)))
        assert len({*routing.split[here]}) == 1, "experts of one device lie in one tile"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        x: Tensor,
        chosen: Tensor,
        scores: Tensor,
        up: Tensor,
        down: Tensor,
        turned: Sequence[bool],
        product: str,
        between: str,
    ) -> Tensor:
        """Sums over a token's experts; of those along axes without hops only the own tile's.

        x (tokens, width), `chosen` and `scores` (tokens, k), weights those of the experts held.
        """
        flat = chosen.reshape(-1)
        order, expert = self._own(flat)
        rows, given = x[order // chosen.shape[1]], scores.reshape(-1)[order]
        inside = scales_inside(x, scores, down, turned)
        sent = [rows, given.unsqueeze(-1)] if inside else [rows]
        ways_back = []
        for peers, hop in zip(self.peers, self._hops, strict=True):
            sent, expert, back = self._hop(sent, expert, peers, *hop)
            ways_back.append(back)
        count = len(expert)
        if not count:  # grouped products want a row; it counts nothing
            # Gradients go on through it.
            sent = [torch.cat([part, part.new_zeros(1, part.shape[1])]) for part in sent]
            expert = flat.new_full((1,), self.routing.start)
        place = expert - self.routing.start
        arrived = sent[1].squeeze(-1) if inside else None
        rows = through(sent[0], place, (up, down), turned, product, between, arrived)[:count]
        for back in reversed(ways_back):
            rows = back(rows)
        return added(rows, order, scores, None if inside else given)

    def _own(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The rows for experts in this device's tile, sorted by expert, and their experts."""
        expert, order = flat.sort(stable=True)
        tiles = max(self.routing.split) + 1
        if tiles == 1:
            return order, expert
        tile_of_row = self._split[expert]
        loads = _counts(tile_of_row, tiles).tolist()  # the only wait for the device
        self.skew.add(loads)
        others = (tile_of_row != self._tile).to(torch.uint8)
        mine = others.sort(stable=True).indices[: loads[self._tile]]
        return order[mine], expert[mine]

    def _hop(
        self, parts: list[Tensor], expert: Tensor, peers: Peers, owner: Tensor, mine: Tensor
    ) -> tuple[list[Tensor], Tensor, Callable[[Tensor], Tensor]]:
        """Exchange rows along one axis: each of `parts` is (rows, its width).

        Returns the received rows sorted by expert, their experts, and a function that sends results
        back. Rows are sorted by expert, which is also the order of the devices that hold the
        experts. `mine` are the experts with this device's coordinate along the axis.
        """
        counts = _counts(expert, len(owner))
        table = peers.gather(counts)  # (peers, experts)
        to, loads = (
            counts.new_zeros(peers.count).index_add(0, owner, some)
            for some in (counts, table.sum(0))
        )
        come = table[:, mine]
        # The only wait for the device.
        sent, received, all_loads = torch.stack([to, come.sum(1), loads]).tolist()
        self.skew.add(all_loads)
        arrived = [peers.send(part, sent, received) for part in parts]
        whose = torch.repeat_interleave(
            mine.repeat(peers.count), come.reshape(-1), output_size=sum(received)
        )
        whose, order = whose.sort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)

        def back(results: Tensor) -> Tensor:
            return peers.send(results[place], received, sent)

        return [part[order] for part in arrived], whose, back

    def extra_repr(self) -> str:
        routing, last = self.routing, self.routing.start + self.routing.length - 1
        return f"experts={routing.start} to {last} of {len(routing.split)}, {routing}"


def _counts(index: Tensor, length: int) -> Tensor:
    """Count how often each number below `length` is in `index`, int64 (length).

    `bincount` would read the largest one on the host.
    """
    return index.new_zeros(length).index_add(0, index, torch.ones_like(index))


@final
class GroupPeers:
    """Peers that are ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @property
    def count(self) -> int:
        return self.group.size()

    def gather(self, counts: Tensor) -> Tensor:
        """See `Peers`."""
        found = counts.new_empty(self.count * len(counts))
        all_gather_single(found, counts, group=self.group)
        return found.view(self.count, -1)

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """See `Peers`; the gradient takes the way back."""
        found: Tensor = _Sent.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]
        return found


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.exchange = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.exchange
        back: Tensor = _Sent.apply(grads[0], received, sent, group)  # type: ignore[no-untyped-call]
        return back, None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    found = rows.new_empty((sum(received), rows.shape[1]))
    backend_of(group).exchange(group, found, rows.contiguous(), received, sent)
    return found


def local_experts(
    routing: Routing, axes: Mapping[str, DeviceMesh], device: torch.device
) -> LocalExperts:
    """The module of a mixture on this rank of a device mesh, given axis by axis."""
    return LocalExperts(
        routing, [GroupPeers(axes[axis].get_group()) for axis, _ in routing.hops], device
    )


def skews(modules: Sequence[nn.Module]) -> list[Skew]:
    """The skews that mixtures among `modules`, and within them, have measured so far."""
    every = {id(m): m for module in modules for m in module.modules()}
    return [m.skew for m in every.values() if isinstance(m, LocalExperts) and m.skew.calls]
