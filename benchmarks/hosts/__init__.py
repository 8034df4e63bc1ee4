"""Several hosts on one machine, joined by links of a given speed; for benchmarks and tests.

    with hosts(2, Link(bit_per_s=1e8)) as cluster:
        outputs = cluster.torchrun("train.py", "--steps", "10", timeout_seconds=120)

Needs Linux with iproute2 and util-linux, and root or unprivileged user namespaces; what is missing
`HostsUnavailableError` says. `python -m benchmarks.hosts.run` is the same on the command line.
"""

from benchmarks.hosts.cluster import Cluster, HostError, hosts
from benchmarks.hosts.network import HostsUnavailableError, Link

__all__ = ["Cluster", "HostError", "HostsUnavailableError", "Link", "hosts"]
