"""Expert-parallel mixture of experts: tokens are sent to their experts, and results back.

A token goes once to each device that has experts of its choice, which sends the sum of their
results back. No token is dropped, however many choose one expert: devices exchange the numbers of
tokens before the tokens ("dropless"; Hwang et al., "Tutel", MLSys 2023). Along several axes they
are sent along one axis after the other, the outermost first, and along one that joins hosts once to
each host first (`ir/hosts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.program.lower.routing import Routing
from shardwright.runtime.backend.base import all_gather_single
from shardwright.runtime.backend.registry import backend_of
from shardwright.tracing.own_operators.experts import ExpertWeights, scales_inside, through

_ALIGNED = 8  # bytes at whose multiples parts of a message begin


class Peers(Protocol):
    """The devices along one mesh axis, this one among them."""

    @property
    def count(self) -> int:
        """The number of peers."""

    def gather(self, counts: Tensor) -> Tensor:
        """The `counts` of all of them: (n,) -> (peers, n)."""

    def send(
        self, parts: Sequence[Tensor], sent: list[int], received: list[int]
    ) -> tuple[Tensor, ...]:
        """Rows of all `parts` in one message each.

        The first `sent[0]` rows go to the first peer, and so on; the `received` ones come in turn.
        """


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


class _Tokens(NamedTuple):
    """Tokens that came to a device, and what they want of it.

    `rows` is (tokens, width), `chosen` (tokens, k) are indices of experts, -1 for those of other
    devices, and `scores` is (tokens, k).
    """

    rows: Tensor
    chosen: Tensor
    scores: Tensor


class _Exchange(NamedTuple):
    """One hop, on the device.

    Each expert's tokens go `to` a peer, which holds it if the hop `is_last`. This device is peer
    number `here`.
    """

    to: Tensor
    here: int
    is_last: bool


Back = Callable[[Tensor], Tensor]  # results of tokens that came -> sums by token that was sent


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
        self._hops = [
            _Exchange(torch.tensor(hop.to, device=device), hop.to[routing.start], hop.is_last)
            for hop in routing.hops
        ]
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
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Sums over a token's experts; of those along axes without hops only the own tile's.

        x (tokens, width), `chosen` and `scores` (tokens, k), weights those of the experts held.
        """
        wide = torch.promote_types(x.dtype, scores.dtype)
        tokens, pairs = _Tokens(x, self._own(chosen), scores), 0
        ways_back: list[Back] = []
        for at, (peers, hop) in enumerate(zip(self.peers, self._hops, strict=True)):
            tokens, pairs, back = self._hop(tokens, peers, hop, None if at else wide)
            ways_back.append(back)
        if not ways_back:
            pairs = self._load(tokens.chosen, chosen)
        expert, order = self._sorted(tokens.chosen, pairs)
        row = order // chosen.shape[1]
        rows, given = tokens.rows[row], tokens.scores.reshape(-1)[order]
        inside = scales_inside(x, scores, down, turned)
        place = expert - self.routing.start
        if not pairs:  # grouped products want a row; it counts nothing
            # Gradients go on through it.
            rows, given = (
                torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in (rows, given)
            )
            place = place.new_zeros(1)
        weights = ExpertWeights((up, down), turned, (up_bias, down_bias), product, between)
        made = through(rows, place, weights, given if inside else None)[:pairs]
        made = made if inside else made * given[:pairs].unsqueeze(-1)
        made = made.to(x.dtype if ways_back else wide)
        found = summed(made, row, (tokens.chosen >= 0).sum(1))
        for back in reversed(ways_back):
            found = back(found)
        return found

    def _own(self, chosen: Tensor) -> Tensor:
        """`chosen` with -1 for experts of other tiles than this device's."""
        if max(self.routing.split) == 0:
            return chosen
        return chosen.masked_fill(self._split[chosen] != self._tile, -1)

    def _load(self, own: Tensor, chosen: Tensor) -> int:
        """The number of experts of this device's tile that tokens have chosen."""
        if own is chosen:
            return chosen.numel()
        tiles = max(self.routing.split) + 1
        loads = _counts(self._split[chosen.reshape(-1)], tiles).tolist()  # the only wait
        self.skew.add(loads)
        found: int = loads[self._tile]
        return found

    def _sorted(self, chosen: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """Of the `pairs` of a token and an expert here, sorted by expert: it, and its place."""
        flat = chosen.reshape(-1).long()
        expert, order = flat.masked_fill(flat < 0, len(self._split)).sort(stable=True)
        return expert[:pairs], order[:pairs]

    def _hop(
        self, tokens: _Tokens, peers: Peers, hop: _Exchange, dtype: torch.dtype | None
    ) -> tuple[_Tokens, int, Back]:
        """Send each token once to every peer along one axis to which its experts' tokens go.

        Returns the tokens that came, the number of experts here that tokens of all peers want, and
        a function that sends results back and sums them by token, in `dtype` if it is given.
        """
        count, length = peers.count, len(tokens.chosen)
        flat = tokens.chosen.long()
        wants = flat >= 0
        to = torch.where(wants, hop.to[flat.clamp(min=0)], count)
        goes = to.new_zeros(length, count + 1).scatter_(1, to, 1)[:, :count]
        chosen = _counts(flat.clamp(min=0).reshape(-1), len(hop.to), wants.reshape(-1))
        table = peers.gather(torch.cat([goes.sum(0), chosen]))  # (peers, peers and experts)
        loads = chosen.new_zeros(count).index_add(0, hop.to, table[:, count:].sum(0))
        # The only wait for the device.
        sent, received, every = torch.stack([goes.sum(0), table[:, hop.here], loads]).tolist()
        if hop.is_last:
            self.skew.add(every)
        order = (goes == 0).t().reshape(-1).to(torch.uint8).sort(stable=True).indices[: sum(sent)]
        at, peer = order % max(1, length), order // max(1, length)
        wanted = flat[at].masked_fill(to[at] != peer.unsqueeze(1), -1).to(torch.int32)
        parts = (tokens.rows[at], wanted, tokens.scores[at])
        came = _Tokens(*peers.send(parts, sent, received))

        def back(results: Tensor) -> Tensor:
            (found,) = peers.send((results,), received, sent)
            return summed(found if dtype is None else found.to(dtype), at, goes.sum(1))

        return came, every[hop.here], back

    def extra_repr(self) -> str:
        routing, last = self.routing, self.routing.start + self.routing.length - 1
        return f"experts={routing.start} to {last} of {len(routing.split)}, {routing}"


def summed(rows: Tensor, of: Tensor, lengths: Tensor) -> Tensor:
    """Sums of rows that belong together: (rows, w) -> (sums, w).

    Row i is part of sum number `of[i]`, which has `lengths` (sums) parts.
    """
    found: Tensor = _Summed.apply(rows, of, lengths)  # type: ignore[no-untyped-call]
    return found


class _Summed(torch.autograd.Function):
    """In a fixed order, and with a gradient that is a look-up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(of)
        by_sum = of.sort(stable=True).indices
        return F.embedding_bag(by_sum, rows, lengths.cumsum(0) - lengths, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of,) = ctx.saved_tensors
        return grads[0][of], None, None


def _counts(index: Tensor, length: int, counted: Tensor | None = None) -> Tensor:
    """Count how often each number below `length` is in `index` where `counted`, int64 (length).

    `bincount` would read the largest one on the host.
    """
    each = torch.ones_like(index) if counted is None else counted.to(index.dtype)
    return index.new_zeros(length).index_add(0, index, each)


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

    def send(
        self, parts: Sequence[Tensor], sent: list[int], received: list[int]
    ) -> tuple[Tensor, ...]:
        """See `Peers`; gradients take the way back."""
        found: tuple[Tensor, ...] = _Sent.apply(sent, received, self.group, *parts)  # type: ignore[no-untyped-call]
        return found


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: list[int], received: list[int], group: dist.ProcessGroup, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = sent, received, group
        ctx.whole = [n for n, part in enumerate(parts) if not part.is_floating_point()]
        found = _all_to_all(parts, sent, received, group)
        ctx.mark_non_differentiable(*(found[n] for n in ctx.whole))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sent, received, group = ctx.exchange
        given = [grad for n, grad in enumerate(grads) if n not in ctx.whole]
        back = iter(_Sent.apply(received, sent, group, *given))  # type: ignore[no-untyped-call]
        found = (None if n in ctx.whole else next(back) for n in range(len(grads)))
        return None, None, None, *found


def _all_to_all(
    parts: Sequence[Tensor], sent: list[int], received: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Rows of all `parts`, each (rows, its width), side by side in one message."""
    message, unpacked = _packed(parts)
    found = message.new_empty((sum(received), message.shape[1]))
    backend_of(group).exchange(group, found, message, received, sent)
    return unpacked(found)


def _packed(parts: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """A tensor with the rows of all parts, and a function from one like it to such parts."""
    if len(parts) == 1:
        return parts[0].contiguous(), lambda message: (message,)
    sizes = [part.shape[1] * part.itemsize for part in parts]
    ends = list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    places = [slice(at, at + size) for at, size in zip((0, *ends), sizes, strict=False)]
    dtypes = [part.dtype for part in parts]

    def unpacked(message: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(places, dtypes, strict=True)
        return tuple(message[:, place].view(dtype) for place, dtype in pairs)

    message = parts[0].new_empty((len(parts[0]), ends[-1]), dtype=torch.uint8)
    for view, part in zip(unpacked(message), parts, strict=True):
        view.copy_(part)
    return message, unpacked


def local_experts(
    routing: Routing, axes: Mapping[str, DeviceMesh], device: torch.device
) -> LocalExperts:
    """The module of a mixture on this rank of a device mesh, given axis by axis."""
    return LocalExperts(
        routing, [GroupPeers(axes[hop.axis].get_group()) for hop in routing.hops], device
    )


def skews(modules: Sequence[nn.Module]) -> list[Skew]:
    """The skews that mixtures among `modules`, and within them, have measured so far."""
    every = {id(m): m for module in modules for m in module.modules()}
    return [m.skew for m in every.values() if isinstance(m, LocalExperts) and m.skew.calls]
