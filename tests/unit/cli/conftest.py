"""The command line in this process, with an `api` that answers at once."""

import json
import sys
import types
from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner

import shardwright
from shardwright.cli import main
from shardwright.cli.planning import choosing
from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Graph, Leaf, LeafKind, Tensor
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.numerics import Numerics
from shardwright.plan_io.files import save_plan
from shardwright.planner.audit.avoidable import NOTHING
from shardwright.planner.tight_memory import if_tight
from tests.harness import plans

JOB = """
import torch
from shardwright.train.job import Job

def job():
    batch = (torch.zeros(8, 4),)
    return Job(lambda: torch.nn.Linear(4, 1), batch, torch.optim.SGD, [batch], 3)
"""
GRAPH = Graph(
    leaves=(Leaf("args.0", LeafKind.INPUT, ("args.0",)),),
    ops=(),
    outputs=("args.0",),
    values=(Tensor("args.0", (8, 4), "float32"),),
)


@dataclass(frozen=True)
class Report:
    ok: bool = True
    loss_error: float = 1e-7
    max_gradient_error: float = 2e-7
    max_buffer_error: float = 4e-7
    max_parameter_error: float = 3e-7
    worst: str = "weight"
    capture_error: float = 5e-7
    compared_in: str = "float64"
    not_compared: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self):
        return "the plan equals one device" if self.ok else "the plan DIFFERS from one device"


class FakeApi(types.ModuleType):
    """Frontiers that halve in memory and time with each doubling of the devices."""

    def __init__(self):
        super().__init__("shardwright.api")
        self.report = Report()
        self.searched = []
        self.asked = []
        self.refused = set()  # numbers of devices

    @property
    def methods(self):
        return [options.method for options in self.asked]

    @property
    def micro_batches(self):
        return [options.micro_batches for options in self.asked]

    def capture(self, model, args=(), kwargs=None, **numerics):
        return replace(GRAPH, numerics=Numerics(**numerics))

    def search_with(self, graph, machine, options, progress=None, tracer=None):
        self.searched.append((machine.devices, options.optimizer))
        self.asked.append(options)
        if machine.devices in self.refused:
            raise ConstraintError(f"no mesh of {machine.devices}")

        def on_these(plan):
            scale = machine.devices / 2
            return replace(
                plan,
                fingerprint=graph.fingerprint,
                numerics=graph.numerics,
                machine=machine.name,
                step_seconds=plan.step_seconds / scale,
                lower_bound_seconds=plan.lower_bound_seconds / scale,
                peak_bytes=int(plan.peak_bytes / scale),
                mesh=plans.simple(mesh=f"dp={machine.devices}").mesh,
            )

        def run(counts):
            found = plans.frontier()
            every = list(found)
            if counts == "all" or 2 in counts:
                every.append(replace(plans.simple(ms=300, mib=80), micro_batches=2))
            return Frontier(
                tuple(on_these(p) for p in every),
                tuple(on_these(p) for p in found.baselines),
                0.25,
                device_bytes=machine.device.usable_bytes,
            )

        if options.micro_batches is None and not options.whole:
            return if_tight(lambda *, tight: run("all" if tight else (1,)), options.memory_limit)
        return run(options.micro_batches or "all")

    def verify(self, model, plan, args=(), kwargs=None):
        return self.report


@pytest.fixture
def api(monkeypatch):
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "shardwright.api", fake)
    monkeypatch.setattr(shardwright, "api", fake, raising=False)
    monkeypatch.setattr("shardwright.public.search_with", fake.search_with)
    monkeypatch.setattr(choosing, "avoidable", lambda *_: NOTHING)  # the plan is none of the graph
    return fake


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # loading a file adds its folder
    file = tmp_path / "cli_job.py"
    file.write_text(JOB)
    return f"{file}:job"


@pytest.fixture
def plan_file(tmp_path):
    file = tmp_path / "plan.json"
    save_plan(replace(plans.simple(), fingerprint=GRAPH.fingerprint), file)
    return str(file)


@pytest.fixture
def shardwright_command():
    def call(*arguments):
        return CliRunner().invoke(main, [str(a) for a in arguments])

    return call


@pytest.fixture
def mistake(shardwright_command):
    """Run a command that must fail as the user's mistake; gives its one line."""

    def call(*arguments):
        result = shardwright_command(*arguments)
        assert result.exit_code == 2, (result.output, result.exception)
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("shardwright: ")
        return line

    return call


@pytest.fixture
def as_json(shardwright_command):
    """Run a command with --json; gives the object, which must be all of stdout."""

    def call(*arguments):
        result = shardwright_command(*arguments, "--json")
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)

    return call
