"""Makes torch's export faster, to the same result, by what it does again for each capture.

A fifth of the time of small captures went into looking up each of two thousand operators by name,
for each of thirty namespaces, and into the annotations of a function that is made twelve thousand
times. `tests/property/test_remembered_captures.py` holds that torch still has them.
"""

import functools
import typing

import torch
import torch._export.utils


def speed_up():
    """Look operators up again only after others were registered, and remember annotations."""
    utils = torch._export.utils
    look_up = getattr(utils, "_materialize_cpp_cia_ops", None)  # other versions may have none
    if look_up is not None and not hasattr(look_up, "__wrapped__"):
        utils._materialize_cpp_cia_ops = _once_for_all(look_up)
        torch._ops.Callable = typing.Callable  # which remembers what it is subscripted with


def _once_for_all(look_up):
    seen = None

    @functools.wraps(look_up)
    def looked_up():
        nonlocal seen
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(
            "CompositeImplicitAutograd"
        )
        if registered != seen:
            look_up()
            seen = registered

    return looked_up
