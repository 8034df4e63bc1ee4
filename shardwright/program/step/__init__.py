"""The whole step of one rank as a list of instructions: forward, backward, communication."""
