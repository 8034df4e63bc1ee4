"""Order of the messages of a stage, with channels that record what they are asked."""

import pytest
import torch

from shardwright.runtime.comm.channel import MessageForm
from shardwright.runtime.pipeline.stage_links import StageLinks

CHANNELS = "values_in", "values_out", "gradients_in", "gradients_out"
TENSORS, LOSS = [torch.ones(2, 3)], 0.5


class Recorded:
    """A channel that answers each message with `TENSORS` and `LOSS`."""

    ahead, lost = True, False
    form = MessageForm(((2, 3),), (torch.float32,))

    def __init__(self, name, told):
        self.name, self.told = name, told

    def __getattr__(self, asked):
        return lambda *args, **kwargs: self.told.append(f"{self.name} {asked}")

    def receive(self, ahead=True):
        self.told.append(f"{self.name} receive")
        return TENSORS, LOSS

    def send(self, tensors, loss=0.0, keep=0):
        self.told.append((f"{self.name} send", [tuple(t.shape) for t in tensors], loss, keep))


@pytest.fixture
def told():
    return []


@pytest.fixture
def links(told):
    """Those of the second of four stages."""
    found = object.__new__(StageLinks)
    found.lag, found.is_open = 2, False
    for name in CHANNELS:
        setattr(found, name, Recorded(name, told))
    return found


def test_a_stage_gets_what_its_neighbours_send(links, told):
    assert links.receive_values() is links.receive_once() is TENSORS
    gradients, loss = links.receive_gradients()
    assert gradients is TENSORS and (loss.dtype, loss.item()) == (torch.float64, LOSS)
    links.send_values(TENSORS)
    links.send_gradients(TENSORS, torch.tensor(0.25))
    assert told == [
        "values_in receive",
        "values_in receive",
        "gradients_in receive",
        ("values_out send", [(2, 3)], 0.0, 3),
        ("gradients_out send", [(2, 3)], 0.25, 3),
    ]


def test_a_token_goes_to_the_last_stage_and_back_once(links, told):
    links.open()
    links.close()
    links.close()
    assert told == [
        "values_in begin_receive",
        "gradients_in begin_receive",
        "values_in receive_token",
        "values_out send_token",
        "gradients_in receive_token",
        "gradients_out send_token",
    ]


@pytest.mark.parametrize("gone", [(), ("values_out",), ("gradients_out",)])
def test_an_error_is_sent_to_both_neighbours_that_are_there(links, told, gone):
    for name in gone:
        getattr(links, name).lost = True
    links.fail("no memory")
    wanted = {
        "gradients_out send_failure": "gradients_out",
        "values_out send_failure": "values_out",
    }
    assert told == [asked for asked, name in wanted.items() if name not in gone]


def test_the_loss_of_the_last_stage_returns_through_all(links, told):
    assert links.return_loss(None).item() == LOSS
    assert told == ["gradients_in receive", ("gradients_out send", [(2, 3)], LOSS, 0)]
    links.gradients_out = None  # of the first stage
    assert links.return_loss(torch.tensor(0.125)).item() == 0.125
