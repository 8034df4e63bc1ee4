"""The launch scripts parse, and tell the worker only what it knows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shardwright.train.worker import parser

yaml = pytest.importorskip("yaml")
LAUNCH = Path(__file__).parents[2] / "examples/launch"


def understood(words):
    options = parser().parse_args(words)
    assert options.target and options.plan and options.checkpoint and options.steps == 1000
    return options


# What the operator's schema (kubeflow.org/v1) and Kubernetes' know at each place, as far as used.
KNOWN = {
    "": {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict},
    "metadata": {"name": str, "namespace": str, "labels": dict},
    "spec": {
        "elasticPolicy": dict, "nprocPerNode": str, "pytorchReplicaSpecs": dict, "runPolicy": dict,
    },
    "spec.elasticPolicy": {
        "minReplicas": int, "maxReplicas": int, "rdzvBackend": str, "rdzvPort": int,
        "rdzvHost": str, "rdzvId": str, "rdzvConf": list, "standalone": bool, "nProcPerNode": int,
        "maxRestarts": int, "metrics": list,
    },
    "spec.pytorchReplicaSpecs": {"Master": dict, "Worker": dict},
    "spec.pytorchReplicaSpecs.Worker": {"replicas": int, "restartPolicy": str, "template": dict},
    "spec.pytorchReplicaSpecs.Worker.template": {"metadata": dict, "spec": dict},
    "spec.pytorchReplicaSpecs.Worker.template.spec": {
        "containers": list, "volumes": list, "terminationGracePeriodSeconds": int,
        "nodeSelector": dict, "tolerations": list,
    },
}  # fmt: skip
CONTAINER = {
    "name": str, "image": str, "command": list, "args": list, "env": list, "resources": dict,
    "volumeMounts": list, "ports": list,
}  # fmt: skip


def test_the_kubernetes_manifest_has_nothing_that_its_schema_does_not_know():
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    for path, known in KNOWN.items():
        place = job
        for key in filter(None, path.split(".")):
            place = place[key]
        assert {key: type(value) for key, value in place.items()} == {
            key: known[key] for key in place
        }, path
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert spec["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert job["spec"]["elasticPolicy"]["rdzvBackend"] in ("c10d", "etcd", "etcd-v2")
    (container,) = spec["template"]["spec"]["containers"]
    assert {key: type(value) for key, value in container.items()} == {
        key: CONTAINER[key] for key in container
    }
    assert container["name"] == "pytorch"  # the one that the operator looks for
    assert all(set(one) == {"name", "value"} for one in container["env"])
    assert all(isinstance(word, str) for word in container["command"] + container["args"])


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
    subprocess.run([bash, "-n", script], check=True)
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
    head = script.read_text().partition("set -euo pipefail")[0]
    assert head.startswith("#!/usr/bin/env bash\n")
    assert all(line.startswith("#") for line in head.splitlines())  # sbatch reads no further
    assert "#SBATCH" not in script.read_text().removeprefix(head)
