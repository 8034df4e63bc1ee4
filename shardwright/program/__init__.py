"""The program that one rank runs: local operators and explicit redistributions."""
