"""The contract of the adapter registry: every kind says everything, its names are its own, and its forms agree."""

import dataclasses
from pathlib import Path

import pytest
import torch
from graft_nodes.patches.adapters import registry
from graft_nodes.patches.adapters.kind import AdapterKind
from graft_nodes.patches.adapters.rank_mask import RankMask
from graft_nodes.patches.adapters.trainable import FullWeights, InitSource, TrainableAdapter, initial_tensors
from graft_nodes.patches.lora_files.parse import Target, group_by_layer, patches_of, read
from graft_nodes.patches.lora_files.save import to_key_format
from graft_nodes.patches.patching.bypass import Bypass, put_bypass
from graft_nodes.patches.patching.fuse import Patch, apply_patches
from torch import nn

from ...file_as_module import file_as_module

KINDS = tuple(registry.KINDS)
ADAPTERS = [kind for kind in registry.trainable_kinds() if not kind.full_weights]
LINEAR, CONV = (lambda: nn.Linear(12, 8)), (lambda: nn.Conv2d(6, 8, 3, padding=1))


@dataclasses.dataclass(frozen=True)
class Size:
    """A module's size, as training gives it."""

    shape: tuple
    rank: int = 2
    alpha: float = 1.5
    rank_mask: RankMask | None = None
    factor: int = 0


class NoDropout:
    """Nothing is left out."""

    is_enabled = drops_modules = False


def named(entries):
    return [pytest.param(entry, id=entry.name) for entry in entries]


def column_norms(weight):
    return weight.transpose(0, 1).flatten(1).norm(dim=1)


