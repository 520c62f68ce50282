"""Averages of files and of a run's snapshots: order, shares, algebra, the sweep by held-out loss, and
what is refused.
"""

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.atomic import write_whole
from graft_nodes.storage.safetensors import safetensors_bytes
from graft_nodes.training.averages import merge, snapshots, sources
from graft_nodes.training.averages.held_out_loss import held_out_loss
from graft_nodes.training.run.call import run
from graft_nodes.training.run.loop import train
from graft_nodes.training.state import begin
from graft_nodes.training.store.store import Store
from graft_nodes.training.trainable.install import make_lora, read_lora
from graft_nodes.training.trainable.settings import AdapterSettings


def lora(seed, rank=2):
    draw = torch.Generator().manual_seed(seed)
    return {
        "diffusion_model.a.lora_up.weight": torch.randn(6, rank, generator=draw),
        "diffusion_model.a.lora_down.weight": torch.randn(rank, 5, generator=draw),
        "diffusion_model.a.alpha": torch.tensor(float(rank)),
    }


def product(state):
    return state["diffusion_model.a.lora_up.weight"].double() @ state["diffusion_model.a.lora_down.weight"].double()


@pytest.fixture
def write(tmp_path):
    def make(name, tensors, **metadata):
        path = str(tmp_path / name)
        write_whole(path, safetensors_bytes(tensors, metadata))
        return name, path

    return make


def test_files_are_ordered_by_recorded_step_never_by_date(write):
    named = [write(f"{step}.safetensors", lora(step), ss_steps=str(step), graft_run="r") for step in (300, 20, 100)]
    for age, (_, path) in enumerate(named):
        os.utime(path, (1e9 + age, 1e9 + age))
    found = sources.sources_of_files(named)
    assert [file.step for file in found.files] == [20, 100, 300]
    got = merge.merge_files(found, "width", 0.1, "")
    assert "fitted" in got.lines[0] and any("factors" in line for line in got.lines)
    exponent = snapshots.Profile(1, 0.1).gamma + 1
    shares = [(20 / 300) ** exponent, (100 / 300) ** exponent - (20 / 300) ** exponent, 1 - (100 / 300) ** exponent]
    key = "diffusion_model.a.lora_up.weight"
    expected = sum(share * lora(step)[key].double() for share, step in zip(shares, (20, 100, 300), strict=True))
    torch.testing.assert_close(got.lora[key].double(), expected, rtol=0, atol=1e-6)
    assert got.curves[0].values[19] == pytest.approx(shares[0]) and len(got.curves[0].values) == 300


def test_a_file_of_a_run_that_had_not_begun(write):
    named = [write(f"{step}.safetensors", lora(step), ss_steps=str(step), graft_run="r") for step in (0, 100)]
    (alone,) = merge.merge_files(sources.sources_of_files(named[:1]), "uniform", 0.1, "").curves
    (both,) = merge.merge_files(sources.sources_of_files(named), "uniform", 0.1, "").curves
    assert list(alone.values) == [1.0] and list(both.values) == [0.5, 0.5]


def test_without_steps_the_order_given_holds_and_profiles_that_need_steps_are_refused(write):
    found = sources.sources_of_files(
        [write("b.safetensors", lora(1)), write("a.safetensors", lora(2, rank=3), ss_steps="4")]
    )
    assert [file.name for file in found.files] == [
        "b.safetensors",
        "a.safetensors",
    ] and "no step is recorded in b" in found.notes[0]
    for profile in ("width", "exponential"):
        with pytest.raises(ValueError, match=r"none is recorded in b\.safetensors"):
            merge.merge_files(found, profile, 0.1, "")
    got = merge.merge_files(found, "weights", 0.1, "1 3")
    torch.testing.assert_close(
        product(got.lora), 0.25 * product(lora(1)) + 0.75 * product(lora(2, 3)), rtol=0, atol=1e-5
    )
    assert any("products are averaged exactly" in line and "rank 5" in line for line in got.lines)
    small = merge.merge_files(found, "uniform", 0.1, "", rank=1)
    assert any("cut to rank 1 by SVD" in line for line in small.lines)
    with pytest.raises(ValueError, match="different runs"):
        merge.merge_files(found, "uniform", 0.1, "", algebra="factors")


def test_embeddings_in_files_are_left_out_by_name(write):
    """OneTrainer's bundles are not layers: the files are averaged without them, and the report says so."""
    bundle = {"bundle_emb.<hat>.clip_l": torch.ones(2, 4)}
    named = [write("a.safetensors", lora(1) | bundle, ss_steps="1"), write("b.safetensors", lora(2), ss_steps="2")]
    found = sources.sources_of_files(named)
    first, second = found.report().splitlines()[-2:]
    assert first == "1. a.safetensors: step 1; its embeddings are left out (<hat>)" and "embeddings" not in second
    average = merge.merge_files(found, "weights", 0.1, "1 3")
    torch.testing.assert_close(
        product(average.lora), 0.25 * product(lora(1)) + 0.75 * product(lora(2)), rtol=0, atol=1e-5
    )
    assert not [key for key in average.lora if "bundle" in key]


