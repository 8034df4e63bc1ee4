"""Asynchronous pipelines with weight prediction (SpecTrain)."""
