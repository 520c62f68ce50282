"""What trainers publish for each model family, with where each figure stands. Figures only, read in 2026.

To add a family, add its record here; `family` is its name in patches/models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from ...patches.registry import Registry

T = TypeVar("T")

_TOOLKIT = "AI-Toolkit, config/examples/train_lora_{}.yaml"
_TOOLKIT_ANY = "AI-Toolkit, the defaults of its new jobs (ui/src/app/jobs/new/jobConfig.ts)"
_ONETRAINER = "OneTrainer, training_presets/{}.json"
_ONETRAINER_ANY = "OneTrainer, the defaults of its settings (modules/util/config/TrainConfig.py)"
_KOHYA = "kohya's sd-scripts, docs/{}.md"
_MUSUBI = "kohya's musubi-tuner, docs/{}.md"


@dataclass(frozen=True)
class Figure(Generic[T]):
    """A published value and where it stands."""

    value: T
    source: str


@dataclass(frozen=True)
class Timesteps:
    """A timestep sampling; `shift` counts for `shift` alone."""

    sampling: str
    shift: float = 1.0


_MIN_SNR = Figure(5.0, _KOHYA.format("train_network_advanced"))
_NO_OFFSET = Figure(0.0, "every trainer's default is none")
_ADAMW_DECAY = Figure(0.01, "the default of AdamW in PyTorch and bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class PublishedRecipe:
    """One family's figures; those with a default are the same for most families.

    `timesteps` is for flow models, `min_snr` and `noise_offset` for the others (0: none).
    """

    name: str
    rank: Figure[int]
    alpha: Figure[float]
    learning_rate: Figure[float]
    batch_size: Figure[int]
    optimizer: Figure[str]
    resolution: Figure[int]
    timesteps: Figure[Timesteps]
    weight_decay: Figure[float] = _ADAMW_DECAY
    min_snr: Figure[float] = _MIN_SNR
    noise_offset: Figure[float] = _NO_OFFSET
    note: str = ""
    """What else a user of this family has to know."""


_SIGMOID = Figure(Timesteps("sigmoid"), _TOOLKIT_ANY)
_FLUX, _QWEN, _WAN = (_TOOLKIT.format(name) for name in ("flux_24gb", "qwen_image_24gb", "wan21_14b_24gb"))
_SD1, _SDXL = _ONETRAINER.format("SD1.5/#sd 1.5 LoRA"), _KOHYA.format("sdxl_train_network")

PUBLISHED: Registry[PublishedRecipe] = Registry(
    "recipe",
    (
        PublishedRecipe(
            name="sd1",
            rank=Figure(16, _ONETRAINER_ANY),
            alpha=Figure(1.0, _ONETRAINER_ANY),
            learning_rate=Figure(3e-4, _SD1),
            batch_size=Figure(4, _SD1),
            optimizer=Figure("adamw8bit", _KOHYA.format("train_network")),
            resolution=Figure(512, _SD1),
            timesteps=_SIGMOID,
        ),
        PublishedRecipe(
            name="sdxl",
            rank=Figure(32, _SDXL),
            alpha=Figure(16.0, _SDXL),
            learning_rate=Figure(1e-4, _SDXL),
            batch_size=Figure(1, "kohya's sd-scripts, the default of --train_batch_size"),
            optimizer=Figure("adamw8bit", _SDXL),
            resolution=Figure(1024, "kohya's sd-scripts, docs/train_SDXL-en.md"),
            timesteps=_SIGMOID,
            noise_offset=Figure(0.0357, _KOHYA.format("train_network_advanced")),
        ),
        PublishedRecipe(
            name="flux",
            rank=Figure(16, _FLUX),
            alpha=Figure(16.0, _FLUX),
            learning_rate=Figure(1e-4, _FLUX),
            batch_size=Figure(1, _FLUX),
            optimizer=Figure("adamw8bit", _FLUX),
            resolution=Figure(1024, f"{_FLUX} (its largest of 512, 768 and 1024)"),
            timesteps=Figure(Timesteps("flux_shift"), _KOHYA.format("flux_train_network")),
        ),
        PublishedRecipe(
            name="qwen",
            rank=Figure(16, _QWEN),
            alpha=Figure(16.0, _QWEN),
            learning_rate=Figure(1e-4, _QWEN),
            batch_size=Figure(1, _QWEN),
            optimizer=Figure("adamw8bit", _QWEN),
            resolution=Figure(1024, f"{_QWEN} (its largest of 512, 768 and 1024)"),
            timesteps=Figure(Timesteps("shift", 2.2), _MUSUBI.format("qwen_image")),
            note="musubi-tuner's example takes half this learning rate, 5e-5: choose strength light for it",
        ),
        PublishedRecipe(
            name="z-image",
            rank=Figure(32, _TOOLKIT_ANY),
            alpha=Figure(32.0, _TOOLKIT_ANY),
            learning_rate=Figure(1e-4, _MUSUBI.format("zimage")),
            weight_decay=Figure(1e-4, _TOOLKIT_ANY),
            batch_size=Figure(1, _TOOLKIT_ANY),
            optimizer=Figure("adamw8bit", _MUSUBI.format("zimage")),
            resolution=Figure(1024, f"{_TOOLKIT_ANY} (its largest of 512, 768 and 1024)"),
            timesteps=Figure(Timesteps("shift", 2.0), _MUSUBI.format("zimage")),
            note=(
                "Z-Image-Turbo is distilled and loses its few steps while it trains. Connect AI-Toolkit's training"
                " adapter to training-only LoRA of Start Training, as the template for Z-Image Turbo does. Without"
                " that file, put Objective Settings with training target cfg-augmented behind this recipe, which keeps"
                " the guidance alone"
            ),
        ),
        PublishedRecipe(
            name="wan",
            rank=Figure(32, _WAN),
            alpha=Figure(32.0, _WAN),
            learning_rate=Figure(1e-4, _WAN),
            weight_decay=Figure(1e-4, _WAN),
            batch_size=Figure(1, _WAN),
            optimizer=Figure("adamw8bit", _WAN),
            resolution=Figure(632, f"{_WAN} (single pictures, about 480p)"),
            timesteps=Figure(Timesteps("sigmoid"), _WAN),
            note=(
                "Wan 2.2 14B is two models. The template for Wan 2.2 trains both in one run: Start Training Expert Pair"
                " has both, and behind this recipe comes Objective Settings with timestep sampling uniform and model's"
                " own shift off (AI-Toolkit's train_lora_wan22_14b_24gb). To train one of them alone, choose its expert"
                " there"
            ),
        ),
    ),
)

GENERAL = PublishedRecipe(
    name="general",
    rank=Figure(32, _TOOLKIT_ANY),
    alpha=Figure(32.0, _TOOLKIT_ANY),
    learning_rate=Figure(1e-4, _TOOLKIT_ANY),
    weight_decay=Figure(1e-4, _TOOLKIT_ANY),
    batch_size=Figure(1, _TOOLKIT_ANY),
    optimizer=Figure("adamw8bit", _TOOLKIT_ANY),
    resolution=Figure(1024, f"{_TOOLKIT_ANY} (its largest of 512, 768 and 1024)"),
    timesteps=_SIGMOID,
    min_snr=_MIN_SNR,
    noise_offset=_NO_OFFSET,
)


def published_for(family: str) -> PublishedRecipe:
    """The figures for a family; the general ones for a family without any."""
    if family in PUBLISHED:
        return PUBLISHED.get(family)
    return GENERAL
