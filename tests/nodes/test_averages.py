"""GraftSnapshots and EMAMerge on the open host: averages of a training, afterwards and by held-out loss,
and of files.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from graft_nodes.ema.decay import EMASettings, decay_over
from graft_nodes.ema.post_hoc import possible_widths
from graft_nodes.patches.lora_files.stack_rows import StackRow
from graft_nodes.storage.atomic import write_whole
from graft_nodes.storage.safetensors import safetensors_bytes
from graft_nodes.training.data.dataset import Dataset
from graft_nodes.training.lora_metadata import lora_metadata
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.settings import TrainingSettings
from graft_nodes.training.trainable.settings import AdapterSettings

CHINESE = Path(__file__).parents[2] / "locales" / "zh" / "nodeDefs.json"


@pytest.fixture(scope="module")
def demo(host):
    return host.call("GraftDemo")


@pytest.fixture(scope="module")
def pictures(demo):
    """Random latents with captions of the demo's text encoder."""
    from graft_nodes import host as wall

    draw = torch.Generator().manual_seed(0)
    captions = ["a red circle left", "a blue square right", ""]
    with torch.inference_mode():  # as nodes run
        conditionings = wall.encoding.encode_captions(demo[1], captions)
    latents = [torch.randn(3, 32, 32, generator=draw) * 0.5 for _ in range(6)]
    return Dataset.from_latents(latents, captions[:2] * 3, conditionings, held_out=[5])


@pytest.fixture(scope="module")
def state(host, demo, pictures):
    return begun(host, demo, pictures, "averages")


def begun(host, demo, pictures, run, steps=8, **ema):
    settings = EMASettings("ramp", **{"snapshots": 2, **ema})
    state = host.call(
        "GraftTrainStart",
        model=demo[0],
        dataset=pictures,
        settings=TrainingSettings(
            AdapterSettings(rank=2), OptimizerSettings(learning_rate=5e-3, total_steps=steps), ema=settings
        ),
        run=run,
    )[0]
    return host.call("TrainStep", state=state, steps=steps, validate_every=0)[0]


@pytest.mark.parametrize("total_steps", [0, 100])
def test_the_start_says_an_interval_without_steps_that_are_known(host, demo, pictures, total_steps):
    report = host.call(
        "GraftTrainStart",
        model=demo[0],
        dataset=pictures,
        settings=TrainingSettings(
            AdapterSettings(rank=2),
            OptimizerSettings(total_steps=total_steps),
            ema=EMASettings("constant", 0.99, interval=50),
        ),
        run="open",
    )[1]
    assert ("EMA: constant, updated every 50 steps\n" in report) == (not total_steps)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (EMASettings("constant", 0.99, interval=50), "every 50 steps: decay 0.99 a step becomes 0.605 an update\n"),
        (EMASettings("constant", 0.99), "constant, updated every step\n"),
        (EMASettings("target", target=0.1, interval=25), "decay 0.977237 a step becomes 0.562 an update\n"),
        (EMASettings("ramp", 0.99, interval=30), "decay 0.909091 a step becomes 0.0327 an update at step 90\n"),
    ],
)
def test_the_start_says_what_an_interval_makes_of_the_decay(host, demo, pictures, settings, says):
    report = host.call(
        "GraftTrainStart",
        model=demo[0],
        dataset=pictures,
        settings=TrainingSettings(AdapterSettings(rank=2), OptimizerSettings(total_steps=100), ema=settings),
        run="interval",
    )[1]
    assert says in report + "\n"


def test_the_interval_says_what_it_makes_of_everydream2s_decay():
    """EveryDream2's ema_decay_rate 0.99 is that of an update every 50 steps; Graft's decay is that of one step."""
    from graft_nodes.nodes.training_settings import GraftEMA

    graft, everydream2 = EMASettings("constant", 0.99, interval=50), EMASettings("constant", 0.9998, interval=50)
    of_update = f"{decay_over(graft, 50, 1000):.3f}"
    assert of_update == "0.605"
    assert f"{decay_over(everydream2, 50, 1000):.2f}" == "0.99"
    interval = next(one for one in GraftEMA.define_schema().inputs if one.id == "interval")
    page = (Path(__file__).parents[2] / "web" / "docs" / "GraftEMA.md").read_text(encoding="utf-8")
    line = page.partition("(`interval`, advanced)")[2].partition("\n- **")[0]
    chinese = json.loads(CHINESE.read_text(encoding="utf-8"))["GraftEMA"]["inputs"]["interval"]["tooltip"]
    for said in (interval.tooltip, line, chinese):
        assert {"EveryDream2", "0.99", "50", of_update, "0.9998"} <= set(re.findall(r"[A-Za-z0-9.]*[A-Za-z0-9]", said))