def test_files_that_cannot_be_averaged_are_all_listed(write, tmp_path):
    checkpoint = write("c.safetensors", {"model.diffusion_model.a.weight": torch.zeros(2, 2)})
    strange = write("s.safetensors", {"what": torch.zeros(2)})
    (tmp_path / "t.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError) as error:
        sources.sources_of_files(
            [write("l.safetensors", lora(1)), checkpoint, strange, ("t.safetensors", str(tmp_path / "t.safetensors"))]
        )
    for part in ("s.safetensors: neither", "t.safetensors", "c.safetensors: a checkpoint", "l.safetensors: a lora"):
        assert part in str(error.value)
    one = write("l.safetensors", lora(1))
    with pytest.raises(ValueError, match="named twice"):
        sources.sources_of_files([one, one])


def test_checkpoints_are_averaged_whole_and_put_on_as_a_difference(write):
    draw = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.randn(3, 2, generator=draw), "a.bias": torch.randn(3, generator=draw)}
    files = [
        {f"model.diffusion_model.{k}": torch.randn(w.shape, generator=draw) for k, w in base.items()} for _ in range(2)
    ]
    found = sources.sources_of_files(
        [write(f"{n}.safetensors", {**file, "first_stage_model.x": torch.zeros(1)}) for n, file in enumerate(files)]
    )
    got = merge.merge_files(found, "uniform", 0.1, "", base=lambda: base)
    assert got.lora.keys() == {"diffusion_model.a.diff", "diffusion_model.a.diff_b"}
    mean = (files[0]["model.diffusion_model.a.weight"] + files[1]["model.diffusion_model.a.weight"]) / 2
    torch.testing.assert_close(base["a.weight"] + got.lora["diffusion_model.a.diff"], mean)
    with pytest.raises(ValueError, match=r"b\.weight: in the model, missing in 0"):
        merge.merge_files(found, "uniform", 0.1, "", base=lambda: {**base, "b.weight": torch.zeros(1)})


def test_a_diffusion_model_without_a_prefix_is_averaged_if_it_is_the_models_own(write):
    draw = torch.Generator().manual_seed(0)
    base = {"a.weight": torch.randn(3, 2, generator=draw), "b": torch.randn(3, generator=draw)}
    bare = {name: torch.randn(w.shape, generator=draw) for name, w in base.items()}
    other = {f"model.diffusion_model.{name}": torch.randn(w.shape, generator=draw) for name, w in base.items()}
    found = sources.sources_of_files([write("bare.safetensors", bare), write("other.safetensors", other)])
    got = merge.merge_files(found, "uniform", 0.1, "", base=lambda: base)
    mean = (bare["a.weight"] + other["model.diffusion_model.a.weight"]) / 2
    torch.testing.assert_close(base["a.weight"] + got.lora["diffusion_model.a.diff"], mean)
    strange = sources.sources_of_files([write("vae.safetensors", {"decoder.conv_in.weight": torch.zeros(2, 2)})])
    with pytest.raises(ValueError, match=r"no weight of vae\.safetensors is one of the model's"):
        merge.merge_files(strange, "uniform", 0.1, "", base=lambda: base)


def test_checkpoints_stay_as_small_as_their_files_until_they_are_averaged(write):
    weights = {"model.diffusion_model.a.weight": torch.randn(3, 2), "conditioner.b.weight": torch.zeros(4, 4)}
    tensors = {name: t.half() for name, t in weights.items()}
    found = sources.sources_of_files(
        [write("1.safetensors", tensors), write("2.safetensors", {name: 3 * t for name, t in tensors.items()})]
    )
    loaded = found.files[0].load()
    assert loaded.keys() == {"a.weight"} and loaded["a.weight"].dtype == torch.float16
    assert found.files[0].load()["a.weight"].data_ptr() == loaded["a.weight"].data_ptr()  # the file's own memory
    base = {"a.weight": torch.zeros(3, 2)}
    got = merge.merge_files(found, "uniform", 0.1, "", base=lambda: base).lora["diffusion_model.a.diff"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, 2 * tensors["model.diffusion_model.a.weight"].float(), rtol=1e-3, atol=0)
    assert found.files[1].text_encoder == 1


