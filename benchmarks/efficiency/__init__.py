"""The lowered program against hand-written parallelism of the same strategy, on local ranks."""