def product(lora, base):
    return lora[f"{base}.lora_up.weight"].double().flatten(1) @ lora[f"{base}.lora_down.weight"].double().flatten(1)


def test_latest_width_and_best_of_a_state(host, demo, state):
    shown = {}
    for profile, width in (("latest", 0.1), ("width", 0.07), ("width", 0.10), ("best", 0.1)):
        model, _, lora, picture, report = host.call(
            "EMAMerge", model=demo[0], state=state, profile=profile, width=width
        )
        assert model is not demo[0] and picture.shape[0] == 1 and picture.shape[3] == 3 and float(picture.std()) > 0
        shown[profile, width] = lora, report
    assert "EMA (ramp) at step 8; " in shown["latest", 0.1][1]
    assert shown["latest", 0.1][0].keys() == state.lora_model().keys() == shown["width", 0.07][0].keys()
    assert "least squares" in shown["width", 0.07][1]
    best = shown["best", 0.1][1]
    assert "held-out loss" in best and best.count("width 0.") >= 10 and "<- best" in best and "last weights" in best
    kept = host.call("GraftSnapshots", source="averages")[0]
    last = next(file for file in reversed(kept.files) if file.snapshot.width == 0.10).load()
    for name, tensor in shown["width", 0.10][0].items():
        torch.testing.assert_close(tensor, last[name])


def test_searched_shares_of_a_state(host, demo, pictures):
    """The node's search: progress to its end, both halves in the report, other shares with more tries, the same bytes
    again, and a stop.
    """
    more = Dataset.from_latents(
        [image.latent for image in (*pictures.images, *pictures.held_out)],
        [image.caption for image in (*pictures.images, *pictures.held_out)],
        pictures.conditionings,
        held_out=[2, 3, 4, 5],
    )
    state = begun(host, demo, more, "searched")
    given = {"model": demo[0], "state": state, "profile": "search", "weights": "0.06 0.09"}
    few, again, many, other = (
        host.call("EMAMerge", **given, search_tries=tries, search_seed=seed)
        for tries, seed in ((13, 0), (13, 0), (40, 0), (13, 7))
    )
    report = few[4]
    assert "searched 13 averages of 8 snapshots in 3 directions on 2 held-out images, seed 0; 2 other ones" in report
    assert report.count("width 0.0600: ") == report.count("width 0.0900: ") == 1 and "is taken" in report
    assert few[2].keys() == state.lora_model().keys() and report == again[4]
    assert all(torch.equal(few[2][name], tensor) for name, tensor in again[2].items())
    assert "searched 40 averages" in many[4] and "seed 7" in other[4]
    lines = [next(line for line in one[4].splitlines() if line.startswith("searched: ")) for one in (few, many, other)]
    assert len(set(lines)) == 3  # tries and seed count
    with pytest.raises(Exception, match="at least 2 held-out images"):
        host.call("EMAMerge", **{**given, "state": begun(host, demo, pictures, "averages")})


def test_a_stop_ends_a_search(host, demo, pictures, monkeypatch):
    import comfy.model_management as management

    wall, scored = host.module("host"), []

    def stop():
        scored.append(1)
        if len(scored) == 5:
            management.interrupt_current_processing(True)
            management.throw_exception_if_processing_interrupted()

    images = [*pictures.images, *pictures.held_out]
    more = Dataset.from_latents(
        [image.latent for image in images], [image.caption for image in images], pictures.conditionings, held_out=[4, 5]
    )
    state = begun(host, demo, more, "stopped")
    before = {name: tensor.cpu().clone() for name, tensor in demo[0].model.state_dict().items()}
    monkeypatch.setattr(wall.events, "raise_if_interrupted", stop)
    with pytest.raises(management.InterruptProcessingException):
        host.call("EMAMerge", model=demo[0], state=state, profile="search", weights="0.06 0.09")
    assert len(scored) == 5
    assert all(torch.equal(before[name], tensor.cpu()) for name, tensor in demo[0].model.state_dict().items())


