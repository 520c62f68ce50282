"""Products of factors in float64, and how a side is divided."""

import pytest
import torch
from graft_nodes.patches.adapters import factor_products
from graft_nodes.patches.adapters.factor_products import factorize_side, fits, product, product_error, product_shape


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


@pytest.mark.parametrize("shapes", [((4, 3), (3, 5)), ((4, 3, 1, 1), (3, 5, 2, 2))])
def test_two_factors(shapes):
    a, b = random(*shapes[0]), random(*shapes[1])
    found = product(a, b, None, "cpu")
    assert found.dtype == torch.float32 and found.shape == product_shape(a, b, None) == (4, *shapes[1][1:])
    assert torch.allclose(found.double(), torch.tensordot(a.reshape(4, 3), b, 1), atol=1e-6)
    assert product_error("x", a, b, None) is None


def test_a_core_between_two_factors():
    a, b, core = random(2, 4), random(3, 5), random(2, 3, 1, 2)
    found = product(a, b, core, "cpu")
    expected = torch.tensordot(torch.tensordot(a.T, core, 1), b, ([1], [0])).movedim(-1, 1)
    assert found.shape == product_shape(a, b, core) == (4, 5, 1, 2)
    assert torch.allclose(found.double(), expected, atol=1e-6) and product_error("x", a, b, core) is None


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((4,), (3, 5), None), "x: expected matrices, got 4 and 3x5"),
        (((4, 3), (5,), None), "x: expected matrices, got 4x3 and 5"),
        (((), (3, 5), None), "x: expected matrices, got scalar and 3x5"),
        (((4, 3), (2, 5), None), "x: ranks differ: 4x3, 2x5"),
        (((2, 4), (3, 5), (2, 3)), "x: expected matrices, got 2x4 and 3x5"),
        (((2, 4, 1), (3, 5), (2, 3, 1)), "x: expected matrices, got 2x4x1 and 3x5"),
        (((2, 4), (3, 5, 1), (2, 3, 1)), "x: expected matrices, got 2x4 and 3x5x1"),
        (((2, 4), (3, 5), (3, 2, 1)), "x: ranks differ: 2x4, 3x5, core 3x2x1"),
    ],
)
def test_why_factors_do_not_fit(shapes, says):
    a, b, core = (None if shape is None else torch.ones(shape) for shape in shapes)
    assert product_error("x", a, b, core) == says


def test_a_change_fits_a_weight_of_as_many_numbers_a_row():
    assert fits((4, 6), (4, 3, 2)) and fits((4, 3, 2), (4, 6)) and not fits((4, 6), (4, 5))
    assert not fits((6, 4), (4, 6)) and not fits((4,), (4,))


@pytest.mark.parametrize("side", range(1, 61))
@pytest.mark.parametrize("factor", [-1, 1, 2, 4, 8, 16])
def test_a_side_is_divided_as_lycoris_does(side, factor):
    """LyCORIS' `factorization`: the factor where it divides the side, else the pair nearest to a square up to it."""
    pairs = [(m, side // m) for m in range(1, side + 1) if side % m == 0 and m <= side // m]
    if factor > 0 and side % factor == 0:
        expected = tuple(sorted((factor, side // factor)))
    else:
        expected = max(pair for pair in pairs if factor < 0 or pair[0] <= factor)
    assert factorize_side(side, factor) == expected


def test_shapes_in_messages():
    one = torch.ones(2, 3)
    assert factor_products.shape_text(one) == "2x3" and factor_products.sides_text(()) == "scalar"
