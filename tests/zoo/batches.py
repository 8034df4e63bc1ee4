"""Random batches, the same at every call."""

import torch


def integers(below, *shape):
    return torch.randint(below, shape, generator=_generator())


def reals(*shape):
    return torch.randn(shape, generator=_generator())


def tokens(batch, length, vocabulary):
    """Token ids and labels; the first sample has few labels, so means are uneven."""
    ids = integers(vocabulary, batch, length)
    labels = ids.clone()
    labels[0, : length - 2] = -100
    return {"input_ids": ids, "labels": labels}


def images(batch, size):
    return reals(batch, 3, size, size)


def classes(batch, count):
    return integers(count, batch)


def _generator():
    """A CPU generator, or none on the meta device, which draws no numbers."""
    if torch.get_default_device().type == "meta":
        return None
    return torch.Generator().manual_seed(1)
