"""Recipes: every family, goal and memory gives settings that fit and are valid, and the report accounts for each."""

import dataclasses
import importlib.util
import itertools
import re

import pytest
from graft_nodes.ema.decay import EMASettings
from graft_nodes.nodes.training_settings import NODES as SETTINGS_NODES
from graft_nodes.patches.models.registry import recognize_model
from graft_nodes.settings.declaration import settings_of
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.checks import remarks
from graft_nodes.training.recipes import choose
from graft_nodes.training.recipes.estimate import GB
from graft_nodes.training.recipes.facts import Device, facts_of
from graft_nodes.training.recipes.fit import USABLE
from graft_nodes.training.recipes.published import GENERAL, PUBLISHED, published_for
from graft_nodes.training.recipes.report import report
from graft_nodes.training.recipes.wish import MEMORIES, STRENGTHS, Wish
from graft_nodes.training.trainable.settings import AdapterSettings

from .real_sizes import FAMILIES, facts
from .real_sizes import build as build_model

CUDA = Device("cuda", "a card", 23 * GB, bf16=True)
CPU = Device("cpu", "cpu", 500 * GB)


def unknown():
    model = build_model({f"blocks.{i}.{name}": (64, 64) for i in range(2) for name in ("to_q", "to_v")})
    return facts_of(model, recognize_model(model), "flow")


def chosen(family, **wish):
    return choose.recipe(facts(family), Wish(**wish), CUDA)


