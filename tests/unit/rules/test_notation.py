"""Index notation: what text says about shapes, and what is refused."""

import pytest

from shardwright.rules.notation import NotationError, elementwise, parse, reshape


def test_a_linear_layer_with_leading_dimensions_and_an_optional_bias():
    text = "... k, n k, +n -> ... n"
    with_bias = parse(text, [(5, 6, 7), (9, 7), (9,)], [(5, 6, 9)], work="... k n")
    assert with_bias.operands == ((("b1",), ("b0",), ("k",)), (("n",), ("k",)), (("n",),))
    assert with_bias.results == ((("b1",), ("b0",), ("n",)),)
    assert with_bias.sizes == {"b1": 5, "b0": 6, "k": 7, "n": 9}
    assert with_bias.additive == {2}
    assert with_bias.work == ("b0", "b1", "k", "n")
    without = parse(text, [(7,), (9, 7)], [(9,)])
    assert without.operands == ((("k",),), (("n",), ("k",)))
    assert without.additive == frozenset()


def test_dimensions_of_size_one_have_no_index():
    one = parse("m k, k n -> m n", [(4, 1), (1, 6)], [(4, 6)])
    assert one.operands == ((("m",), ()), ((), ("n",)))
    assert one.sizes == {"m": 4, "n": 6}


def test_leading_dimensions_are_aligned_at_their_right_end_where_one_broadcasts():
    one = parse("... m k, ... k n -> ... m n", [(5, 1, 6, 7), (3, 7, 2)], [(5, 3, 6, 2)])
    assert one.operands[0][:2] == (("b1",), ())
    assert one.operands[1][0] == ("b0",)
    assert one.results[0][:2] == (("b1",), ("b0",))


def test_whole_indices_and_products_of_indices():
    text = "b (g c) y!, (g o) c k!, +(g o) -> b (g o) q!"
    one = parse(text, [(2, 6, 8), (9, 2, 3), (9,)], [(2, 9, 6)], sizes={"g": 3})
    assert one.operands[0] == (("b",), ("g", "c"), ("y",))
    assert one.operands[1][0] == ("g", "o")
    assert one.sizes == {"b": 2, "g": 3, "c": 2, "o": 3, "y": 8, "k": 3, "q": 6}
    assert one.whole == {"y", "k", "q"}


REFUSED = {
    "m k, k n": ([(2, 3), (3, 4)], [(2, 4)], "has no '->'"),
    "m k, k n -> m n": ([(2, 3), (5, 4)], [(2, 4)], "'k' is 3 and 5"),
    "m k -> m": ([(2, 3, 4)], [(2,)], "'m k' has not the dimensions of (2, 3, 4)"),
    "(a b) -> a b": ([(6,)], [(2, 3)], "sizes of '(a b)' are not known, of 6"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_text_and_shapes_that_do_not_fit_are_refused(text):
    operands, results, message = REFUSED[text]
    with pytest.raises(NotationError) as refused:
        parse(text, operands, results)
    assert message in str(refused.value)
    assert repr(text) in str(refused.value)


def test_elementwise_broadcasts_as_numpy_does():
    one = elementwise([(5, 1, 7), (6, 1), ()], (5, 6, 7), whole=[2])
    assert one.operands == ((("d0",), (), ("d2",)), (("d1",), ()), ())
    assert one.results == ((("d0",), ("d1",), ("d2",)),)
    assert one.whole == {"d2"}


@pytest.mark.parametrize(
    "before, after, left, right",
    [
        ((4, 6), (24,), "0 1", "01"),
        ((24,), (4, 6), "01", "0 1"),
        ((4, 6), (8, 3), "0 12", "01 2"),
        ((5, 4, 6), (5, 8, 3), "0 1 23", "0 12 3"),
        ((2, 3, 5), (6, 5), "0 1 2", "01 2"),
        ((1, 6), (6, 1), "- 0", "0 -"),
        ((6,), (1, 2, 3, 1), "01", "- 0 1 -"),
        ((), (1,), "", "-"),
    ],
)
def test_a_reshape_matches_sizes_piece_by_piece(before, after, left, right):
    one = reshape(before, after)
    assert _text(one.operands[0]) == left
    assert _text(one.results[0]) == right
    assert one.whole == frozenset()
    for shape, dims in ((before, one.operands[0]), (after, one.results[0])):
        for size, names in zip(shape, dims, strict=True):
            product = 1
            for name in names:
                product *= one.sizes[name]
            assert product == size


@pytest.mark.parametrize(
    "before, after, left, right, whole",
    [
        ((4, 6), (6, 4), "0 1", "2 3", "0123"),  # 24 = 4·6 = 6·4: no common refinement
        ((5, 4, 6), (5, 6, 4), "0 1 2", "0 3 4", "1234"),  # but the five is
        ((6, 4, 7), (4, 6, 7), "0 1 4", "2 3 4", "0123"),
    ],
)
def test_what_cannot_be_matched_stays_whole_and_the_rest_is_not_affected(
    before, after, left, right, whole
):
    one = reshape(before, after)
    assert _text(one.operands[0]) == left
    assert _text(one.results[0]) == right
    assert one.whole == {f"x{number}" for number in whole}


def _text(dims):
    return " ".join("".join(name[1:] for name in names) or "-" for names in dims)
