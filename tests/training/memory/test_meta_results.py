"""Results on the meta device that are remembered are those that PyTorch works out."""

import pytest
import torch
from graft_nodes.training.memory import meta_results

aten = torch.ops.aten
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(meta_results, "remembered", {})


def _place(tensor):
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def _x(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


CASES = [
    (aten.add.Tensor, (_x(3, 4), _x(4))),
    (aten.add.Tensor, (_x(4, 3).t(), _x(3, 4, dtype=torch.bfloat16))),
    (aten.mm.default, (_x(3, 4), _x(5, 4).t())),
    (aten.mul.Tensor, (_x(2, 3), 2.0)),
    (aten.sum.dim_IntList, (_x(2, 3), [1], True)),
    (aten._to_copy.default, (_x(2, 3),)),
    (aten.native_layer_norm.default, (_x(2, 3, 4), [4], _x(4), _x(4), 1e-5)),
    (
        aten.native_group_norm_backward.default,
        (_x(1, 4, 2, 2), _x(1, 4, 2, 2), _x(1, 2), _x(1, 2), _x(4), 1, 4, 4, 2, [True, False, False]),
    ),
    (aten.convolution.default, (_x(1, 3, 5, 5), _x(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
]


@pytest.mark.parametrize(("func", "args"), CASES, ids=[str(func) for func, _ in CASES])
def test_what_is_remembered_is_what_runs_and_memory_of_its_own(func, args):
    given = {"dtype": torch.bfloat16} if func is aten._to_copy.default else {}
    ran = func(*args, **given)
    first, again = (meta_results.remember_result(func, args, given) for _ in range(2))
    assert any(made is not None for made in meta_results.remembered.values())
    single = isinstance(ran, torch.Tensor)
    for results in zip(*([value] if single else value for value in (ran, first, again)), strict=True):
        assert len({str(_place(one)) for one in results}) == 1
        places = [one.untyped_storage()._cdata for one in results if one is not None]
        assert len(set(places)) == len(places)


def test_types_of_numbers_are_told_apart():
    whole = _x(2, dtype=torch.int64)
    assert meta_results.remember_result(aten.mul.Tensor, (whole, 2), {}).dtype == torch.int64
    assert meta_results.remember_result(aten.mul.Tensor, (whole, 2.0), {}).dtype == torch.float32
    assert meta_results.remember_result(aten.mul.Tensor, (whole, 2), {}).dtype == torch.int64


def test_what_is_written_in_place_is_given_back():
    for _ in range(2):
        x = _x(2, 3)
        assert meta_results.remember_result(aten.mul_.Tensor, (x, 2.0), {}) is x


@pytest.mark.parametrize(
    ("func", "more"), [(aten.view.default, ([6],)), (aten._unsafe_view.default, ([6],)), (aten.detach.default, ())]
)
def test_a_view_shares_memory_each_time(func, more):
    for _ in range(2):
        x = _x(2, 3)
        assert meta_results.remember_result(func, (x, *more), {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_a_change_of_shape_in_place_happens_each_time():
    for _ in range(2):
        x = _x(2, 3)
        meta_results.remember_result(aten.t_.default, (x,), {})
        assert x.shape == (3, 2)


def test_tensors_with_values_are_computed():
    for value in (1.0, 2.0):
        x = torch.full((2,), value)
        assert torch.equal(meta_results.remember_result(aten.add.Tensor, (x, 1), {}), x + 1)
    assert not meta_results.remembered