def test_the_same_from_snapshots_by_run_and_by_file(host, demo, state):
    found, report = host.call("GraftSnapshots", source="averages\n")
    assert report.startswith("8 snapshots") and "width 0.05" in report and "step 8" in report
    direct = host.call("EMAMerge", model=demo[0], state=state, profile="width", width=0.08)[2]
    indirect = host.call("EMAMerge", model=demo[0], snapshots=found, profile="width", width=0.08)[2]
    assert all(torch.equal(direct[name], indirect[name]) for name in direct)


@pytest.mark.parametrize("slash", ["/", "\\"])
def test_a_branch_of_a_run_is_named_by_the_first_characters_of_its_key(host, state, slash):
    with pytest.raises(Exception, match="none that begins with 'gone'") as error:
        host.call("GraftSnapshots", source=f"averages{slash}gone")
    (key,) = re.findall(r"averages/(\w+): 8 snapshots", str(error.value))
    assert host.call("GraftSnapshots", source=f"averages{slash}{key[:6]}")[1].startswith("8 snapshots")


def test_an_impossible_width_says_the_range_and_touches_nothing(host, demo, state):
    found = host.call("GraftSnapshots", source="averages")[0]
    ((narrow, wide),) = possible_widths(found.profiles, 8)
    before = {name: tensor.cpu().clone() for name, tensor in demo[0].model.state_dict().items()}
    with pytest.raises(Exception, match=f"widths {narrow:.4f} to {wide:.4f}"):
        host.call("EMAMerge", model=demo[0], state=state, profile="width", width=0.002)
    assert all(torch.equal(before[name], tensor.cpu()) for name, tensor in demo[0].model.state_dict().items())


def test_switching_and_host_memory_train_and_are_stored(host, demo, pictures):
    plain = begun(host, demo, pictures, "plain", steps=4, snapshots=0)
    switched = begun(host, demo, pictures, "switched", steps=4, snapshots=0, switch_every=2)
    far = begun(host, demo, pictures, "far", steps=4, snapshots=0, device="host")
    assert all(torch.equal(switched.trained[name], switched.average[name]) for name in switched.trained)
    assert not all(torch.equal(plain.trained[name], switched.trained[name]) for name in plain.trained)
    assert all(torch.equal(plain.average[name], far.average[name]) for name in plain.average)


@pytest.fixture(scope="module")
def files(host, state):
    """Three saved LoRAs: two of the run that the state is of, one of another rank that no run is recorded in."""
    folder = os.path.join(host.output, "loras", "averages")
    os.makedirs(folder, exist_ok=True)
    names = []
    for number, step in enumerate((4, 9)):
        lora = {name: t + 0.01 * number if t.numel() > 1 else t for name, t in state.lora_model().items()}
        write_whole(
            os.path.join(folder, f"s{step}.safetensors"),
            safetensors_bytes(lora, {**lora_metadata(state), "ss_steps": str(step)}),
        )
        names.append(f"output/loras/averages/s{step}.safetensors")
    other = {
        name: torch.cat([t, t], 1) if "lora_up" in name else torch.cat([t, t], 0) if "lora_down" in name else t
        for name, t in state.lora_model().items()
    }
    write_whole(os.path.join(folder, "wide.safetensors"), safetensors_bytes(other, {}))
    return [*names, "output/loras/averages/wide.safetensors"]


