"""Which settings make a training fit, and in which order."""

from dataclasses import replace

from graft_nodes.training.recipes.fit import GB, ORDER
from graft_nodes.training.run.memory_plan import PARTS, MemoryPlan
from graft_nodes.training.run.memory_savings import SAVINGS, choose_savings, report, save_more, savings_of
from graft_nodes.training.trainable.settings import AdapterSettings
from torch import nn


def _plan(state):
    """A made-up model: 10 GB of weights, 8 of activations an image, 4 of optimizer, 2 of average."""
    optimizer, ema = state.settings.optimizer, state.start.ema
    weights = 10
    if state.start.adapter.quantized_base:
        weights = 9.95  # of a model with few linear layers
    if optimizer.offload == "layers":
        weights = 1
    activations = 8 * optimizer.batch_size * (0.25 if optimizer.checkpointing else 1)
    moments = 0 if optimizer.offload == "optimizer" or optimizer.optimizer == "adafactor" else 4
    average = 2 if ema is not None and ema.device == "same" else 0
    sizes = (weights, 0, 0, moments, activations, average)
    return MemoryPlan({part: int(size * GB) for part, size in zip(PARTS, sizes, strict=True)})


def _state(lab, **optimizer):
    denoiser, dataset = lab.Flow(), lab.pictures()
    return lab.state(denoiser, dataset, AdapterSettings(targets="all", rank=2), **{"batch_size": 2, **optimizer})


def _words(state, memory):
    steps = choose_savings(state, _plan, memory * GB)
    return [(step.saving.words.split(",")[0], step.plan.peak / GB) for step in steps]


def test_the_cheapest_come_first_and_no_more_than_needed(lab):
    state = _state(lab)  # 32 GB
    assert _words(state, 40) == []
    assert _words(state, 24) == [("gradient checkpointing on", 20.0)]
    assert _words(state, 21) == [("gradient checkpointing on", 20.0), ("batch size 1", 18.0)]
    assert [words for words, _ in _words(state, 14)][2:] == ["store average on host", "offload to CPU memory optimizer"]


def test_savings_that_leave_the_result_as_it_is_come_one_after_another(lab):
    def words(on_host):
        state, taken = _state(lab), []
        key = state.settings.digest
        while (found := save_more(state, on_host)) is not None:
            taken.append(found[0])
            state = found[1]
            assert state.settings.digest == key and state.start == _state(lab).start
        return taken

    offloads = ["offload to CPU memory optimizer", "offload to CPU memory layers"]
    assert words(on_host=False) == ["gradient checkpointing on", *offloads]
    assert words(on_host=True) == ["gradient checkpointing on"]


def test_the_order_is_that_of_training_recipe():
    assert len(SAVINGS) == len(ORDER) - 1  # a smaller rank is another training
    for name, saving in zip(ORDER, SAVINGS, strict=False):
        assert saving.words.startswith(name.partition(":")[0])


def test_what_is_on_already_or_saves_nothing_is_left_out(lab):
    state = _state(lab, checkpointing=True, batch_size=1, offload="optimizer")
    assert [words for words, _ in _words(state, 4)] == ["store average on host", "offload to CPU memory layers"]


def test_offload_is_proposed_once_as_it_is_one_setting(lab):
    state = _state(lab)
    assert "offload to CPU memory optimizer" in [words for words, _ in _words(state, 14)]
    steps = choose_savings(state, _plan, 4 * GB)
    saved = steps[-1].state
    assert [step.saving.words.split(",")[0] for step in steps] == [
        "gradient checkpointing on",
        "batch size 1",
        "store average on host",
        "optimizer adafactor with scale_parameter = false",
        "offload to CPU memory layers",
    ]
    assert saved.settings.optimizer.offload == "layers"
    assert steps[-1].plan == _plan(saved)


def _linear_plan(state):
    """The made-up model when it has linear layers alone."""
    plan = _plan(state)
    base_weights = state.start.adapter.base_weights
    plan.parts["weights"] = int(plan.parts["weights"] * {"int8": 0.5, "nf4": 0.3}.get(base_weights, 1))
    return plan


def test_int8_comes_before_layers_where_it_is_enough(lab):
    steps = choose_savings(_state(lab), _linear_plan, 9 * GB)
    saved = steps[-1].state
    assert steps[-1].saving.words == "base weights int8" and saved.start.adapter.base_weights == "int8"
    assert steps[-1].plan.peak <= 0.9 * 9 * GB


def test_nf4_takes_the_place_of_int8_where_that_is_not_enough(lab):
    steps = choose_savings(_state(lab), _linear_plan, 6 * GB)
    assert steps[-1].saving.words == "base weights nf4" and steps[-1].plan.peak <= 0.9 * 6 * GB
    assert "base weights int8" not in [step.saving.words for step in steps]


def test_layers_take_the_place_of_nf4_where_that_is_not_enough_and_they_are(lab):
    steps = choose_savings(_state(lab), _linear_plan, 4 * GB)
    saved = steps[-1].state
    assert steps[-1].saving.words == "offload to CPU memory layers" and not saved.start.adapter.quantized_base
    assert steps[-1].plan == _linear_plan(saved)


def test_layers_in_nf4_where_either_is_not_enough(lab):
    saved = choose_savings(_state(lab), _linear_plan, int(2.6 * GB))[-1]
    assert saved.state.start.adapter.base_weights == "nf4" and saved.state.settings.optimizer.offload == "layers"
    assert saved.plan.peak <= 0.9 * 2.6 * GB