def trained(lab, tmp_path, adapter=None, steps=20, every=2, held_out=(8, 9)):
    denoiser, dataset = lab.Flow(), lab.pictures(held_out=list(held_out))
    plain = lab.state(denoiser, dataset, adapter)
    start = begin(denoiser.module, replace(plain.start, ema=EMASettings("ramp", snapshots=every)), plain.settings)
    store = Store(tmp_path, "run")
    return run(start, steps, lambda: nullcontext(denoiser), dataset, store).state, denoiser, dataset, store


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_sweep_scores_what_the_model_would_be(lab, tmp_path, kind):
    adapter = AdapterSettings(kind, targets="all", rank=2)
    state, denoiser, dataset, store = trained(lab, tmp_path, adapter)
    before = {name: t.clone() for name, t in denoiser.module.state_dict().items()}
    found = sources.sources_of_state(state, store.folder)
    widths = merge.widths_to_try(found, "")
    assert len(widths) == 10 and widths == sorted(widths)
    swept = merge.sweep(
        found, widths, lambda one: held_out_loss(state, denoiser, dataset, one), state.lora_model(ema=True)
    )
    assert swept.best == min(swept.rows, key=lambda row: row[1])[0] and len(swept.lines()) == 13
    last = train(state, denoiser, dataset, 1, callbacks=None)  # and training goes on as if nothing had been scored
    assert last.step == 21 and all(torch.equal(before[name], t) for name, t in denoiser.module.state_dict().items())
    # By hand: weights put into the module, the loss taken with none of the adapters attached.
    got = merge.merge_files(found, "width", widths[4], "").lora
    assert held_out_loss(state, denoiser, dataset, got) == pytest.approx(swept.rows[4][1], rel=1e-6)
    with torch.no_grad():
        for name, tensor in got.items():
            path = name.removeprefix("diffusion_model.")
            if kind == "full":
                own = (
                    path.removesuffix(".diff_b") + ".bias"
                    if path.endswith(".diff_b")
                    else path.removesuffix(".diff") + ".weight"
                )
                denoiser.module.get_parameter(own).add_(tensor)
            elif path.endswith(".lora_up.weight"):
                weight = denoiser.module.get_parameter(path.removesuffix(".lora_up.weight") + ".weight")
                change = tensor.flatten(1) @ got[name.replace("lora_up", "lora_down")].flatten(1)
                weight.add_((change * float(got[name.replace("lora_up.weight", "alpha")]) / 2).reshape(weight.shape))
    nothing = {name: tensor if name.endswith(".alpha") else torch.zeros_like(tensor) for name, tensor in got.items()}
    assert held_out_loss(state, denoiser, dataset, nothing) == pytest.approx(swept.rows[4][1], rel=1e-4)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_trained_tensors_come_back_from_a_lora(lab, kind):
    denoiser, dataset = lab.Flow(), lab.pictures()
    state = train(lab.state(denoiser, dataset, AdapterSettings(kind, targets="all", rank=2)), denoiser, dataset, 2)
    base = state.base()
    back = read_lora(make_lora(state.trained, state.start.adapter, base), state.start.adapter, base)
    assert back.keys() == state.trained.keys()
    for name in back:
        torch.testing.assert_close(back[name], state.trained[name], rtol=0, atol=1e-6)


def test_a_sweep_needs_held_out_pictures_and_possible_widths(lab, tmp_path):
    state, denoiser, dataset, store = trained(lab, tmp_path, steps=6, held_out=())
    found = sources.sources_of_state(state, store.folder)
    with pytest.raises(ValueError, match="needs held-out images"):
        merge.sweep(found, [0.07], lambda one: held_out_loss(state, denoiser, dataset, one), state.lora_model())
    with pytest.raises(ValueError, match="they express widths"):
        merge.sweep(found, [0.07, 0.001], lambda one: 1.0, state.lora_model())
    with pytest.raises(ValueError, match="expected widths"):
        merge.widths_to_try(found, "wide")
    assert merge.widths_to_try(found, "0.05, 0.08") == [0.05, 0.08]


