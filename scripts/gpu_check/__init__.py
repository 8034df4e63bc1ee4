"""Checks shardwright on real GPUs: `python -m scripts.gpu_check`."""
