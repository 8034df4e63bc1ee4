"""What tests share: models, graphs and plans written by hand, oracles, generators, ranks."""
