"""shardwright: the Pareto frontier of ways to train a PyTorch model in parallel, and the way there."""
