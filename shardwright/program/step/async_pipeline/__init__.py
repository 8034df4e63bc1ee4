"""Step programs of asynchronous pipelines, whose calls run two passes of different mini-batches."""
