import pytest
import torch
from torch.distributions import Normal, kl_divergence

import shardwright as sw
from shardwright.tracing.export.unvalidated import unvalidated
from tests.harness.graph_comparison import compared


class Variational(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(8, 8), torch.nn.Linear(4, 8)

    def forward(self, x):
        mean, log = self.encoder(x).chunk(2, -1)
        posterior = Normal(mean, log.exp())
        divergence = kl_divergence(posterior, Normal(torch.zeros_like(mean), 1.0)).sum(-1)
        return (divergence - Normal(self.decoder(mean), 1.0).log_prob(x).sum(-1)).mean()


def test_a_variational_autoencoder_with_distributions_is_captured():
    found = compared(Variational().double(), {"x": torch.randn(4, 8, dtype=torch.float64)})
    assert found.ok and found.error < 1e-12
    with torch.device("meta"):
        model, x = Variational(), torch.zeros(4, 8)
    sw.capture(model, (x,))


@pytest.mark.parametrize("checked", [True, False])
def test_checks_are_as_before_behind_it(checked):
    torch.distributions.Distribution.set_default_validate_args(checked)
    try:
        with unvalidated():
            Normal(0.0, -1.0)
        if checked:
            with pytest.raises(ValueError):
                Normal(0.0, -1.0)
        else:
            Normal(0.0, -1.0)
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)


def test_a_default_device_does_not_reach_the_probe():
    with torch.device("meta"), unvalidated():
        Normal(torch.zeros(()), -torch.ones(()))
    with pytest.raises(ValueError):
        Normal(torch.zeros(()), -torch.ones(()))
