"""Order of the messages of a stage, with channels that record what they are asked."""

import pytest
import torch

from shardwright.program.step.instructions import Payload, Recv, Send
from shardwright.runtime.comm.channel import MessageForm
from shardwright.runtime.pipeline.stage_links import StageLinks

CHANNELS = "values_in", "values_out", "gradients_in", "gradients_out"
TENSORS = [torch.ones(2, 3)]


class Recorded:
    """A channel that answers each message with `TENSORS`."""

    ahead, lost = True, False
    form = MessageForm(((2, 3),), (torch.float32,))

    def __init__(self, name, told):
        self.name, self.told = name, told

    def __getattr__(self, asked):
        return lambda *args, **kwargs: self.told.append(f"{self.name} {asked}")

    def receive(self, form, ahead):
        self.told.append((f"{self.name} receive", form.shapes, ahead))
        return TENSORS

    def send(self, form, tensors):
        self.told.append((f"{self.name} send", form.shapes, tensors))


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


VALUE, LOSS = Payload("x", (2, 3), "float32"), Payload("out/0", (), "float32")


def test_messages_of_the_program_go_through_the_channel_of_their_kind(links, told):
    cpu = torch.device("cpu")
    for one in (Recv((VALUE,), "pp:0>1", "v"), Recv((LOSS, VALUE), "pp:2>1", "g", backward=True)):
        assert links.end(one, ahead=True).receive(cpu).results() is TENSORS
    links.end(Send((VALUE,), "pp:1>2", "v"), ahead=True).send(TENSORS, cpu)
    links.end(Send((LOSS,), "pp:1>0", "g", backward=True), ahead=False).send([], cpu)
    assert told == [
        "values_in begin_receive",
        ("values_in receive", ((2, 3),), True),
        "gradients_in begin_receive",
        ("gradients_in receive", ((), (2, 3)), True),
        ("values_out send", ((2, 3),), TENSORS),
        ("gradients_out send", ((),), []),
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
