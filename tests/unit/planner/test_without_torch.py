"""A graph in a file is planned, and its plan refined, without torch.

What only torch knows, the memory of single operator calls, is handed in: here what was traced
before, in another process.
"""

import pickle
import subprocess
import sys
from pathlib import Path

from shardwright.ir.op_memory import call_key
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.plan_io.graph_text import graph_to_json
from shardwright.planner.planner import search
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import residual_layers

ROOT = Path(__file__).parents[3]
MACHINE = "2xH100"
CHILD = """
import pickle, sys
from pathlib import Path
from shardwright.plan_io.graph_text import graph_from_json
from shardwright.ir.op_memory import call_key
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.plan_io.files import save_plan
from shardwright.planner.planner import search


class Known:
    def __init__(self, forward, backwards):
        self.forward, self.backward = forward, backwards.__getitem__


class Tracer:
    calls = pickle.loads(Path("calls.pickle").read_bytes())

    def call(self, *given):
        return Known(*self.calls[call_key(*given)])


graph = graph_from_json(Path("graph.json").read_text())
found = search(graph, preset(sys.argv[1]), PlanOptions(), Tracer())
save_plan(found.fastest(), "plan.json")
print("torch" in sys.modules, found.fastest().peak_bytes)
"""


class Recorded:
    """A call, and what was asked of it."""

    def __init__(self, call):
        self._call, self.forward, self.backwards = call, call.forward, {}

    def backward(self, gradients):
        self.backwards[gradients] = self._call.backward(gradients)
        return self.backwards[gradients]


class Recording:
    """Traces calls with torch, and keeps what it found."""

    def __init__(self):
        self.torch, self.calls = Footprints(), {}

    def call(self, *given):
        return self.calls.setdefault(call_key(*given), Recorded(self.torch.call(*given)))


def test_a_plan_is_searched_and_refined_without_torch(tmp_path):
    graph, recording = residual_layers(2), Recording()
    found = search(graph, preset(MACHINE), PlanOptions(), recording)
    fastest = found.fastest()
    assert fastest.peak_bytes < found.plans[0].peak_bytes, "it was refined"
    calls = {key: (one.forward, one.backwards) for key, one in recording.calls.items()}
    (tmp_path / "calls.pickle").write_bytes(pickle.dumps(calls))
    (tmp_path / "graph.json").write_text(graph_to_json(graph))
    child = [sys.executable, "-c", CHILD, MACHINE]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    printed = subprocess.check_output(child, cwd=tmp_path, env=environment, text=True)
    assert printed.split() == ["False", str(fastest.peak_bytes)]
    assert (tmp_path / "plan.json").exists()
