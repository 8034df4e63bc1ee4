import pytest
import torch

from shardwright.runtime.parameters.unshard import _buffer


@pytest.mark.parametrize("transposed", [False, True])
def test_a_bucket_has_its_gradients_one_after_the_other_however_they_lie(transposed):
    """Compiled pieces give gradients of matrices transposed."""
    matrix = torch.arange(6.0).view(2, 3)
    given = [matrix.t().contiguous().t() if transposed else matrix, torch.arange(6.0, 9.0)]
    assert given[0].is_contiguous() is not transposed
    assert _buffer(given, copied=False).tolist() == list(range(9))


@pytest.mark.parametrize("copied", [False, True])
def test_a_gradient_alone_is_its_own_bucket_unless_others_have_it(copied):
    (gradient,) = given = [torch.arange(3.0)]
    assert (_buffer(given, copied).data_ptr() == gradient.data_ptr()) is not copied
