"""Other trainers under a plan: a run saved and resumed under another plan is that of one device."""

import json
from pathlib import Path

import pytest
import torch

import shardwright as sw
from tests.harness.script_ranks import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.hf
def test_hugging_faces_trainer_resumes_under_another_plan(tmp_path):
    """Accumulated batches with ignored labels, clipping, evaluation with metrics, a schedule.

    At the end it has the weights of the best checkpoint.
    """
    from transformers import GPT2LMHeadModel

    from tests.harness.trainers import hugging_face_run as script

    batch = script.default_data_collator(script.data()[: script.BATCH])
    plans = written(script.gpt2(), (), batch, tmp_path)
    halves = resumed("hugging_face", tmp_path, plans, 4, 8)
    (tmp_path / "alone").mkdir()
    expected, weights, trainer = script.run(tmp_path / "alone", 8)
    found = halves[-1]  # which has what the checkpoint told of the first
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    numbers, right = (torch.tensor([e[2] for e in of]).double() for of in (found, expected))
    torch.testing.assert_close(numbers, right, rtol=1e-6, atol=0)  # losses are in float32
    last, best = (torch.load(tmp_path / f"{name}.pt") for name in ("final", "best"))
    torch.testing.assert_close(last, dict(weights), rtol=0, atol=1e-7)
    torch.testing.assert_close(best, dict(trainer.model.state_dict()), rtol=0, atol=1e-7)
    assert any((last[name] - value).abs().max() > 1e-3 for name, value in best.items())
    stored = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    torch.testing.assert_close(best, dict(stored.state_dict()), rtol=0, atol=0)


def test_an_accelerator_resumes_under_another_plan(tmp_path):
    """Two batches make an update, gradients are clipped, and samples are shuffled."""
    from tests.harness.trainers import accelerate_run as script
    from tests.harness.trainers.classifier import BATCH, Classifier, data

    plans = written(Classifier(), data()[:BATCH], {}, tmp_path)
    halves = resumed("accelerate", tmp_path, plans, 2, 4)
    (tmp_path / "alone").mkdir()
    expected, module = script.alone(tmp_path / "alone", 4)
    found = torch.tensor([number for half in halves for number in half]).double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-10, atol=0)
    same_weights(tmp_path, module, atol=1e-10)


def test_lightning_resumes_under_another_plan(tmp_path):
    """Two batches make an update, gradients are clipped, and batch norm is evaluated."""
    from tests.harness.trainers import lightning_run as script
    from tests.harness.trainers.classifier import BATCH, Classifier, data

    plans = written(Classifier(), data()[:BATCH], {}, tmp_path)
    first, second = resumed("lightning", tmp_path, plans, 2, 4)
    (tmp_path / "alone").mkdir()
    expected, module = script.run(tmp_path / "alone", 4)
    found = {**second, "losses": first["losses"] + second["losses"]}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-10), name
    same_weights(tmp_path, module, atol=1e-10)


@pytest.mark.hf
def test_the_examples_run(tmp_path):
    given = {"accelerate_mlp": [], "hf_trainer": [tmp_path], "lightning_mlp": []}
    for name, arguments in given.items():
        check("".join(run_script(2, EXAMPLES / f"{name}.py", *arguments, folder=ROOT)))


def check(written):
    losses = [line for line in written.splitlines() if line.startswith("losses: ")]
    first, *_, last = (float(loss) for loss in losses[0].split()[1:])
    assert last < first


def written(model, args, kwargs, folder):
    """Files with a plan that shards parameters, and with one of tensor parallelism."""
    graph = sw.capture(model, args, kwargs)
    plans = {plan.name: plan for plan in sw.search(graph, sw.Machine.preset("2xcpu")).baselines}
    files = []
    for name in ("fully sharded", "tensor parallel"):
        sw.Plan.of(plans[name]).save(folder / f"{name}.json")
        files.append(folder / f"{name}.json")
    return files


def resumed(kind, folder, plans, *ends):
    """What the script of `kind` writes: to the first end under the first plan, and so on."""
    found = []
    for end, plan in zip(ends, plans, strict=True):
        module = f"tests.harness.trainers.{kind}_run"
        run_script(2, module, folder, end, plan, folder=ROOT)
        found.append(json.loads((folder / "history.json").read_text()))
    return found


def same_weights(folder, model, atol):
    found = torch.load(folder / "final.pt")
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=atol)