def test_files_of_one_run_and_of_different_ranks(host, demo, files):
    same, report = host.call("GraftSnapshots", source="\n".join(reversed(files[:2])))
    assert report.splitlines()[2].endswith("s4.safetensors: step 4")
    lora, _, report = host.call("EMAMerge", model=demo[0], snapshots=same, profile="uniform")[2:]
    assert "factors are averaged" in report
    loaded = [file.load() for file in same.files]
    for name in lora:
        torch.testing.assert_close(lora[name], (loaded[0][name] + loaded[1][name]) / 2)
    stack = [(files[0], 1.0, 1.0), (files[2], 3.0, 1.0)]
    lora, _, report = host.call("EMAMerge", model=demo[0], lora_stack=stack, profile="weights")[2:]
    assert "products are averaged exactly" in report
    mixed = host.call("GraftSnapshots", source="\n".join((files[0], files[2])))[0]
    again, _, report = host.call("EMAMerge", model=demo[0], snapshots=mixed, profile="weights", weights="1, 3", rank=3)[
        2:
    ]
    assert "cut to rank 3" in report
    base = next(name for name in lora if name.endswith(".lora_up.weight")).removesuffix(".lora_up.weight")
    one, two = (file.load() for file in mixed.files)
    expected = (
        0.25 * product(one, base) * float(one[f"{base}.alpha"]) / 2
        + 0.75 * product(two, base) * float(two[f"{base}.alpha"]) / 4
    )
    assert float(lora[f"{base}.alpha"]) == lora[f"{base}.lora_up.weight"].shape[1] == 2 + 4
    torch.testing.assert_close(product(lora, base), expected, rtol=1e-4, atol=1e-7)
    assert again[f"{base}.lora_up.weight"].shape[1] == 3


def test_a_lora_stack_takes_loras_where_a_checkpoint_has_the_same_name(host, demo, state):
    one, two = (
        {name: t + shift if t.numel() > 1 else t for name, t in state.lora_model().items()} for shift in (0.0, 0.02)
    )
    whole = {f"model.{name}": t for name, t in weights_of(demo[0]).items()}
    for folder, name, tensors in (("loras", "same", one), ("loras", "another", two), ("checkpoints", "same", whole)):
        os.makedirs(os.path.join(host.models, folder), exist_ok=True)
        write_whole(
            os.path.join(host.models, folder, f"{name}.safetensors"), safetensors_bytes(tensors, {"ss_session_id": "1"})
        )
    stack = [("same.safetensors", 1.0, 1.0), ("another.safetensors", 1.0, 1.0)]
    lora = host.call("EMAMerge", model=demo[0], lora_stack=stack, profile="uniform", algebra="factors")[2]
    for name, t in lora.items():
        torch.testing.assert_close(t, (one[name] + two[name]) / 2)
    assert ", checkpoint" in host.call("GraftSnapshots", source="same.safetensors")[1]


def test_pefts_settings_beside_a_file_count(host, demo, state):
    """Alpha stands in adapter_config.json alone: the average of two equal folders is what a stack makes of one."""
    trained = state.lora_model()
    bases = [name.removesuffix(".lora_up.weight") for name in trained if name.endswith(".lora_up.weight")]
    factors = {
        f"{base}.lora_{new}.weight": trained[f"{base}.lora_{old}.weight"] + 0.02
        for base in bases
        for new, old in (("A", "down"), ("B", "up"))
    }
    paths = [os.path.join(host.models, "loras", folder) for folder in ("first", "second")]
    for path in paths:
        os.makedirs(path, exist_ok=True)
        write_whole(os.path.join(path, "adapter_model.safetensors"), safetensors_bytes(factors, {}))
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}
        write_whole(os.path.join(path, "adapter_config.json"), [json.dumps(settings).encode()])
    stack = [(f"{folder}/adapter_model.safetensors", 1.0, 1.0) for folder in ("first", "second")]
    lora = host.call("EMAMerge", model=demo[0], lora_stack=stack, profile="uniform")[2]
    for base in bases:
        rank = lora[f"{base}.lora_up.weight"].shape[1]
        scale = float(lora[f"{base}.alpha"]) / rank
        up, down = (factors[f"{base}.lora_{side}.weight"].double().flatten(1) for side in "BA")
        torch.testing.assert_close(scale * product(lora, base), 4.0 * up @ down, rtol=1e-4, atol=1e-6)
    source = "\n".join(name for name, *_ in stack)
    before = host.node("GraftSnapshots").fingerprint_inputs(source=source)
    os.utime(os.path.join(paths[0], "adapter_config.json"), ns=(1, 1))
    assert host.node("GraftSnapshots").fingerprint_inputs(source=source) != before