def trained_tensors(adapter, size, weight, moved):
    """A module's trained tensors as they start, or after a random walk."""
    generator = torch.Generator().manual_seed(3)
    source = InitSource(lambda: generator, lambda: column_norms(weight))
    tensors = initial_tensors(adapter.tensors(size), lambda record: source)
    if not moved:
        return tensors
    return {name: t + 0.2 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def hooked(adapter, module, size, tensors):
    """A module's output function with the adapter's hooks on it."""
    base = module.weight.detach()
    norms = lambda now: column_norms(base + adapter.change(now, size))  # noqa: E731
    before, after = adapter.hooks(size, tensors, NoDropout(), norms)
    if before is not None:
        module.register_forward_pre_hook(before)
    if after is not None:
        module.register_forward_hook(after)
    return module


def layers_of(adapter, tensors, size):
    """The layers that a saved file of the trained tensors holds."""
    alpha = size.alpha if adapter.takes_alpha else 0.0
    state = {f"lora_unet_a.{suffix}": tensor for suffix, tensor in tensors.items()}
    state["lora_unet_a.alpha"] = torch.tensor(alpha)
    shapes = {("model", "a.weight"): size.shape}
    parsed = read(
        to_key_format(state, "kohya", torch.float32), {"lora_unet_a": Target("model", "a.weight")}, shapes, "file"
    )
    return [layer for _, layer, _ in patches_of(parsed, "model", shapes)]


def module_of(build):
    torch.manual_seed(0)
    return build().requires_grad_(False)


@pytest.mark.parametrize("kind", named(KINDS))
def test_a_kind_says_everything(kind):
    assert kind.name and kind.layers and kind.formats
    for layer in kind.layers:
        assert dataclasses.is_dataclass(layer) and layer.is_additive in (True, False)
        methods = {"tensors", "mismatch"}
        methods |= (
            {"delta", "factors", "contradiction", "weight_shape"} if layer.is_additive else {"apply", "activation_form"}
        )
        assert not [name for name in methods if not callable(getattr(layer, name, None))], layer
    for file_format in kind.formats:
        assert file_format.name and file_format.roles and file_format.place in ("alone", "around", "beside")
        assert all(role.saved_suffix.startswith(".") for role in file_format.roles)
    for trainable in kind.trainable:
        assert trainable.name and trainable.help and trainable.network_module
        assert isinstance(trainable, FullWeights if trainable.full_weights else TrainableAdapter)


def test_the_network_module_is_the_one_that_knows_the_kind():
    """kohya's own module trains plain LoRA; every other kind is one of lycoris."""
    modules = {kind.name: kind.network_module for kind in registry.trainable_kinds()}
    assert modules.pop("lora") == "networks.lora" and set(modules.values()) == {"lycoris.kohya"}


@pytest.mark.parametrize("adapter", named(ADAPTERS))
def test_a_trainable_kind_says_everything(adapter):
    suffixes = [record.suffix for record in adapter.tensors(Size((8, 12)))]
    assert suffixes and len(suffixes) == len(set(suffixes))
    for name in ("hooks", "norm", "tensors"):
        assert getattr(type(adapter), name) is not getattr(TrainableAdapter, name), name
    assert adapter.scale_tensor in suffixes or (not adapter.scale_tensor and not adapter.takes_alpha)
    assert not adapter.up_factor or adapter.up_factor in suffixes
    read_names = registry.tensor_names()
    assert all(read_names.layer_and_role(f"a.{suffix}", {})[1] in read_names.roles for suffix in suffixes)


def test_names_are_unique():
    roles = [role for kind in KINDS for file_format in kind.formats for role in file_format.roles]
    suffixes = [suffix for role in roles for suffix in role.read_suffixes]
    suffixes += [suffix for kind in KINDS for file_format in kind.formats for suffix in file_format.unsupported]
    trainable = [form.name for kind in KINDS for form in kind.trainable]
    classes = [layer.__name__ for kind in KINDS for layer in kind.layers]
    for names in ([role.name for role in roles], suffixes, trainable, classes, [kind.name for kind in KINDS]):
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


@pytest.mark.parametrize("build", [LINEAR, CONV], ids=["linear", "conv"])
@pytest.mark.parametrize("adapter", named(ADAPTERS))
def test_a_start_changes_nothing(adapter, build):
    module = module_of(build)
    size, x = (
        Size(tuple(module.weight.shape)),
        torch.randn(2, module.weight.shape[1], *(5, 5)[: module.weight.ndim - 2]),
    )
    plain = module(x)
    hooked(adapter, module, size, trained_tensors(adapter, size, module.weight, moved=False))
    torch.testing.assert_close(module(x), plain, rtol=0, atol=2e-6)


@pytest.mark.parametrize("build", [LINEAR, CONV], ids=["linear", "conv"])
@pytest.mark.parametrize("adapter", named(ADAPTERS))
def test_training_merging_and_activations_agree(adapter, build):
    """Saved and read again, the layer makes of the weight, and at the activations, what the training computed."""
    module = module_of(build)
    size, x = (
        Size(tuple(module.weight.shape)),
        torch.randn(2, module.weight.shape[1], *(5, 5)[: module.weight.ndim - 2]),
    )
    tensors = trained_tensors(adapter, size, module.weight, moved=True)
    plain = module(x)
    patches = [Patch(layer, 1.0) for layer in layers_of(adapter, tensors, size)]
    merged = module_of(build)
    merged.weight.data = apply_patches(merged.weight.data, patches)
    wrapped = put_bypass(module, Bypass(module, patches))
    at_activations = module(x)
    wrapped.leave()
    expected = hooked(adapter, module, size, tensors)(x)
    assert not torch.allclose(expected, plain, atol=1e-2)
    torch.testing.assert_close(merged(x), expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(at_activations, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("adapter", named(ADAPTERS))
def test_rescaling_rescales_the_norm(adapter):
    size = Size((8, 12))
    tensors = trained_tensors(adapter, size, torch.randn(8, 12), moved=True)
    scale = adapter.scale(tensors, size.rank, size.alpha)
    before = adapter.norm(tensors, scale)
    adapter.rescale_(tensors, torch.tensor(0.25))
    torch.testing.assert_close(adapter.norm(tensors, scale), 0.25 * before)


@pytest.mark.parametrize("adapter", named(ADAPTERS))
def test_a_packed_layer_is_the_same_layer(adapter):
    size = Size((8, 12))
    for layer in layers_of(adapter, trained_tensors(adapter, size, torch.randn(8, 12), moved=True), size):
        again = registry.unpack_layer(registry.pack_layer(layer))
        assert type(again) is type(layer) and registry.plain_fields(again) == registry.plain_fields(layer)
        assert all(torch.equal(*pair) for pair in zip(again.tensors(), layer.tensors(), strict=True))


def random(*shape):
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYERS = {  # one of every class, for a weight (8, 12)
    "LoRA": lambda make: make(random(8, 3), random(3, 12), 1.5),
    "Diff": lambda make: make(random(8, 12)),
    "Set": lambda make: make(random(8, 12)),
    "LoHa": lambda make: make(random(8, 3), random(3, 12), random(8, 2), random(2, 12)),
    "LoKr": lambda make: make(random(2, 3), random(4, 4)),
    "InRowOrder": lambda make: make(LAYERS["DoRA"](registry.layer_classes()["DoRA"]), torch.arange(8).roll(3)),
    "DoRA": lambda make: make(LAYERS["LoRA"](registry.layer_classes()["LoRA"]), 1.0 + random(1, 12)),
    "OFT": lambda make: make(random(2, 4, 4)),
    "InputOFT": lambda make: make(torch.linalg.matrix_exp(random(3, 4, 4) - random(3, 4, 4).mT)[None]),
    "GLoRA": lambda make: make(random(12, 2), random(2, 12), random(8, 2), random(2, 12)),
    "TLoRA": lambda make: make(
        random(3, 12), random(8, 3), random(1, 3), random(3, 12) + 0.1, random(8, 3) + 0.1, random(1, 3) + 0.1, 1.5
    ),
    "IA3": lambda make: make(random(12), True),
}


def test_every_layer_class_is_tried():
    assert LAYERS.keys() == registry.layer_classes().keys()


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_the_same_at_the_activations(name, strength):
    module, layer = module_of(LINEAR), LAYERS[name](registry.layer_classes()[name])
    assert layer.mismatch((8, 12)) is None and layer.mismatch((9, 13)) is not None
    x, patches = torch.randn(2, 12), [Patch(layer, strength)]
    merged = module_of(LINEAR)
    merged.weight.data = apply_patches(merged.weight.data, patches)
    wrapped = put_bypass(module, Bypass(module, patches))
    torch.testing.assert_close(module(x), merged(x), rtol=0, atol=5e-5)
    wrapped.leave()


@pytest.fixture
def made_up():
    """The made-up kind of `made_up_kind.py`, as if its file lay beside the others."""
    with file_as_module(Path(__file__).with_name("made_up_kind.py"), registry.__package__) as module:
        yield module.KIND


def test_a_made_up_kind_is_on_the_list_for_a_block(made_up):
    names = registry.trainable_names()
    assert group_by_layer({"a.column_gains": torch.ones(3)})[1] == ["a.column_gains"]
    with registry.KINDS.registered(made_up):
        assert registry.trainable_names() == (*names, "gains")
        test_training_merging_and_activations_agree(registry.trainable_kind("gains"), CONV)
        test_a_start_changes_nothing(registry.trainable_kind("gains"), LINEAR)
        assert "gains is not available here" in group_by_layer({"a.column_gains": torch.ones(3)})[2][0]
    assert registry.trainable_names() == names


def test_names_that_are_taken_are_refused(made_up):
    with registry.KINDS.registered(made_up):
        with pytest.raises(ValueError, match="adapter kind gains is already registered"):
            registry.KINDS.register(made_up)
        with pytest.raises(ValueError, match="other: already registered: trainable kind gains, layer class"):
            registry.KINDS.register(dataclasses.replace(made_up, name="other"))
    (lora, *_) = KINDS
    with pytest.raises(ValueError, match=r"tensor up, .*suffix \.lora_up\.weight"):
        registry.KINDS.register(AdapterKind("other", (), lora.formats))
