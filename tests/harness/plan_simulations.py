"""Simulations of plans that answer from functions."""

from shardwright.ir.layout import Seconds


class FunctionSimulation:
    """Answers with `compare`, and with others of these functions where they are given.

    Plans that it is asked to settle are settled.
    """

    def __init__(
        self, compare=lambda plan: plan, *, peak=None, seconds=None, least=None, deepen=None
    ):
        self.compared = compare
        self.settled = lambda plan: plan
        self.peak = peak or (lambda plan: self.compared(plan).peak_bytes)
        self.seconds = seconds or (lambda plan: self.compared(plan).step_seconds)
        self.least_seconds = least or (lambda plan: Seconds(0.0))
        self.deepened = deepen or (lambda plan, limit: plan)