def test_what_an_average_of_files_cannot_follow_is_refused(host, demo, files):
    for more in ({"blocks": "OUT=0"}, {"schedule": "0.2-0.8"}):
        stack = [StackRow(files[0], 1.0, 1.0, **more), StackRow(files[1], 1.0, 1.0)]
        with pytest.raises(ValueError, match=r"clear blocks and schedule of \S*s4\.safetensors, or use Merge LoRAs"):
            host.call("EMAMerge", model=demo[0], lora_stack=stack, profile="uniform")


def test_text_encoders_of_checkpoints_are_said_to_be_left_out(host, demo):
    text = {f"cond_stage_model.{name}": t.clone() for name, t in demo[1].cond_stage_model.state_dict().items()}
    os.makedirs(os.path.join(host.models, "checkpoints"), exist_ok=True)
    for name in "ab":
        whole = {**{f"model.{name}": t for name, t in weights_of(demo[0]).items()}, **text}
        write_whole(os.path.join(host.models, "checkpoints", f"{name}.safetensors"), safetensors_bytes(whole, {}))
    found = host.call("GraftSnapshots", source="a.safetensors\nb.safetensors")[0]
    said = f"skips {2 * len(text)} text encoder tensors in these files"
    assert said in host.call("EMAMerge", model=demo[0], clip=demo[1], snapshots=found, profile="uniform")[4]
    assert said not in host.call("EMAMerge", model=demo[0], snapshots=found, profile="uniform")[4]


def weights_of(model):
    """The weights of a MODEL's diffusion model by ComfyUI's names, `diffusion_model.…`."""
    return {
        name: t.cpu().clone() for name, t in model.model.state_dict().items() if name.startswith("diffusion_model.")
    }


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "none is connected"),
        ({"state": 1, "snapshots": 1}, "training state and snapshots are connected"),
        ({"state": 1, "profile": "uniform"}, "averaging profile uniform needs files"),
        ({"snapshots": 1, "profile": "best"}, "connect the run's training state"),
        ({"snapshots": 1, "profile": "uniform", "weights": "1 2"}, "leave them empty"),
        (
            {"snapshots": 1, "profile": "uniform", "algebra": "factors", "rank": 2},
            "maximum rank only works with averaging method products",
        ),
        ({"state": 1, "profile": "latest", "rank": 2}, "keep their rank and their factors: set maximum rank to 0"),
        ({"state": 1, "profile": "latest", "algebra": "factors"}, "set maximum rank to 0 and averaging method to auto"),
        (
            {"state": 1, "profile": "latest", "algebra": "products"},
            "set maximum rank to 0 and averaging method to auto",
        ),
        ({"state": 1, "profile": "best", "rank": 2}, "set maximum rank to 0 and averaging method to auto"),
        ({"snapshots": 1, "profile": "width", "width": 0.08, "rank": 2}, "which keep their rank"),
        ({"snapshots": 1, "profile": "weights", "weights": "1"}, "weights or widths .* 1 numbers for 8 files"),
        ({"snapshots": 1, "profile": "exponential"}, "use width"),
        ({"snapshots": 1, "profile": "search"}, "averaging profile search needs a run's held-out images"),
        ({"state": 1, "profile": "search", "rank": 2}, "set maximum rank to 0 and averaging method to auto"),
    ],
)
def test_inputs_that_do_not_go_together(host, demo, state, inputs, says):
    found = host.call("GraftSnapshots", source="averages")[0]
    connected = {name: {"state": state, "snapshots": found}.get(name, value) for name, value in inputs.items()}
    with pytest.raises(Exception, match=says):
        host.call("EMAMerge", model=demo[0], **connected)


def test_a_state_without_an_average_says_what_to_do(host, demo, state):
    with pytest.raises(Exception, match="this state has no average: connect EMA Settings to Start Training and train"):
        host.call("EMAMerge", model=demo[0], state=dataclasses.replace(state, average={}))


def test_sources_that_are_not_there(host, state):
    for source, says in (
        ("", "run or files is empty"),
        ("nowhere.safetensors", "no LoRA file"),
        ("../../x", "is outside the loras folder"),
        ("a\nb", "(?s)'a'.*'b'"),
    ):
        with pytest.raises(Exception, match=says):
            host.call("GraftSnapshots", source=source)
