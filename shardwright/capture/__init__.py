"""From an unmodified `nn.Module` and one example call to the serial `Graph`."""
