"""How long it takes to simulate a candidate plan's time and memory, by number of layers."""
