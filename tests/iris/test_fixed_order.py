"""Products on the host: the same bits of a row whatever its place and however many rows there are."""

from __future__ import annotations

from iris import fixed_order
import numpy as np
import pytest

SIZES = [(1, 1), (3, 16), (16, 100), (64, 64), (64, 256), (100, 300), (256, 33), (576, 384), (300, 1025), (17, 2048)]


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_a_row_has_the_same_bits_in_any_place(N, K):
    random = np.random.default_rng()
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((300, K), (K, N)))
    whole = fixed_order.product(a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(whole - exact).max() <= 1e-6 * K * np.abs(a).max() * np.abs(b).max()
    for M in (1, 2, 3, 16, 17, 64, 100, 128, 299):
        first = int(random.integers(0, 300 - M + 1))
        others = np.full((300, K), np.nan, np.float32)  # what is in other rows is nobody's affair
        others[first : first + M] = a[first : first + M]
        for actual in (fixed_order.product(a[first : first + M], b), fixed_order.product(others, b)[first : first + M]):
            assert actual.tobytes() == whole[first : first + M].tobytes()


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_a_column_has_the_same_bits_among_any_others(N, K):
    random = np.random.default_rng()
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((32, K), (K, N)))
    whole = fixed_order.product(a, b)
    for width in {1, min(N, 16), min(N, 64)}:
        assert fixed_order.product(a, b[:, :width]).tobytes() == np.ascontiguousarray(whole[:, :width]).tobytes()
    for x in (a, np.asfortranarray(a)):  # nor does it matter which is which, or how they lie in memory
        for y in (b, np.asfortranarray(b)):
            assert fixed_order.product(y.T, x.T).T.tolist() == fixed_order.product(x, y).tolist() == whole.tolist()
