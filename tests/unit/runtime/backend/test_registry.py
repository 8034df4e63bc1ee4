import pytest
import torch.distributed as dist

from shardwright.machine.backends import BACKENDS
from shardwright.runtime.backend.gloo import Gloo
from shardwright.runtime.backend.registry import backend_for, backend_of


@pytest.mark.parametrize("spec", BACKENDS.values(), ids=BACKENDS)
def test_every_known_backend_has_one_object(spec, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda _group: spec.name)
    assert backend_of() is backend_for(spec.device)
    assert backend_of().spec is spec
    assert isinstance(backend_of(), Gloo) == (spec.name == "gloo")


def test_unknown_backends_are_called_as_nccl_is(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda _group: "fresh")
    assert backend_of() is backend_for("fresh") is backend_for("cuda")
