import pytest
import torch
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
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: "cpu:fresh")
    assert backend_of() is backend_for("fresh") is backend_for("cuda")


def test_a_group_of_several_backends_is_that_of_the_device_there_is(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda _group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend_of() is backend_for("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backend_of() is backend_for("cuda")