def test_each_family_of_the_task_is_recognized_and_has_a_recipe():
    assert PUBLISHED.names() == list(FAMILIES)
    for family in FAMILIES:
        assert facts(family).family == family
        assert published_for(family).name == family


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("goal", choose.GOALS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_settings_fit_into_the_memory_and_the_report_names_each(family, goal, memory):
    wish = Wish(goal=goal, memory=memory)
    found = choose.recipe(facts(family), wish, CUDA)
    assert found.estimate.total <= USABLE * found.memory
    assert not remarks(found.optimizer)
    text = report(found, facts(family), wish, CUDA)
    for choice in found.choices:
        assert choice.reason and choice.source
        assert f"- {choice.label} " in text and choice.source in text
    assert accounted(found) == set()


def accounted(found):
    """Settings that differ from their node's default and that no choice names, as (node, label)."""
    said = {(choice.node, choice.label) for choice in found.choices}
    missing = set()
    chosen_settings = {
        "Adapter Settings": found.adapter,
        "Optimizer Settings": found.optimizer,
        "Objective Settings": found.objective,
        "EMA Settings": found.ema,
    }
    for node, settings in chosen_settings.items():
        plain = type(settings)()
        for name, one in settings_of(settings).items():
            if getattr(settings, name) != getattr(plain, name):
                missing.add((node, one.label))
    return missing - said


def test_every_label_of_the_report_is_one_of_the_editor():
    labels = set()
    for schema in (node.define_schema() for node in SETTINGS_NODES):
        labels |= {(schema.display_name, declared.display_name) for declared in schema.inputs}
    for family, goal, memory in itertools.product(FAMILIES, choose.GOALS, ("6 GB", "48 GB")):
        found = chosen(family, goal=goal, memory=memory)
        assert {(choice.node, choice.label) for choice in found.choices} <= labels


@pytest.mark.parametrize(
    ("family", "rank", "alpha", "rate", "batch", "objective"),
    [
        ("sd1", 16, 1.0, 3e-4, 4, ObjectiveSettings(weighting="min-snr")),
        ("sdxl", 32, 16.0, 1e-4, 1, ObjectiveSettings(weighting="min-snr", offset_noise=0.0357)),
        ("flux", 16, 16.0, 1e-4, 1, ObjectiveSettings(timesteps="flux_shift")),
        ("qwen", 16, 16.0, 1e-4, 1, ObjectiveSettings(timesteps="shift", shift=2.2)),
        ("z-image", 32, 32.0, 1e-4, 1, ObjectiveSettings(timesteps="shift", shift=2.0)),
        ("wan", 32, 32.0, 1e-4, 1, ObjectiveSettings(timesteps="sigmoid")),
    ],
)
def test_published_figures_are_taken_as_they_are(family, rank, alpha, rate, batch, objective):
    found = chosen(family, memory="48 GB")
    assert (found.adapter.rank, found.adapter.alpha, found.adapter.targets) == (rank, alpha, "attention")
    assert (found.optimizer.learning_rate, found.optimizer.batch_size) == (rate, batch)
    assert found.objective == objective
    assert found.optimizer.schedule == "constant" and found.optimizer.total_steps == 2000
    assert found.ema == EMASettings(schedule="ramp", decay=0.99)


def test_goal_strength_and_steps_change_what_they_say():
    subject, style, concept = (chosen("flux", goal=goal, memory="48 GB") for goal in choose.GOALS)
    assert [one.adapter.targets for one in (subject, style, concept)] == ["attention", "attention+ff", "attention+ff"]
    assert [one.adapter.rank for one in (subject, style, concept)] == [16, 16, 32]
    assert concept.adapter.alpha == 32.0
    assert style.objective.conditioning_dropout == 0.1
    rates = [chosen("flux", strength=strength).optimizer.learning_rate for strength in STRENGTHS]
    assert rates == [5e-5, 1e-4, 2e-4]
    short, long = chosen("flux", steps=2), chosen("flux", steps=500_000)
    assert (short.ema.decay, long.ema.decay) == (0.5, 0.9999)
    assert (short.optimizer.total_steps, long.optimizer.total_steps) == (2, 500_000)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_note_on_published_figures_is_among_the_hints(family):
    note = published_for(family).note
    assert (note in chosen(family).hints) == bool(note)


def test_an_unknown_family_gets_general_defaults_and_the_report_says_so():
    wish = Wish()
    found = choose.recipe(unknown(), wish, CUDA)
    assert found.adapter == AdapterSettings(rank=32, alpha=32.0, targets="all")
    assert published_for("") is GENERAL
    text = report(found, unknown(), wish, CUDA)
    assert "family: not recognized, so AI-Toolkit's general defaults follow (recipes: sd1, sdxl, flux, " in text
    lumina = dataclasses.replace(facts("flux"), family="lumina", title="Lumina 2")
    text = report(choose.recipe(lumina, wish, CUDA), lumina, wish, CUDA)
    assert "family: Lumina 2, for which Graft has no recipe" in text


def test_auto_takes_the_device_and_on_the_cpu_the_report_says_so():
    wish = Wish()
    on_card, on_cpu = (choose.recipe(facts("sdxl"), wish, device) for device in (CUDA, CPU))
    assert (on_card.memory, on_cpu.memory) == (CUDA.free, CPU.free)
    assert "auto: what a card has free when ComfyUI unloads its models" in report(on_card, facts("sdxl"), wish, CUDA)
    assert "auto: training runs on the CPU" in report(on_cpu, facts("sdxl"), wish, CPU)
    assert (on_card.optimizer.precision, on_cpu.optimizer.precision) == ("bf16", "auto")
    old = dataclasses.replace(CUDA, bf16=False)
    assert choose.recipe(facts("sdxl"), wish, old).optimizer.precision == "fp16"


def test_eight_bits_only_where_they_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    assert chosen("flux", memory="48 GB").optimizer.optimizer == "adamw8bit"
    assert choose.recipe(facts("flux"), Wish(), CPU).optimizer.optimizer == "adamw"
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    found = chosen("flux", memory="48 GB")
    assert found.optimizer.optimizer == "adamw"
    reasons = [choice.reason for choice in found.choices if choice.label == "optimizer"]
    assert reasons == ["adamw8bit is published, and its package bitsandbytes is not installed"]


def test_adafactor_saves_the_optimizers_memory_and_takes_adamws_rate(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    tight = dataclasses.replace(CUDA, free=7 * GB)
    found = choose.recipe(facts("sdxl"), Wish(), tight).optimizer
    assert (found.optimizer, found.learning_rate, found.offload) == ("adafactor", 1e-4, "none")
    assert found.parsed_options == {"scale_parameter": False}
    assert not remarks(found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"goal": "face"}, "goal is 'face', expected one of subject, style, concept"),
        ({"memory": "7 GB"}, "memory is '7 GB', expected one of auto, 6 GB"),
        ({"strength": "2"}, "strength is '2', expected one of light, normal, strong"),
        ({"steps": 0}, "steps is 0, expected from 1 to 10000000"),
    ],
)
def test_a_wish_that_is_none_is_refused(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Wish(**given)


def test_a_model_that_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="training knows eps, v and flow"):
        choose.recipe(dataclasses.replace(facts("sd1"), prediction="x0"), Wish(), CUDA)
    with pytest.raises(ValueError, match="no linear layer that a LoRA could train"):
        facts_of(build_model({"conv.0": (4, 4, 3)}), None, "eps")
