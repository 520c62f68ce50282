"""EveryDream2's defaults as one recipe: the values of its train.py and optimizer.json, written anew, and a report that
accounts for each.
"""

import pytest
from graft_nodes.ema.decay import EMASettings
from graft_nodes.nodes.training import GraftTrainStart
from graft_nodes.settings.declaration import settings_of
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.objective.settings import ObjectiveSettings
from graft_nodes.training.optimizers.checks import remarks
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.recipes.everydream2 import everydream2
from graft_nodes.training.recipes.facts import Device
from graft_nodes.training.recipes.wish import STRENGTHS, Wish
from graft_nodes.training.trainable.settings import AdapterSettings

from .real_sizes import facts

CARD, CPU = Device("cuda", "a card", 24 * 2**30, bf16=True), Device("cpu", "cpu", 2**40)
WISH = Wish(goal="as EveryDream2", steps=1500)

# By EveryDream2's names: what train.py and optimizer.json have where nothing is set.
DEFAULTS = {
    "lr": 1e-6,
    "text_encoder_overrides.lr": 5e-7,
    "lr_scheduler": "constant",
    "batch_size": 2,
    "grad_accum": 1,
    "clip_grad_norm": None,
    "weight_decay": 0.01,
    "cond_dropout": 0.04,
    "zero_frequency_noise_ratio": 0.02,
    "min_snr_gamma": None,
    "pyramid_noise_discount": None,
    "enable_zero_terminal_snr": False,
    "scale_lr": False,
    "gradient_checkpointing": False,
    "ema_decay_rate": None,
    "disable_textenc_training": False,
}


def as_they_name_it(settings):
    """The settings by EveryDream2's names."""
    optimizer, objective = settings.optimizer, settings.objective
    return {
        "lr": optimizer.learning_rate,
        "text_encoder_overrides.lr": optimizer.text_encoder_rate,
        "lr_scheduler": optimizer.schedule,
        "batch_size": optimizer.batch_size,
        "grad_accum": optimizer.accumulation,
        "clip_grad_norm": optimizer.clip_norm or None,
        "weight_decay": optimizer.weight_decay,
        "cond_dropout": objective.conditioning_dropout,
        "zero_frequency_noise_ratio": objective.offset_noise,
        "min_snr_gamma": None if objective.weighting == "none" else objective.gamma,
        "pyramid_noise_discount": objective.pyramid_noise or None,
        "enable_zero_terminal_snr": objective.zero_terminal_snr,
        "scale_lr": optimizer.scale_lr,
        "gradient_checkpointing": optimizer.checkpointing,
        "ema_decay_rate": settings.ema,
        "disable_textenc_training": not settings.adapter.text_encoder,
    }


def test_its_defaults_are_set_all_at_once():
    settings, _ = everydream2(facts("sd1"), WISH, CARD)
    assert as_they_name_it(settings) == DEFAULTS
    assert settings.adapter == AdapterSettings(kind="full", targets="all", text_encoder=True)
    assert settings.optimizer.total_steps == 1500 and settings.objective.pyramid_kind == "everydream2"
    assert not remarks(settings.optimizer)


@pytest.mark.parametrize("family", ["sd1", "sdxl", "flux"])
@pytest.mark.parametrize("device", [CARD, CPU], ids=["card", "cpu"])
def test_the_report_accounts_for_each_setting(family, device):
    settings, report = everydream2(facts(family), WISH, device)
    parts = {"adapter": settings.adapter, "optimizer": settings.optimizer, "objective": settings.objective}
    for chosen in parts.values():
        plain = type(chosen)()
        for name, one in settings_of(chosen).items():
            if getattr(chosen, name) != getattr(plain, name):
                assert f"- {one.label} " in report
    assert "memory is not used" in report and "EveryDream2, train.py" in report
    assert (settings.objective.offset_noise == 0.02) == (family != "flux")
    assert settings.optimizer.optimizer == "adamw" or device is CARD


def test_strength_is_that_of_other_recipes():
    for strength, factor in STRENGTHS.items():
        wish = Wish(goal="as EveryDream2", strength=strength)
        optimizer = everydream2(facts("sd1"), wish, CPU)[0].optimizer
        assert (optimizer.learning_rate, optimizer.text_encoder_rate) == (1e-6 * factor, 5e-7 * factor)


@pytest.mark.parametrize(
    ("settings", "name", "advice"),
    [
        (FolderSettings, "resolution", "at 768 on SD1.x to half"),
        (ObjectiveSettings, "offset_noise", "0.02 to 0.03 in runs of more than 50,000 steps"),
        (ObjectiveSettings, "offset_noise", "-1 is zero terminal SNR"),
        (ObjectiveSettings, "pyramid_noise", "above 0.4 only in runs of less than 2000 steps"),
        (OptimizerSettings, "optimizer", "for at most 8 images a step"),
        (EMASettings, "decay", "If the average lags behind the weights, lower it; if it is almost the same, raise it"),
    ],
)
def test_the_guides_advice_is_said_where_its_setting_is(settings, name, advice):
    assert advice in settings_of(settings)[name].help
    (seed,) = [one for one in GraftTrainStart.define_schema().inputs if one.id == "seed"]
    assert "(-1 in other trainers), set control after generate to randomize" in seed.tooltip
