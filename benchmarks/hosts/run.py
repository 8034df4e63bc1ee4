"""Run a program on hosts that are made for it.

    python -m benchmarks.hosts.run --hosts 2 --gbit-per-s 0.1 -- train.py --steps 10

is `torchrun --nnodes 2 train.py --steps 10` on two hosts, whose links carry
0.1 Gbit/s. What each printed follows when all have ended.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.hosts import HostError, HostsUnavailableError, Link, hosts


def main() -> None:
    """Make hosts, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gbit-per-s", type=float, default=1.0)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--processes-per-host", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("program", help="file.py, or the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        link = Link(options.gbit_per_s * 1e9, options.latency_ms / 1e3)
        with hosts(options.hosts, link) as cluster:
            outputs = cluster.torchrun(
                options.program,
                *options.arguments,
                timeout_seconds=options.timeout,
                processes_per_host=options.processes_per_host,
            )
    except (HostsUnavailableError, HostError, ValueError) as e:
        print(f"hosts: {e}", file=sys.stderr)
        sys.exit(1 if isinstance(e, HostError) else 2)
    for host, output in enumerate(outputs):
        print(f"--- host {host}", output.rstrip("\n"), sep="\n")


if __name__ == "__main__":
    main()
