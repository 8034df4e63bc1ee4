"""Programs of few layers and few micro-batches that stand for all."""