def test_files_without_a_share_neither_count_nor_refuse(write):
    last = {**lora(5, rank=8), **{key.replace(".a.", ".b."): tensor for key, tensor in lora(6, rank=8).items()}}
    wide, broken = lora(1, rank=40), {key: tensor * float("nan") for key, tensor in lora(2).items()}
    named = [
        write("fewer-layers.safetensors", wide, ss_steps="10"),
        write("broken.safetensors", broken, ss_steps="20"),
        write("last.safetensors", last, ss_steps="300"),
    ]
    found = sources.sources_of_files(named)
    for path in (path for _, path in named[:2]):
        os.unlink(path)
    for algebra in ("auto", "factors", "products"):
        for profile, weights in (("latest", ""), ("weights", "0 0 3")):
            got = merge.merge_files(found, profile, 0.1, weights, algebra)
            assert got.lora["diffusion_model.a.lora_up.weight"].shape[1] == 8 and "rank 8" in got.lines[1]
            assert len(got.lora) == 6 and float(got.lora["diffusion_model.a.alpha"]) == 8
            torch.testing.assert_close(product(got.lora), product(last), rtol=0, atol=1e-5)
            assert got.lines[2:] == (
                "fewer-layers.safetensors: 0.0000",
                "broken.safetensors: 0.0000",
                "last.safetensors: 1.0000",
            )
    whole = merge.merge_files(found, "latest", 0.1, "").lora
    assert all(torch.equal(whole[key], tensor) for key, tensor in last.items())
    small = merge.merge_files(found, "latest", 0.1, "", rank=3).lora
    assert small["diffusion_model.a.lora_up.weight"].shape[1] == 3


def test_checkpoints_without_a_share_are_not_looked_at(write):
    base = {"a.weight": torch.zeros(3, 2)}
    one = {"model.diffusion_model.a.weight": torch.ones(3, 2), "conditioner.b.weight": torch.zeros(4, 4)}
    other = {"model.diffusion_model.c.weight": torch.full((7, 2), float("nan")), "conditioner.b.weight": torch.zeros(4)}
    found = sources.sources_of_files([write("other.safetensors", other), write("one.safetensors", one)])
    got = merge.merge_files(found, "weights", 0.1, "0 1", base=lambda: base)
    torch.testing.assert_close(got.lora["diffusion_model.a.diff"], torch.ones(3, 2))
    assert got.text_encoder == 1
    with pytest.raises(ValueError, match=r"no weight of other\.safetensors"):
        merge.merge_files(found, "uniform", 0.1, "", base=lambda: base)


def test_a_width_that_was_kept_needs_its_own_snapshot_alone(lab, tmp_path):
    state, _, _, store = trained(lab, tmp_path, steps=8)
    found = sources.sources_of_state(state, store.folder)
    expected = found.files[-1].load()
    for file in found.files[:-1]:
        os.unlink(file.path)
    got = merge.merge_files(found, "width", 0.10, "").lora
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert merge.sweep(found, [0.10], lambda one: 1.0, expected).best == 0.10
    with pytest.raises(ValueError, match="is missing"):
        merge.merge_files(found, "width", 0.09, "")
    with pytest.raises(ValueError, match="keep their rank"):
        merge.merge_files(found, "width", 0.10, "", rank=1)


def test_snapshots_of_a_state_of_a_run_and_as_files_are_the_same(lab, tmp_path):
    state, _, _, store = trained(lab, tmp_path)
    found = sources.sources_of_state(state, store.folder)
    assert sources.sources_of_run(store.folder) == found
    files = sources.sources_of_files([(file.name, file.path) for file in reversed(found.files)])
    assert files.powers and files.profiles == found.profiles
    got = merge.merge_files(found, "width", 0.08, "")
    assert "least squares" in got.lines[0] and len(got.curves) == 2 and "factors are averaged" in got.lines[1]
    for wrong, says in ((("exponential", 0.1, ""), "use width"), (("width", 0.001, ""), "they express widths")):
        with pytest.raises(ValueError, match=says):
            merge.merge_files(found, *wrong)
    with pytest.raises(ValueError, match="by their factors"):
        merge.merge_files(found, "width", 0.08, "", algebra="products")


def test_different_runs_and_missing_snapshots_are_refused(lab, tmp_path):
    state, *_, store = trained(lab, tmp_path, steps=6)
    other, *_ = trained(lab, tmp_path, AdapterSettings(targets="all", rank=3), steps=6)
    with pytest.raises(ValueError, match="different runs") as error:
        sources.sources_of_run(store.folder)
    assert f"run/{state.key[:12]}" in str(error.value) and f"run/{other.key[:12]}" in str(error.value)
    assert sources.sources_of_run(store.folder, state.key[:12]) == sources.sources_of_state(state, store.folder)
    with pytest.raises(ValueError, match="none that begins with 'x'"):
        sources.sources_of_run(store.folder, "x")
    both = [sources.sources_of_state(one, store.folder).files[0] for one in (state, other)]
    with pytest.raises(ValueError, match="different runs"):
        sources.sources_of_files([(file.name, file.path) for file in both])
    os.unlink(both[0].path)
    with pytest.raises(ValueError, match="1 of 6 snapshots are missing"):
        sources.sources_of_state(state, store.folder)
    with pytest.raises(ValueError, match="no snapshots"):
        sources.sources_of_run(tmp_path / "nothing")
