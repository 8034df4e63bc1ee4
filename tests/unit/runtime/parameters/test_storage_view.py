import pytest
import torch

from shardwright.runtime.parameters.storage_view import StorageView

REAL = torch.arange(24, dtype=torch.float64).reshape(4, 3, 2)


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x,
        lambda x: x[1:, ::2].transpose(0, 1),
        lambda x: torch.view_as_complex(x)[1:].t(),
        lambda x: torch.view_as_complex(x)[1:].conj(),
        lambda x: torch.view_as_complex(x).conj()[2].imag,
        lambda x: torch.view_as_real(torch.view_as_complex(x)[:, 1]),
        lambda x: x.view(torch.int64)[3],
    ],
)
def test_a_view_is_taken_of_another_memory(take):
    other = torch.randn(REAL.shape, dtype=torch.float64)
    found = StorageView.of(take(REAL)).on(other)
    torch.testing.assert_close(found, take(other), rtol=0, atol=0)


def test_a_part_of_complex_memory_is_a_view_of_it():
    one, other = (torch.randn(5, 2, dtype=torch.complex128) for _ in range(2))
    found = StorageView.of(one[1:].imag).on(other)
    torch.testing.assert_close(found, other[1:].imag, rtol=0, atol=0)
    assert found.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
