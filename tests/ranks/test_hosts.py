"""Hosts on one machine: as slow as they are told, and gone when they should be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hosts import HostError, HostsUnavailableError, Link, hosts
from benchmarks.lost_host.run import good, run

BIT_PER_S = 1e8
REDUCE = """
import json, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((2**20,), dist.get_rank() + 1.0)
dist.all_reduce(x)
dist.barrier()
start = time.perf_counter()
dist.all_reduce(x)
print(json.dumps({"sum": x[0].item(), "bytes": x.nbytes, "seconds": time.perf_counter() - start}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster():
    try:
        with hosts(2, Link(BIT_PER_S)) as cluster:
            yield cluster
    except HostsUnavailableError as e:
        pytest.skip(str(e))


@pytest.mark.ranks
def test_two_hosts_reduce_as_fast_as_their_link(cluster, tmp_path):
    program = tmp_path / "reduce.py"
    program.write_text(REDUCE)
    outputs = cluster.torchrun(str(program), timeout_seconds=300)
    for output in outputs:
        told = json.loads(output.strip().splitlines()[-1])
        assert told["sum"] == 6.0  # 1 + 2, twice
        # In a ring of two each host sends as many bytes as the tensor has.
        least = (told["bytes"] - 2 * cluster.link.burst) * 8 / BIT_PER_S
        assert least < told["seconds"] < 20 * least  # the machine may be busy


@pytest.mark.ranks
@pytest.mark.slow
def test_a_job_goes_on_without_a_host_and_with_it_again(cluster, tmp_path):
    """Cut off and killed; the other trains alone, under another plan; then both do."""
    result = run(cluster, tmp_path, steps=40, stall_seconds=8.0)
    assert good(result), result
    said = (tmp_path / "host-0.log").read_text()
    assert "no step was done for 8 s" in said and "held up by rank 1" in said
    assert said.count("resumed after step") >= 2  # more often where it is too slow to be heard
    assert [one["what"] for one in result["told"]][-1] == "the job is done"


def test_a_host_that_fails_ends_the_others_and_is_named(cluster):
    commands = (["sleep", "600"], ["sh", "-c", "echo lost >&2; exit 3"])
    start = time.monotonic()
    with pytest.raises(HostError, match=r"host 1 ended with status 3:\nlost"):
        cluster.run(lambda host: commands[host], timeout_seconds=300)
    assert time.monotonic() - start < 60


def test_what_a_command_leaves_behind_ends_with_it(cluster, tmp_path):
    mark = f"sleep {600 + os.getpid() / 1e7:.7f}"
    cluster.run(lambda host: ["sh", "-c", f"{mark} & echo started"], timeout_seconds=60)
    with pytest.raises(HostError, match=r"hosts \[0, 1\] did not end within 0.5 s"):
        cluster.run(lambda host: ["sh", "-c", f"{mark} & {mark}"], timeout_seconds=0.5)
    assert _within(60, lambda: mark not in _running())  # the kernel takes a moment


def test_hosts_are_alone_with_each_other(cluster):
    command = ["ip", "-brief", "-4", "address"]
    outputs = cluster.run(lambda host: command, timeout_seconds=60)
    for host, output in enumerate(outputs):
        devices = {line.split()[0].split("@")[0]: line.split()[2] for line in output.splitlines()}
        assert devices == {"lo": "127.0.0.1/8", "eth0": f"10.0.0.{host + 1}/24"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_hosts_end_with_the_process_that_made_them(cluster, how, tmp_path):
    mark = f"sleep {700 + os.getpid() / 1e7:.7f}"
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from benchmarks.hosts import Link, hosts\n"
        "with hosts(2, Link(1e9)) as cluster:\n"
        "    print(*(n.pid for n in cluster.namespaces), flush=True)\n"
        f"    cluster.run(lambda host: {mark.split()}, timeout_seconds=300)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as made:
        holders = made.stdout.readline().split()
        assert _within(60, lambda: mark in _running())
        os.kill(made.pid, how)
        try:
            made.wait(60)
        finally:
            made.kill()
    assert len(holders) == 2
    gone = [Path("/proc", pid, "ns") for pid in holders]
    assert _within(60, lambda: mark not in _running() and not any(p.exists() for p in gone))


def test_links_and_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at least 1e6 are needed"):
        Link(0.1)
    with pytest.raises(ValueError, match="cannot be negative"):
        Link(1e9, -1.0)
    with pytest.raises(ValueError, match="0 hosts; between 1 and 200"), hosts(0, Link(1e9)):
        pass


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsUnavailableError, match="install iproute2 and util-linux"):  # noqa: SIM117
        with hosts(2, Link(1e9)):
            pass


def _running():
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode().strip())
        except OSError:  # ended in between
            continue
    return [text for text in found if text.startswith("sleep")]


def _within(seconds, holds):
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
