"""A parallel program on real ranks, over plain `torch.distributed`."""
