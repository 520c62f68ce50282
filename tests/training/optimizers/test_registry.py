"""The contract of every optimizer's record: complete, documented, and its state comes back bit for bit."""

import importlib
import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from graft_nodes.training.optimizers import options, stepper
from graft_nodes.training.optimizers.build import missing_package
from graft_nodes.training.optimizers.checks import remarks
from graft_nodes.training.optimizers.kinds import adamw
from graft_nodes.training.optimizers.record import OptimizerRecord
from graft_nodes.training.optimizers.registry import OPTIMIZERS
from graft_nodes.training.optimizers.settings import OptimizerSettings

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
SHAPES = {"a.lora_up.weight": (8, 4), "b.weight": (4, 8), "c.bias": (8,), "d.conv": (4, 2, 3, 3)}

# What saved LoRAs have in ss_optimizer; a new optimizer adds a line, no line ever changes.
FULL_NAMES = {
    "adamw": "torch.optim.adamw.AdamW",
    "adamw8bit": "bitsandbytes.optim.adamw.AdamW8bit",
    "adafactor": "torch.optim._adafactor.Adafactor",
    "lion": "lion_pytorch.lion_pytorch.Lion",
    "prodigy": "prodigyopt.prodigy.Prodigy",
    "schedulefree": "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "muon": "torch.optim._muon.Muon",
    "adacoor": "graft_nodes.training.adacoor.AdaCoor",
    "sgd": "torch.optim.sgd.SGD",
    "adopt": "graft_nodes.training.optimizers.kinds.adopt.ADOPT",
    "came": "graft_nodes.training.optimizers.kinds.came.CAME",
    "automagic": "graft_nodes.training.optimizers.kinds.automagic.Automagic",
    "prodigyplus": "graft_nodes.training.optimizers.kinds.prodigyplus.ProdigyPlus",
}

every_record = pytest.mark.parametrize("record", list(OPTIMIZERS), ids=lambda record: record.name)


def _settings(record, **changes):
    if missing_package(record.name):
        pytest.skip(missing_package(record.name)[0])
    rate = 1.0 if record.joint_step else 1e-2
    return OptimizerSettings(optimizer=record.name, **{"learning_rate": rate, "clip_norm": 0.0, **changes})


def _weights():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _take(moving, steps, first=0):
    """Steps with gradients that depend on the step alone."""
    for step in range(first, first + steps):
        moving.prepare(moving.settings.learning_rate, step)
        for number, tensor in enumerate(moving.trained.values()):
            generator = torch.Generator().manual_seed(100 * step + number)
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        moving.norm()
        moving.step_()


def _same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[key], right[key]) and left[key].dtype == right[key].dtype for key in left
    )


@every_record
def test_its_fields_say_what_they_should(record):
    assert record.name in OPTIMIZERS and OPTIMIZERS.get(record.name) is record
    assert record.full_name == FULL_NAMES[record.name]
    assert callable(record.build) and inspect.getdoc(inspect.getmodule(record.build))
    assert record.parts and all(record.part_of(tensor) in record.parts for tensor in _weights().values())
    assert record.fixed_rate is None or record.fixed_rate > 0
    assert record.diverges_from > 0 and isinstance(record.element_wise, bool)
    assert not (record.joint_step and record.element_wise), "what needs all tensors cannot move by rows"
    for name, reader in record.options.items():
        assert reader.expected, f"{name} needs words for what it takes"
        with pytest.raises((ValueError, KeyError)):
            reader.read("nonsense")


@every_record
def test_its_options_default_to_none(record):
    assert options.parse(record.name, "") == {} and record.option_defaults.keys() <= record.options.keys()
    with pytest.raises(ValueError, match=f"{record.name} has no 'nothing'"):
        options.parse(record.name, "nothing = 1")


@every_record
def test_its_class_is_the_one_in_the_metadata(record):
    settings = _settings(record)
    moving = stepper.OptimizerStepper(settings, _weights(), {}, CPU, 0)
    names = {type(optimizer).__name__ for optimizer in moving.optimizers}
    assert record.full_name.rpartition(".")[2] in names
    if not record.full_name.startswith("graft_nodes."):
        module = importlib.import_module(record.full_name.rpartition(".")[0])
        assert hasattr(module, record.full_name.rpartition(".")[2])


def _first_cell(row):
    return [name.strip() for name in row.split("|")[1].split(",")]


