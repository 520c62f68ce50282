"""The average as an object: order of steps, pairing by name, swapping in and out, switching, no look at values in a
step.
"""

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.ema.shadow import Shadow
from graft_nodes.ema.update import average_
from torch.utils._python_dispatch import TorchDispatchMode


def weights(seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=draw).to(dtype), "b": torch.randn(4, generator=draw).to(dtype)}


@pytest.mark.parametrize("where", ["same", "host"])
def test_an_average_beside_weights_is_a_copy_and_goes_on_at_its_step(where):
    average, live = weights(1), weights(2)
    kept = Shadow.from_average(average, 7, live, torch.device("cpu"), where)
    assert kept.offload is None and all(torch.equal(kept.tensors[name], average[name]) for name in average)
    kept.update_(live, EMASettings(decay=0.75), 8, 10)
    for name, start in weights(1).items():
        torch.testing.assert_close(kept.tensors[name], 0.75 * start + 0.25 * live[name])
        assert torch.equal(average[name], start)


def test_an_average_beside_weights_of_another_device_is_on_that_or_in_host_memory():
    """On a device that has shapes and no numbers."""
    device = torch.device("meta")
    live = {name: tensor.to(device) for name, tensor in weights().items()}
    beside = Shadow.from_average(weights(), 0, live, device, "same")
    assert beside.offload is None and {tensor.device for tensor in beside.tensors.values()} == {device}
    on_host = Shadow.from_average(weights(), 0, live, device, "host")
    assert on_host.offload is not None and {tensor.device.type for tensor in on_host.tensors.values()} == {"cpu"}
    on_host.close()


def test_steps_come_in_order_and_once():
    kept = Shadow.from_weights(weights())
    for step in (2, 0, -1):
        with pytest.raises(ValueError, match=f"can take step 1, not {step}"):
            kept.update_(weights(), EMASettings(), step, 10)
    assert kept.update_(weights(1), EMASettings(interval=2), 1, 10) is False
    assert kept.update_(weights(1), EMASettings(interval=2), 2, 10) is True
    with pytest.raises(ValueError, match="can take step 3, not 2"):
        kept.update_(weights(), EMASettings(), 2, 10)


def test_every_mismatch_is_listed_and_nothing_is_averaged():
    kept, before = weights(), weights()
    with pytest.raises(ValueError) as error:
        average_(kept, {"b": torch.zeros(5), "c": torch.zeros(1)}, 0.5)
    for part in ("(3)", "a: only in the average", "c: only in the weights", "b: average (4,), weights (5,)"):
        assert part in str(error.value)
    assert all(torch.equal(kept[name], before[name]) for name in kept)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        average_(weights(dtype=torch.bfloat16), weights(), 0.5)


def test_pairs_go_by_name_whatever_the_order():
    kept, live = weights(), weights(1)
    turned = {name: live[name] for name in reversed(live)}
    average_(kept, turned, 0.25)
    for name, start in weights().items():
        torch.testing.assert_close(kept[name], 0.25 * start + 0.75 * live[name])


def test_swapping_in_and_out_gives_the_same_tensors_and_bytes_back():
    live = weights(1)
    kept = Shadow.from_weights(weights(2))
    places = {name: t.data_ptr() for name, t in live.items()}
    with kept.swap_in(live):
        assert all(torch.equal(live[name], t) for name, t in weights(2).items())
        assert all(torch.equal(kept.tensors[name], t) for name, t in weights(1).items())
        with pytest.raises(RuntimeError, match="swapped in already"), kept.swap_in(live):
            pass
    assert all(torch.equal(live[name], t) for name, t in weights(1).items())
    assert all(torch.equal(kept.tensors[name], t) for name, t in weights(2).items())
    assert {name: t.data_ptr() for name, t in live.items()} == places
    with pytest.raises(KeyError), kept.swap_in(live):
        raise KeyError
    assert all(torch.equal(live[name], t) for name, t in weights(1).items())
    with kept.swap_in(live):  # an exception left it swapped out
        pass


