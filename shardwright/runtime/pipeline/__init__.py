"""Synchronous pipelines, on `torch.distributed.pipelining`."""
