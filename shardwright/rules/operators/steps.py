"""Names in the calls of experts and of MLPs in chunks, which several packages read.

Between their products are steps as JSON (`tracing/rewrites/expert_steps.py`): operators, and parts
of the last dimension of a value, which are equal chunks or every n-th element.
"""

from __future__ import annotations

PART, EVERY = "part", "every"  # args: the value, the number of the part, how many there are
# Positions among the arguments of experts; biases may be missing.
EXPERTS_TURNED, EXPERTS_PRODUCT, EXPERTS_STEPS, EXPERTS_BIASES = 5, 6, 7, slice(8, 10)
