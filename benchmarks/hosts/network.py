"""Hosts that are network namespaces, around a switch that is another one with a bridge in it.

No namespace has a name. Each is held open by one small process that reads from
this one and ends when it is gone, however it ends; the kernel then removes the
namespace with its links. So nothing is left behind, and nothing of the real
network is touched: no name, no address, no rule of its firewall.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

DEVICE = "eth0"  # each host's only one beside the loopback
_QUEUE_SECONDS = 0.05  # what does not fit into a queue of so long is lost, and TCP slows down
_LEAST_BURST_BYTES = 68 * 1024  # the largest segment that the kernel hands to a device at once
_BURST_SECONDS = 0.002
_TOOLS = ("unshare", "nsenter", "setpriv", "taskset", "ip", "tc")


class HostsUnavailableError(RuntimeError):
    """This machine cannot, or may not, make hosts; says what is missing."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins a host to the switch: so many bits a second in each direction, and so late.

    `burst_bytes` pass at once when the link was idle; by default what it carries in 2 ms, and
    at least 68 KiB, the largest segment of the kernel. `latency_seconds` are one way, and need
    the kernel's `sch_netem`; without it there is only what the machine takes, about 0.05 ms.
    """

    bit_per_s: float
    latency_seconds: float = 0.0
    burst_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bit_per_s < 1e6:
            raise ValueError(f"a link of {self.bit_per_s:g} bit/s; at least 1e6 are needed")
        if self.latency_seconds < 0:
            raise ValueError(f"a latency of {self.latency_seconds:g} s; it cannot be negative")

    @property
    def burst(self) -> int:
        """Bytes that pass at once."""
        if self.burst_bytes is not None:
            return self.burst_bytes
        return max(_LEAST_BURST_BYTES, int(self.bit_per_s / 8 * _BURST_SECONDS))

    def __str__(self) -> str:
        late = f", {self.latency_seconds * 1e3:g} ms" if self.latency_seconds else ""
        return f"{self.bit_per_s / 1e9:g} Gbit/s{late}"


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace, known by the process that holds it open."""

    pid: int
    of_user: bool  # inside a user namespace, in which this process counts as root

    @property
    def enter(self) -> tuple[str, ...]:
        """What to put before a command to run it in there."""
        user = ("--user", "--preserve-credentials") if self.of_user else ()
        return ("nsenter", "--target", str(self.pid), *user, "--net")


def address(host: int) -> str:
    """Of a host, counted from 0, in its namespace."""
    return f"10.0.0.{host + 1}"


@contextmanager
def network(num_hosts: int, link: Link) -> Iterator[tuple[Namespace, ...]]:
    """`num_hosts` namespaces that reach each other at `address(host)`, over a link each.

    Raises `HostsUnavailableError` where the machine lacks what it takes.
    """
    if not 1 <= num_hosts <= 200:
        raise ValueError(f"{num_hosts} hosts; between 1 and 200 can be made")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise HostsUnavailableError(
            f"hosts need {', '.join(missing)}: install iproute2 and util-linux"
        )
    with ExitStack() as held:
        of_user = os.geteuid() != 0
        outside = ("unshare", "--user", "--map-root-user", "--net") if of_user else None
        switch = held.enter_context(_namespace(outside or ("unshare", "--net"), of_user))
        _run(switch, "ip", "link", "add", "switch", "type", "bridge")
        _run(switch, "ip", "link", "set", "switch", "up")
        found = []
        inside = (*switch.enter, "unshare", "--net") if of_user else ("unshare", "--net")
        for number in range(num_hosts):
            host = held.enter_context(_namespace(inside, of_user))
            _join(switch, host, number, link)
            found.append(host)
        yield tuple(found)


@contextmanager
def _namespace(make: tuple[str, ...], of_user: bool) -> Iterator[Namespace]:
    """One more namespace, for as long as this process reads on and stays in the context."""
    hold = ("sh", "-c", "echo held && exec cat")
    with subprocess.Popen(
        [*make, *hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt at the terminal is for us to act on
    ) as holder:
        assert holder.stdin and holder.stdout and holder.stderr
        try:
            if holder.stdout.readline() != "held\n":
                raise HostsUnavailableError(
                    f"may not make network namespaces ({holder.stderr.read().strip()}): run as"
                    " root, or allow unprivileged user namespaces"
                )
            yield Namespace(holder.pid, of_user)
        finally:
            holder.kill()


def _join(switch: Namespace, host: Namespace, number: int, link: Link) -> None:
    port = f"port{number}"
    peer = ("peer", "name", DEVICE, "netns", str(host.pid))
    _run(switch, "ip", "link", "add", port, "type", "veth", *peer)
    for side, device in ((switch, port), (host, DEVICE)):
        _run(side, "ip", "link", "set", device, "addrgenmode", "none")  # IPv4 alone
        _shape(side, device, link)
    _run(switch, "ip", "link", "set", port, "master", "switch")
    _run(switch, "ip", "link", "set", port, "up")
    _run(host, "ip", "address", "add", f"{address(number)}/24", "dev", DEVICE)
    _run(host, "ip", "link", "set", DEVICE, "up")
    _run(host, "ip", "link", "set", "lo", "up")


def plug(host: Namespace, *, into: bool) -> None:
    """Plug the link of a host into it, or out."""
    _run(host, "ip", "link", "set", DEVICE, "up" if into else "down")


def _shape(side: Namespace, device: str, link: Link) -> None:
    """A token bucket for what leaves `device`; half of the latency before it."""
    add = ("tc", "qdisc", "add", "dev", device)
    parent: tuple[str, ...] = ("root",)
    if link.latency_seconds:
        delay = f"{link.latency_seconds / 2 * 1e6:.0f}us"
        # The queue of what is on its way; the bucket's own follows.
        netem = ("handle", "1:", "netem", "delay", delay, "limit", "100000")
        _run(side, *add, "root", *netem)
        parent = ("parent", "1:1")
    queue = int(link.bit_per_s / 8 * _QUEUE_SECONDS) + link.burst
    bucket = ("tbf", "rate", f"{link.bit_per_s:.0f}bit", "burst", f"{link.burst}b")
    _run(side, *add, *parent, *bucket, "limit", f"{queue}b")


def _run(where: Namespace, *command: str) -> None:
    """Run a command of iproute2 in a namespace; its own words are the error if it fails."""
    done = subprocess.run(
        [*where.enter, *command], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode == 0:
        return
    why = done.stderr.strip().splitlines()
    words = " ".join(command)
    hint = "; the kernel has no sch_netem, leave the latency out" if "netem" in command else ""
    raise HostsUnavailableError(f"`{words}`: {why[0] if why else done.returncode}{hint}")
