"""Recipes of products in 8 bits: what their casts move, and which library has them."""

import pytest

from shardwright.ir.options.fp8 import FLOAT8, MXFP8, Cast, executed_by, recipe_of
from shardwright.ir.options.numerics import Numerics, NumericsError
from shardwright.ir.strategy.fields import FP8


def bytes_of(*casts):
    """Bytes of a bfloat16 element that casts move in all."""
    return sum(sum(cast.bytes_each(2)) for cast in casts)


@pytest.mark.parametrize(
    ("name", "compiled", "activation", "gradient"),
    [
        ("tensorwise", True, (2 + 3) + 3, 2 + 4),
        ("rowwise", True, 3 + (4 + 3), 5 + 3),
        ("mxfp8", True, 2 * (3 + 1 / 32), 2 * (3 + 1 / 32)),
        ("delayed", False, 4, 4),
        ("tensorwise", False, 2 + 4, 2 + 4),
        ("blockwise", False, 2 * (2 + 1 / 32), 2 * (2 + 1 / 32)),
        ("mxfp8", False, 2 * (2 + 1 / 32), 2 * (2 + 1 / 32)),
    ],
)
def test_casts_move_what_their_kernels_read_and_write(name, compiled, activation, gradient):
    recipe = executed_by(name, compiled=compiled)
    assert bytes_of(recipe.activation, recipe.activation_again) == activation
    assert bytes_of(recipe.weight, recipe.weight_again) == activation
    assert bytes_of(recipe.gradient) == gradient
    assert recipe.products == (MXFP8 if name == "mxfp8" else FLOAT8)
    assert recipe.saves_8_bit == recipe.casts_weights_once == (not compiled)
    assert recipe_of(recipe.key) == recipe


def test_every_recipe_of_a_strategy_has_a_library():
    for name in FP8:
        assert executed_by(name, compiled=True) or executed_by(name, compiled=False)
    assert executed_by("rowwise", compiled=False) is None
    assert executed_by("delayed", compiled=True) is None


def test_devices_that_take_any_layout_need_no_second_copy_but_of_blocks():
    def moved(name, compiled):
        plain = executed_by(name, compiled=compiled)
        return bytes_of(plain.gradient) - bytes_of(plain.without_copies().gradient)

    assert moved("delayed", False) == moved("tensorwise", False) == 1
    assert moved("mxfp8", False) == moved("blockwise", False) == moved("tensorwise", True) == 0
    assert Cast(((1, 2),)).without_copies() == Cast(((1, 1),))


def test_numerics_name_the_recipe_and_whether_it_is_executed_here():
    assert str(Numerics()) == "rng=exact batch_norm=exact"
    executed = "torchao:rowwise", "torchao:tensorwise"
    priced = "torchao:mxfp8", "torchao:tensorwise:gather", "TransformerEngine:tensorwise"
    for key in (*executed, *priced):
        numerics = Numerics(fp8=key)
        assert str(numerics).endswith(f" fp8={key}")
        ((name, text),) = numerics.lines()
        assert name == "fp8" and text.startswith(f"{key}: ")
        assert text.endswith("priced, not executed here") == (key in priced)
        assert ("scales are of a rank's tiles" in text) == (key in executed)
        if key in priced:
            with pytest.raises(NumericsError, match=f"fp8={key} is priced, not executed") as e:
                numerics.require_executed()
            assert "\n" not in str(e.value)
        else:
            numerics.require_executed()
    with pytest.raises(NumericsError, match="fp8='rowwise' is no recipe"):
        Numerics(fp8="rowwise")
