"""The launch scripts parse, and tell the worker only what it knows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shardwright.train.worker import parser

yaml = pytest.importorskip("yaml")
LAUNCH = Path(__file__).parents[3] / "examples/launch"


def understood(words):
    options = parser().parse_args(words)
    assert options.target and options.plan and options.checkpoint and options.steps == 1000
    return options


def test_the_kubernetes_manifest_starts_the_worker():
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert job["spec"]["elasticPolicy"]["maxReplicas"] == spec["replicas"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "-m", "shardwright.train.worker"]
    options = understood(container["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert options.checkpoint == mounts["runs"]
    assert {v["name"] for v in spec["template"]["spec"]["volumes"]} == set(mounts)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert str(gpus) == job["spec"]["nprocPerNode"]


def test_the_slurm_script_starts_the_worker(tmp_path):
    """Run for real, with commands of the cluster that write down what they were asked."""
    for name, code in {
        "scontrol": "echo first; echo second",
        "srun": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_NAME": "a",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "4",
    }
    bash = shutil.which("bash")
    script = LAUNCH / "slurm.sh"
    done = subprocess.run(
        [bash, script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    words = done.stdout.split("\n")[:-1]
    assert words[0] == "torchrun" and words[words.index("-m") + 1] == "shardwright.train.worker"
    assert words[words.index("--rdzv-endpoint") + 1] == "first:29500"
    assert words[words.index("--nproc-per-node") + 1] == "4"
    understood(words[words.index("-m") + 2 :])
    given = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.M)
    assert {"nodes", "ntasks-per-node", "signal", "requeue"} <= set(given)