def test_how_many_blocks_wait_is_said_and_what_a_step_takes_then(lab):
    def planned(state):
        blocks = (GB,) * 12 if state.settings.optimizer.offload == "layers" else ()
        return replace(_plan(state), blocks=blocks)

    text = report(_state(lab, batch_size=1), planned, 8 * GB)
    assert "offload to CPU memory layers: 3.00 GB" in text  # of 7.2 that may be used
    assert text.endswith("of its 12 blocks 8 wait in CPU memory then, and it takes 7.00 GB")
    assert "blocks" not in report(_state(lab, batch_size=1), planned, 40 * GB)


def test_nothing_is_proposed_that_the_settings_exclude(lab):
    denoiser, dataset = lab.Flow(), lab.pictures()
    nf4 = lab.state(denoiser, dataset, AdapterSettings(targets="all", rank=2, base_weights="nf4"))
    assert "base weights" not in report(nf4, _linear_plan, GB)
    full = lab.state(denoiser, dataset, AdapterSettings("full"))
    assert "base weights" not in report(full, _linear_plan, GB)
    assert "fused backward pass" not in report(nf4, _linear_plan, GB)


def _full_plan(state):
    """The made-up model with trained weights and gradients of 5 GB each, which layers in host memory leave there."""
    plan, optimizer = _plan(state), state.settings.optimizer
    assert optimizer.fused_backward or optimizer.offload != "layers"
    plan.parts["trained"] = GB if optimizer.offload == "layers" else 5 * GB
    plan.parts["gradients"] = 0 if optimizer.fused_backward else 5 * GB
    return plan


def test_layers_are_proposed_for_full_weights_with_what_they_need(lab):
    for clip_norm in (1.0, 0.0):
        state = lab.state(lab.Flow(), lab.pictures(), AdapterSettings("full"), batch_size=2, clip_norm=clip_norm)
        steps = choose_savings(state, _full_plan, 8 * GB)
        words = [step.saving.words for step in steps]
        assert "fused backward pass on, with maximum gradient norm 0" in words
        assert words[-1] == "offload to CPU memory layers" and steps[-1].plan.peak <= 0.9 * 8 * GB
        assert "batch size 1, with more gradient accumulation" not in words  # which excludes the fused backward pass
        same = save_more(state.with_optimizer(checkpointing=True, offload="optimizer"), on_host=False)
        assert (same is not None and same[1].settings.optimizer.fused_backward) == (clip_norm == 0)
    accumulating = state.with_optimizer(accumulation=2)
    assert "fused" not in report(accumulating, _full_plan, GB) and "layers" not in report(accumulating, _full_plan, GB)


def test_a_model_without_linear_layers_is_proposed_no_quantized_base(lab):
    convolutions = nn.Sequential(nn.Conv2d(4, 4, 3))
    left_out = [saving.words for saving in SAVINGS if saving not in savings_of(convolutions)]
    assert left_out == ["base weights int8", "base weights nf4"]
    assert savings_of(nn.Linear(64, 64)) == SAVINGS
    assert "base weights" not in report(_state(lab), _linear_plan, 9 * GB, savings_of(convolutions))


def test_no_state_is_planned_twice(lab):
    planned = []

    def plan(state):
        planned.append((state.settings.optimizer, state.start.ema, state.start.adapter.base_weights))
        return _linear_plan(state)

    report(_state(lab), plan, 4 * GB)
    assert len(planned) == len(set(planned))


def test_weights_in_bf16_are_proposed_once_and_leave_all_else(lab):
    saving = SAVINGS[ORDER.index("training precision")]
    state = _state(lab, precision="float32")
    expected = replace(state.settings.optimizer, precision="full-bf16")
    assert saving.apply(state).settings.optimizer == expected
    assert saving.apply(_state(lab, precision="full-bf16")) is None


def test_what_a_saving_has_changed_it_does_not_propose_again(lab):
    full = lab.state(lab.Flow(), lab.pictures(), AdapterSettings("full"), batch_size=2)
    for saving in SAVINGS:
        saved = saving.apply(full if saving.words.startswith("fused") else _state(lab))
        assert saved is not None and saving.apply(saved) is None, saving.words


def test_the_step_stays_the_same_with_a_batch_of_1(lab):
    saving = next(saving for saving in SAVINGS if saving.words.startswith("batch size"))
    optimizer = saving.apply(_state(lab, accumulation=3)).settings.optimizer
    assert (optimizer.batch_size, optimizer.accumulation) == (1, 6)


def test_the_report_says_parts_savings_and_what_they_cost(lab):
    state = replace(_state(lab), run="cat")
    assert report(state, _plan).startswith(
        "run cat: a step is planned to take 32.00 GB (weights 10.00 GB, trained 0.0 MB"
    )
    assert "it fits into 40.00 GB" in report(state, _plan, 40 * GB)
    text = report(state, _plan, 24 * GB).splitlines()
    assert text[1:] == [
        "it does not fit into 24.00 GB, of which 90% may be used; what saves memory:",
        "- gradient checkpointing on: 20.00 GB; slower, as each block runs twice; the same result",
        "with these it fits",
    ]
    assert report(state, _plan, GB).endswith("or load the model in fp8")