@pytest.mark.parametrize("at", range(16))
def test_an_exchange_that_breaks_off_says_so_or_gives_every_byte_back(at):
    """Four tensors: two copies each on the way in, two on the way out."""

    class Break(TorchDispatchMode):
        copies = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                self.copies += 1
                if self.copies == at + 1:
                    raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    live = {f"{n}": torch.full((3,), float(n)) for n in range(4)}
    kept = Shadow.from_weights({f"{n}": torch.full((3,), -float(n)) for n in range(4)})
    with pytest.raises(KeyboardInterrupt), Break(), kept.swap_in(live):
        pass
    is_back = all((live[f"{n}"] == n).all() and (kept.tensors[f"{n}"] == -n).all() for n in range(4))
    assert kept.is_swapped or is_back
    assert kept.is_swapped or (at % 2 == 0 and at < 8)


def test_bf16_weights_wait_elsewhere_and_the_average_keeps_every_bit():
    live = weights(1, torch.bfloat16)
    kept = Shadow.from_weights(weights(2))
    places = {name: t.data_ptr() for name, t in live.items()}
    with kept.swap_in(live):
        assert all(torch.equal(live[name], t.to(torch.bfloat16)) for name, t in weights(2).items())
    with pytest.raises(KeyError), kept.swap_in(live):
        raise KeyError
    assert all(torch.equal(live[name], t) for name, t in weights(1, torch.bfloat16).items())
    assert all(torch.equal(kept.tensors[name], t) for name, t in weights(2).items())
    assert {name: t.data_ptr() for name, t in live.items()} == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_with_two_names_has_its_bytes_back(dtype):
    weight = torch.full((3,), 1.0, dtype=dtype)
    kept = Shadow({"a": torch.full((3,), 2.0), "b": torch.full((3,), 3.0)})
    with kept.swap_in({"a": weight, "b": weight}):
        assert (weight == 3).all()
    assert (weight == 1).all() and (kept.tensors["a"] == 2).all() and (kept.tensors["b"] == 3).all()


def test_swapping_makes_no_second_copy_of_everything():
    live = {f"{n}": torch.randn(1000) for n in range(50)}
    kept = Shadow.from_weights(live)
    alive, most = [], []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.clone.default:
                import weakref

                alive.append(weakref.ref(out))
                most.append(sum(one() is not None for one in alive))
            return out

    with Count(), kept.swap_in(live):
        pass
    assert len(most) == 100 and max(most) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_looks_at_no_value(dtype):
    """No `.item()` and no comparison of tensors: on a GPU each would wait for all work before it."""

    class Look(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, func)
            return func(*args, **(kwargs or {}))

    kept, live = Shadow.from_weights(weights()), weights(1, dtype)
    with Look() as look:
        kept.update_(live, EMASettings("ramp"), 1, 10)
    assert look.seen and torch.ops.aten._local_scalar_dense.default not in look.seen
    if dtype == torch.float32:
        assert [f.name() for f in look.seen if "lerp" in f.name()] == ["aten::_foreach_lerp_.Scalar"]


def test_switching_sets_the_weights_in_place():
    live, kept = weights(1), Shadow.from_weights(weights(2))
    places = {name: t.data_ptr() for name, t in live.items()}
    kept.switch_(live)
    assert all(torch.equal(live[name], t) for name, t in weights(2).items())
    assert {name: t.data_ptr() for name, t in live.items()} == places
    with pytest.raises(ValueError, match="only in the average"):
        kept.switch_({"a": live["a"]})


def test_resuming_at_any_step_is_the_same_bytes():
    path = [weights(seed) for seed in range(20)]
    for settings in (
        EMASettings("warmup"),
        EMASettings("ramp", interval=3),
        EMASettings("power"),
        EMASettings("target"),
    ):
        whole = Shadow.from_weights(path[0])
        for step in range(1, 20):
            whole.update_(path[step], settings, step, 19)
        for cut in range(20):
            part = Shadow.from_weights(path[0])
            for step in range(1, cut + 1):
                part.update_(path[step], settings, step, 19)
            again = Shadow(
                {name: t.clone() for name, t in part.tensors.items()}, part.step
            )  # what a stored state holds
            for step in range(cut + 1, 20):
                again.update_(path[step], settings, step, 19)
            assert all(torch.equal(whole.tensors[name], again.tensors[name]) for name in whole.tensors)