@every_record
def test_users_find_it(record):
    """The help page has its name and its options, and the package extra has its package."""
    page = (ROOT / "web/docs/GraftOptimizer.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|") and record.name in _first_cell(line)]
    assert rows, f"web/docs/GraftOptimizer.md has no row for {record.name}"
    assert all(name in "".join(rows) for name in record.options)
    if record.package is not None:
        assert f'"{record.package.name}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@every_record
def test_its_remarks_are_sentences(record):
    for rate in (1e-6, 1.0, 10.0):
        assert all(isinstance(remark, str) and remark for remark in remarks(_settings(record, learning_rate=rate)))


@every_record
@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
def test_its_state_comes_back_bit_for_bit(monkeypatch, record, pieces):
    settings = _settings(record)
    if pieces:
        monkeypatch.setattr(stepper, "PIECE", 1)
        settings = replace(settings, offload="optimizer")
    first = stepper.OptimizerStepper(settings, _weights(), {}, CPU, 0)
    assert len(first.optimizers) == (len(SHAPES) if pieces and not record.joint_step else len(record.parts))
    _take(first, 3)
    saved, weights = first.state(), first.copy_sampling_weights()
    again = stepper.OptimizerStepper(settings, weights, saved, CPU, 0)
    assert _same(again.state(), saved) and _same(again.copy_sampling_weights(), weights)
    _take(first, 2, first=3)
    _take(again, 2, first=3)
    assert _same(again.state(), first.state()) and _same(again.copy_sampling_weights(), first.copy_sampling_weights())
    assert all(not torch.equal(tensor, first.copy_sampling_weights()[name]) for name, tensor in _weights().items())


@every_record
def test_a_joint_step_is_declared(record):
    """Without it, each tensor alone steps as all of them together."""
    together = stepper.OptimizerStepper(_settings(record), _weights(), {}, CPU, 0)
    _take(together, 3)
    if record.joint_step:
        with pytest.raises(ValueError, match=f"{record.name} takes its step size from all gradients together"):
            _settings(record, fused_backward=True)
        return
    alone = stepper.OptimizerStepper(_settings(record, fused_backward=True), _weights(), {}, CPU, 0)
    _take(alone, 3)
    assert _same(together.copy_sampling_weights(), alone.copy_sampling_weights())


@every_record
def test_element_wise_ones_step_rows_apart(record):
    if not record.element_wise:
        return
    settings, whole = _settings(record), {"a": torch.randn(6, 4, generator=torch.Generator().manual_seed(2))}
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    moved = []
    for rows in (slice(0, 6), slice(0, 2), slice(2, 6)):
        moving = stepper.OptimizerStepper(settings, {"a": whole["a"][rows]}, {}, CPU, 0)
        for step in range(3):
            moving.prepare(1e-2, step)
            moving.trained["a"].grad = gradient[rows] * (step + 1)
            moving.step_()
        moved.append(moving.copy_sampling_weights()["a"])
    assert torch.allclose(moved[0], torch.cat(moved[1:]), atol=1e-7)


def test_a_record_without_a_needed_field_is_refused():
    needed = {
        f.name
        for f in fields(OptimizerRecord)
        if f.default is f.default_factory  # both MISSING
    }
    assert needed == {"name", "help", "full_name", "build", "options", "element_wise"}
    given = {name: getattr(adamw.RECORD, name) for name in needed}
    assert OptimizerRecord(**given).name == "adamw"
    for name in needed:
        with pytest.raises(TypeError, match=name):
            OptimizerRecord(**{key: value for key, value in given.items() if key != name})
    with pytest.raises(ValueError, match="defaults of options that it does not have: speed"):
        OptimizerRecord(**given, option_defaults={"speed": 1})


def test_names_are_taken_once_and_unknown_ones_refused():
    with pytest.raises(ValueError, match="optimizer adamw is already registered"):
        OPTIMIZERS.register(adamw.RECORD)
    other = replace(adamw.RECORD, name="other")
    for _ in range(2):
        with pytest.raises(ValueError, match="optimizer is 'other', expected one of adamw, adamw8bit"):
            OptimizerSettings(optimizer="other", options="betas = 0.9 0.99")
        with OPTIMIZERS.registered(other):
            assert OptimizerSettings(optimizer="other").optimizer == "other" and OPTIMIZERS.names()[-1] == "other"
