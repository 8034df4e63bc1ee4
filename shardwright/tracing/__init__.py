"""Traces an unmodified `nn.Module` with one example call into the serial `Graph`."""
