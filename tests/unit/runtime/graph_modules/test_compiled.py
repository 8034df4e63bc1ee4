"""What is compiled of a region, and that it computes the same."""

import torch
from torch import fx, nn

import shardwright as sw


class Rectified(nn.Module):
    """A product with a ReLU behind it at the end, and one within."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return torch.relu(self.down(torch.relu(self.up(x)))), x.sin().cos()


def test_a_rectifier_behind_the_last_product_is_not_compiled(monkeypatch):
    compile_with = fx.GraphModule.compile
    monkeypatch.setattr(
        fx.GraphModule,
        "compile",
        lambda module, **how: compile_with(module, backend="eager", **how),
    )
    torch.manual_seed(0)
    model, x = Rectified().double(), torch.randn(3, 4, dtype=torch.float64)
    expected = model(x)
    expected[0].square().sum().backward()
    parallel = sw.parallelize(model, sw.plan(model, (x,), machine=sw.Machine.preset("1xcpu")))
    parallel.compile_programs()
    found = parallel(x)
    found[0].square().sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        ours = parallel.get_parameter(name).grad
        torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=0)
    (compiled,) = parallel._sw_program.regions.compiled.shared
    within = [node.target for node in compiled.graph.nodes if "relu" in str(node.target)]
    assert len(within) == 1
    (whole,) = parallel._sw_program.regions.compiled.regions
    assert any("relu" in str(node.target) for node in whole.graph.nodes)
