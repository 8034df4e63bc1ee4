"""The micro-batches after which gradients are reduced over devices; None is the default.

By default gradients of parameters that are stored sharded are reduced after every micro-batch, so
that each rank keeps its own part of them, and those of parameters that are stored whole once.
"""

LAST = "last"  # terms are added up whole on each rank, and reduced once a step: ZeRO-1, no_sync
EVERY = "every"
