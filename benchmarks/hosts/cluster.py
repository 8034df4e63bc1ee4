"""Programs on hosts: the same command on each, at once, within a time, and never longer.

Every command runs in a process namespace of its own whose first process is
killed when it is over or when we are gone: what it has started ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.hosts.network import DEVICE, Link, Namespace, address, network, plug

ROOT = Path(__file__).parents[2]
_PORT = 29500  # free: nobody else is on these hosts
_KILLED_SECONDS = 10.0  # within which a killed process has ended
_TAIL = 4000  # characters of the output of a host that failed


class HostError(RuntimeError):
    """A command ended with an error on a host, or did not end; says where, with its last words."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts that are up. Each has a part of the cores, and shares it where there are too few."""

    link: Link
    namespaces: tuple[Namespace, ...]
    cores: tuple[tuple[int, ...], ...]  # by host

    def __len__(self) -> int:
        return len(self.namespaces)

    def torchrun(
        self,
        program: str,
        *arguments: str,
        timeout_seconds: float,
        processes_per_host: int = 1,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> list[str]:
        """Run `torchrun --nnodes N program arguments` on every host; what each printed, by host.

        `program` is a path that ends in `.py`, or the name of a module. Gloo finds the right
        device by itself; each process has its share of its host's cores as its threads. For the
        rest see `run`.
        """
        target = [program] if program.endswith(".py") else ["--module", program]

        def command(host: int) -> list[str]:
            return [
                sys.executable, "-m", "torch.distributed.run",
                "--nnodes", str(len(self)), "--node-rank", str(host),
                "--nproc-per-node", str(processes_per_host),
                "--master-addr", address(0), "--master-port", str(_PORT),
                *target, *arguments,
            ]  # fmt: skip

        threads = max(1, len(self.cores[0]) // processes_per_host)
        given = {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": str(threads)}
        return self.run(
            command,
            timeout_seconds=timeout_seconds,
            environment={**given, **(environment or {})},
            cwd=cwd,
        )

    def run(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        timeout_seconds: float,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> list[str]:
        """Run `command(host)` on every host at once; what each printed, errors included, by host.

        Raises `HostError` as soon as one fails, or after `timeout_seconds`; the others are
        killed then. `environment` is added to this process's; the folder of this
        repository is on its `PYTHONPATH`.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / str(host) for host in range(len(self))]
            running: list[subprocess.Popen[bytes]] = []
            try:
                for host, file in enumerate(files):
                    with file.open("wb") as out:
                        running.append(self.start(host, command(host), out, environment, cwd))
                _wait(running, files, timeout_seconds)
            finally:
                for process in running:
                    process.kill()  # without effect on those that have ended
                    # An interrupt inside of `poll` may leave its lock held, for which a wait
                    # without a limit would wait for ever.
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_KILLED_SECONDS)
            return [file.read_text(errors="replace") for file in files]

    def start(
        self,
        host: int,
        command: Sequence[str],
        out: IO[bytes],
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> subprocess.Popen[bytes]:
        """Start `command` on one host; what is returned ends with all that it has started."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [*self._before(host), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            cwd=cwd,
            start_new_session=True,
        )

    def plug(self, host: int, *, into: bool) -> None:
        """Plug a host's link into it, or out: nothing comes or goes then, not even an end."""
        plug(self.namespaces[host], into=into)

    def _before(self, host: int) -> list[str]:
        cores = ",".join(str(core) for core in self.cores[host])
        # Killed with this process; kills all that it has started, which cannot leave its namespace.
        alone = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
        die = ("setpriv", "--pdeathsig", "KILL")
        return [*self.namespaces[host].enter, *die, *alone, "taskset", "--cpu-list", cores]


@contextmanager
def hosts(num_hosts: int, link: Link) -> Iterator[Cluster]:
    """`num_hosts` hosts, each joined to a switch by `link`, gone at the end of the context.

    The cores of this process are dealt out in equal parts; where hosts outnumber
    them, hosts take turns on one. Raises `HostsUnavailableError` where hosts cannot be made.
    """
    with network(num_hosts, link) as namespaces:
        yield Cluster(link, namespaces, _dealt(sorted(os.sched_getaffinity(0)), num_hosts))


def _dealt(cores: Sequence[int], num_hosts: int) -> tuple[tuple[int, ...], ...]:
    """Each host's cores: a run of equally many, or one that it shares.

    >>> _dealt([0, 1, 2, 3], 2)
    ((0, 1), (2, 3))
    >>> _dealt([0, 1], 4)
    ((0,), (0,), (1,), (1,))
    """
    each = max(1, len(cores) // num_hosts)
    starts = (
        host * each if len(cores) >= num_hosts else host * len(cores) // num_hosts
        for host in range(num_hosts)
    )
    return tuple(tuple(cores[start : start + each]) for start in starts)


def _wait(
    running: Sequence[subprocess.Popen[bytes]], files: Sequence[Path], timeout_seconds: float
) -> None:
    end = time.monotonic() + timeout_seconds
    while True:
        codes = [process.poll() for process in running]
        for host, code in enumerate(codes):
            if code:
                raise HostError(f"host {host} ended with status {code}:\n{_last(files[host])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            late = [host for host, code in enumerate(codes) if code is None]
            raise HostError(
                f"hosts {late} did not end within {timeout_seconds:g} s; host {late[0]} said"
                f" last:\n{_last(files[late[0]])}"
            )
        time.sleep(0.05)


def _last(file: Path) -> str:
    return file.read_text(errors="replace")[-_TAIL:]
