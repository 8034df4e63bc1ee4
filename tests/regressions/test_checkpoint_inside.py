"""Models that checkpoint their activations are captured as if they did not.

A user called `gradient_checkpointing_enable(...use_reentrant=True)` on a Hugging Face model, or
`torch.utils.checkpoint.checkpoint` in a `forward`, and planned it. The reentrant form runs its
function without autograd, so every weight in the graph was detached: planning failed with "element
0 of tensors does not require grad", or trained only what stood outside. Now a checkpointed function
is captured as if it were called directly, dropout inside too, and a note on the plan says that what
is recomputed is the plan's choice.
"""

import functools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

import shardwright as sw
from shardwright.report.text.explain import explain
from shardwright.tracing.capture import capture_call
from shardwright.tracing.checkpointing import NOTE, checkpointing_disabled

BATCH = (torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.25)

    def forward(self, x, scale=1.0):
        return x + self.drop(self.down(self.norm(self.up(x)).relu())) * scale


WAYS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),  # bound before any capture
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "none": lambda block, *args: block(*args),
}


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.first = way, nn.Linear(6, 8)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x, y):
        x = self.first(x)
        if self.way.startswith("sequential"):
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=self.way.endswith("!"))
        else:
            for block in self.blocks:
                x = WAYS[self.way](block, x)
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "sequential", "sequential!"])
def test_the_graph_is_that_of_the_model_without_checkpoints(way, device):
    with torch.device(device):
        plain, checkpointed = Net("none").double(), Net(way).double()
    expected, found = (capture_call(model, BATCH).graph for model in (plain, checkpointed))
    assert [str(op) for op in found.ops] == [str(op) for op in expected.ops]
    assert found.values == expected.values  # and what requires a gradient
    assert (found.note, expected.note) == (NOTE, "")


def test_the_plan_says_so():
    torch.manual_seed(0)
    model = Net("reentrant").double()
    plan = sw.plan(model, BATCH, machine=sw.Machine.preset("2xcpu"), optimizer="sgd")
    assert NOTE in plan.notes and NOTE in " ".join(explain(plan).split())


def test_a_reentrant_checkpoint_of_the_first_layer_gives_no_gradient_as_in_the_model():
    """No input requires a gradient there, and torch warns that parameters inside get none."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.outside = nn.Linear(6, 8), nn.Linear(8, 8)

        def forward(self, x, y):
            x = checkpoint(self.inside, x, use_reentrant=True)
            return nn.functional.mse_loss(self.outside(x), y)

    model = First().double()
    graph = capture_call(model, BATCH).graph
    inside = next(op for op in graph.ops if "inside.weight" in op.operands or op.kind == "linear")
    assert not graph.tensor[inside.outputs[0]].requires_grad
    assert graph.tensor[graph.outputs[0]].requires_grad
    assert "no input that requires a gradient" in graph.note
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(*BATCH).backward()
    assert model.inside.weight.grad is None and model.outside.weight.grad is not None


def test_torch_is_as_before_and_other_threads_never_see_it():
    before = CheckpointFunction.apply, torch.utils.checkpoint.__dict__.copy()
    x = torch.ones(3, requires_grad=True)
    ran = []

    def other():
        y = checkpoint(lambda t: t * 2, x, use_reentrant=True)
        ran.append(type(y.grad_fn).__name__)

    with pytest.raises(KeyError), checkpointing_disabled() as found:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert ran == ["CheckpointFunctionBackward"] and found.count == 0
        assert type(checkpoint(lambda t: t * 2, x, use_reentrant=True).grad_fn).__name__ == (
            "MulBackward0"
        )
        raise KeyError
    assert (CheckpointFunction.apply, torch.utils.checkpoint.__dict__) == before
    assert "apply" not in vars(CheckpointFunction)


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models_with_gradient_checkpointing(kind):
    import transformers

    def model():
        shape = {"vocab_size": 64, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
        if kind == "llama":
            config = transformers.LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                num_key_value_heads=1, **shape,
            )  # fmt: skip
            return transformers.LlamaForCausalLM(config).train()
        config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, **shape)
        return transformers.GPT2LMHeadModel(config).train()

    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        expected = capture_call(model(), (), {"input_ids": ids, "labels": ids}).graph
        for reentrant in (True, False):
            one = model()
            one.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
            found = capture_call(one, (), {"input_ids": ids, "labels": ids}).graph
            assert found.fingerprint == expected.fingerprint
            assert found.note == NOTE
