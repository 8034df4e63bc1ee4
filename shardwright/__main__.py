"""`python -m shardwright`, which is also what `torchrun --module shardwright` starts."""

from shardwright.cli import main

main()
