"""Objective settings (loss, weighting, noise, timesteps) and their validation against each other and the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...settings.declaration import check_values, setting
from ...storage.digest import settings_to_hash
from .guidance import CFG_AUGMENTED, PLAIN, TARGETS
from .loss_kinds import LOSSES, PREFERENCE
from .noise import LAST_SIGNAL, PYRAMIDS
from .timesteps import EXPERTS, NO_EXPERT, TIMESTEPS
from .weightings import WEIGHTINGS

PRIORS = ("none", "regularization", "output-preservation")
_LEAST_SHARE = 1e-3  # what a weighting leaves of a noise level's loss, for the level to be learned at all


@dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the objective; plain values, checked on creation (`check_for` checks them against a model).

    `sigmoid_scale`, `logit_mean`, `logit_std`, `mode_scale` and `shift` are those of some samplings of timesteps.
    Without `model_shift` what is drawn are the noise levels of a flow model. An `expert` of a pair gets only the noise
    levels on its side of `boundary`; 0 stands for the model's own (`experts.with_own_boundary`). `both` becomes one
    setting for each of them (`experts.of_pair`). `beta` is that of loss dpo (`preference`). With `sigma_bounds`
    minimum and maximum timestep are noise levels of a flow model, whatever its shift. `target_scale` is that of a
    training target (`guidance`).
    """

    loss: str = setting(
        "loss function",
        "mse",
        "How the error of a prediction (noise, velocity or flow) is measured. mse is usual. huber, smooth-l1 and"
        " scheduled-huber care less about outliers; scheduled-huber adapts to the noise level. x0-mse is the loss of"
        " ComfyUI's own trainer. dpo teaches what you prefer, from pairs of images: name.win.png and name.lose.png"
        " in Dataset's folder.",
        choices=LOSSES.names,
        kohya=(
            "--loss_type, --huber_schedule",
            "`l2` is `mse`; `huber` with the schedule `snr` (kohya's default) is `scheduled-huber`; with `constant`"
            " it is `huber`, and `smooth_l1` is `smooth-l1`. `--huber_c` is always 0.1",
        ),
        ai_toolkit="train.loss_type",
        onetrainer=("MSE Strength, Huber Strength", "one, not a mixture"),
        diffusers=("--loss_type sigmoid", "`dpo`. Graft does not have the other types"),
    )
    weighting: str = setting(
        "loss weighting",
        "none",
        "How much each noise level counts. Try min-snr for faster, steadier training of SD1.x and SDXL. Not for flow"
        " models, which ai-toolkit weighted is for.",
        choices=WEIGHTINGS.names,
        kohya=("--debiased_estimation_loss", "`debiased`"),
        ai_toolkit=(
            "train.timestep_type weighted",
            "`ai-toolkit weighted`, with timestep sampling `uniform` and model's own shift off",
        ),
        onetrainer=("Loss Weight Function", "MIN_SNR_GAMMA is `min-snr`, DEBIASED_ESTIMATION `debiased`"),
    )
    gamma: float = setting(
        "min-SNR gamma",
        5.0,
        "The cap of the min-snr weighting. 5 is usual; lower it to give low noise levels less weight.",
        low=0.01,
        high=1000.0,
        step=0.1,
        advanced=True,
        kohya=("--min_snr_gamma", "with loss weighting `min-snr`"),
        ai_toolkit=("train.min_snr_gamma", "with loss weighting `min-snr`"),
        onetrainer="Gamma",
        everydream2=("--min_snr_gamma", "with loss weighting `min-snr`"),
    )
    offset_noise: float = setting(
        "noise offset",
        0.0,
        "Adds noise that is the same everywhere in a channel. Try 0.05 to 0.1 for very dark or very bright images, and"
        " 0.02 to 0.03 in runs of more than 50,000 steps; 0 is off. EveryDream2's -1 is zero terminal SNR, a switch"
        " below.",
        low=-1.0,
        high=1.0,
        step=0.01,
        advanced=True,
        kohya="--noise_offset",
        ai_toolkit="train.noise_offset",
        onetrainer="Offset Noise Weight",
        everydream2=("--zero_frequency_noise_ratio", "0.02 in EveryDream2, 0 here; its -1 is zero terminal SNR"),
    )
    pyramid_noise: float = setting(
        "pyramid noise discount",
        0.0,
        "Adds coarser layers of noise, each weaker by this factor (kohya's multires_noise_discount). Try 0.3 for"
        " very dark or bright images, above 0.4 only in runs of less than 2000 steps; 0 is off.",
        low=0.0,
        high=0.99,
        step=0.01,
        advanced=True,
        kohya=("--multires_noise_discount", "up to six levels, without `--multires_noise_iterations`"),
        everydream2=("--pyramid_noise_discount", "with pyramid noise kind `everydream2`"),
    )
    ip_noise: float = setting(
        "input perturbation",
        0.0,
        "Adds noise that the model sees but does not have to predict (kohya's ip_noise_gamma). Try 0.1 to make"
        " sampling more robust; 0 is off.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
        kohya="--ip_noise_gamma",
        onetrainer="Perturbation Noise Weight",
    )
    zero_terminal_snr: bool = setting(
        "zero terminal SNR",
        False,
        "Trains the last timestep on pure noise, for images that are completely dark or bright. Only for v-prediction"
        " models. The MODEL output samples that way too; elsewhere add ModelSamplingDiscrete with zsnr on.",
        advanced=True,
        kohya=("--zero_terminal_snr", "for v models only"),
        onetrainer=("Rescale Noise Scheduler + V-pred", "the model must predict v already"),
        everydream2=("--enable_zero_terminal_snr", "for v models only; as `--zero_frequency_noise_ratio -1`"),
    )
    timesteps: str = setting(
        "timestep sampling",
        "uniform",
        "Which noise levels are trained more often. uniform: all alike. logit-normal, mode: the middle ones."
        " shifted: see timestep shift. All on top of a flow model's own shift, which already favors noise: half of"
        " uniform is above 0.75 on SD 3. sigmoid, shift, flux_shift: kohya's, without it; AI-Toolkit's shifts have"
        " its name.",
        choices=TIMESTEPS.names,
        kohya=(
            "--timestep_sampling",
            "of the same name for `sigmoid`, `shift`, `flux_shift`; `uniform` with model's own shift off; `sigma`"
            " with `--weighting_scheme logit_normal` or `mode` is `logit-normal` or `mode`",
        ),
        ai_toolkit=(
            "train.timestep_type",
            "`sigmoid` is `sigmoid`, `linear` is `uniform` with model's own shift off. `shift`, `flux_shift` and"
            " `lumina2_shift`: for Flux.1 and Chroma `ai-toolkit flux_shift`, for others `ai-toolkit shift` with"
            " the shift of AI-Toolkit's scheduler as timestep shift: 3 for Wan, Z-Image and SD 3, 6 for Lumina 2."
            " Graft's `shift` and `flux_shift` are kohya's, which draw more of the middle",
        ),
        onetrainer=(
            "Timestep Distribution",
            "UNIFORM is `uniform`, LOGIT_NORMAL `logit-normal`, HEAVY_TAIL `mode`. For flow models switch model's own"
            " shift off. Graft does not have the other distributions. Dynamic Timestep Shifting is `flux_shift`, for"
            " Flux: the same idea with a sigmoid",
        ),
    )
    shift: float = setting(
        "timestep shift",
        1.0,
        "For timestep sampling shifted, shift (kohya's discrete_flow_shift) and ai-toolkit shift. Above 1 trains"
        " high noise (layout) more, below 1 low noise (detail).",
        low=0.01,
        high=100.0,
        step=0.1,
        kohya="--discrete_flow_shift",
        onetrainer=("Timestep Shift", "with timestep sampling `shifted`, UNIFORM and model's own shift off"),
    )
    conditioning_dropout: float = setting(
        "conditioning dropout",
        0.05,
        "How often an image is trained with an empty prompt, which CFG needs. 0.05 to 0.1 is usual.",
        low=0.0,
        high=1.0,
        step=0.01,
        ai_toolkit="datasets.caption_dropout_rate",
        onetrainer="Caption Dropout Probability",
        everydream2=("--cond_dropout", "0.04 in EveryDream2, 0.05 here"),
    )
    prior: str = setting(
        "prior preservation",
        "none",
        "How regularization images count. none: like all others. regularization: with the prior loss weight."
        " output-preservation: for them, the model learns to predict what it predicted before training.",
        choices=PRIORS,
        advanced=True,
        ai_toolkit=(
            "train.diff_output_preservation",
            "`output-preservation`. It needs a regularization dataset with captions of the class",
        ),
        onetrainer=("Concept Type PRIOR_PREDICTION", "`output-preservation`, with a regularization dataset"),
    )
    prior_weight: float = setting(
        "prior loss weight",
        1.0,
        "Weight of the regularization images in the loss. Raise it if the model forgets, lower it if the LoRA learns"
        " too little.",
        low=0.0,
        high=100.0,
        step=0.1,
        advanced=True,
        kohya=("--prior_loss_weight", "with prior preservation `regularization`"),
        ai_toolkit=("train.reg_weight", "with prior preservation `regularization`"),
    )
    min_timestep: float = setting(
        "minimum timestep",
        0.0,
        "The lowest noise level to train, as a fraction of the schedule. Raise it to leave fine detail alone.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
        kohya=("--min_timestep", "0.4 for 400"),
        ai_toolkit=("train.min_denoising_steps", "0.4 for 400"),
        onetrainer="Min Noising Strength",
    )
    max_timestep: float = setting(
        "maximum timestep",
        1.0,
        "The highest noise level to train, as a fraction of the schedule. Lower it to leave the layout alone.",
        low=0.0,
        high=1.0,
        step=0.01,
        advanced=True,
        kohya=("--max_timestep", "0.6 for 600"),
        ai_toolkit=("train.max_denoising_steps", "0.6 for 600"),
        onetrainer="Max Noising Strength",
    )
    sigmoid_scale: float = setting(
        "sigmoid scale",
        1.0,
        "For timestep sampling sigmoid, shift and flux_shift (kohya's sigmoid_scale). Raise it to spread the noise"
        " levels.",
        low=0.01,
        high=100.0,
        step=0.1,
        advanced=True,
        kohya="--sigmoid_scale",
    )
    logit_mean: float = setting(
        "logit mean",
        0.0,
        "For timestep sampling logit-normal. Above 0 trains high noise more, below 0 low noise (kohya's logit_mean"
        " with the opposite sign).",
        low=-10.0,
        high=10.0,
        step=0.1,
        advanced=True,
        kohya=("--logit_mean", "with the other sign"),
        onetrainer=("Noising Bias", "of LOGIT_NORMAL"),
    )
    logit_std: float = setting(
        "logit deviation",
        1.0,
        "For timestep sampling logit-normal (kohya's logit_std). Lower it to train the middle noise levels even more.",
        low=0.01,
        high=10.0,
        step=0.1,
        advanced=True,
        kohya="--logit_std",
        onetrainer=("Noising Weight", "the weight + 1, of LOGIT_NORMAL"),
    )
    mode_scale: float = setting(
        "mode scale",
        1.29,
        "For timestep sampling mode (kohya's mode_scale). Raise it to train the middle noise levels more; below 0"
        " trains both ends more.",
        low=-1.0,
        high=1.75,
        step=0.01,
        advanced=True,
        kohya="--mode_scale",
        onetrainer=("Noising Weight", "of HEAVY_TAIL"),
    )
    model_shift: bool = setting(
        "model's own shift",
        True,
        "For flow models. On: timesteps come on top of the shift that the model samples with. Off: timesteps, minimum"
        " and maximum are the sampler's noise levels (sigma) themselves.",
        advanced=True,
    )
    expert: str = setting(
        "expert",
        "none",
        "For Wan 2.2 14B, which is two models: which of them to train. It gets only the noise levels that the sampler"
        " gives it. both: trains both in one run, with Start Training Expert Pair. none is for every other model.",
        choices=EXPERTS,
        advanced=True,
        kohya=(
            "--dit_high_noise",
            "musubi-tuner's, for Wan 2.2. Start Training Expert Pair trains both in one run;"
            " `--preserve_distribution_shape` is always on with an expert",
        ),
        ai_toolkit=(
            "model.model_kwargs.train_high_noise, train_low_noise",
            "`high noise`, `low noise`: a run for each. Both in one: Start Training Expert Pair. A file for each"
            " with AI-Toolkit's ending",
        ),
    )
    boundary: float = setting(
        "expert boundary",
        0.0,
        "For expert: the noise level (sigma) at which the sampler switches from the high-noise model to the low-noise"
        " one. 0 is the model's own: 0.875 for text to video, 0.9 for image to video.",
        low=0.0,
        high=0.999,
        step=0.005,
        advanced=True,
        kohya=("--timestep_boundary", "musubi-tuner's"),
    )
    beta: float = setting(
        "DPO beta",
        2000.0,
        "For loss function dpo: how strongly it keeps the model close to the original. The authors publish 2000 (SD"
        " 1.5) and 5000 (SDXL). Raise it if images fall apart, lower it if too little changes.",
        low=0.01,
        high=1000000.0,
        step=100.0,
        advanced=True,
        diffusers=("--beta_dpo", "twice the number, as theirs has no 1/2"),
    )
    sigma_bounds: bool = setting(
        "bounds are sigmas",
        False,
        "For flow models. On: minimum and maximum timestep are noise levels (sigma) of the sampler, whatever the"
        " model's own shift. Off: fractions of the schedule, before that shift.",
        advanced=True,
    )
    pyramid_kind: str = setting(
        "pyramid noise kind",
        "kohya",
        "For pyramid noise discount. kohya: the sides of each layer are a share of the full size, up to 6 layers."
        " everydream2: a share of the layer before, up to 10, as in the article that introduced it. It gets coarse in"
        " fewer layers.",
        choices=tuple(PYRAMIDS),
        advanced=True,
        everydream2=("pyramid_noise_like", "`everydream2`"),
    )
    target: str = setting(
        "training target",
        PLAIN,
        "For models that were distilled to sample without CFG, such as Flux.2 Klein, Z-Image Turbo and MiniMax H3."
        " cfg-augmented keeps the guidance that is in the model, with one more forward pass. differential moves the"
        " target further away from what the model predicts. plain is for all others.",
        choices=TARGETS,
        advanced=True,
        ai_toolkit=(
            "train.do_differential_guidance, train.do_guidance_loss",
            "`differential`; `cfg-augmented`, which goes the same way, with a smaller loss (1/scale²)",
        ),
    )
    target_scale: float = setting(
        "target scale",
        3.0,
        "For training target: how far differential moves the target, or the CFG that a distilled model stands for."
        " AI-Toolkit sets 3 and diffusion-pipe 4. Lower it if images look burnt.",
        low=1.0,
        high=100.0,
        step=0.5,
        advanced=True,
        ai_toolkit=(
            "train.differential_guidance_scale, train.guidance_loss_target",
            "with training target `differential` or `cfg-augmented`",
        ),
    )
    noise_candidates: int = setting(
        "noise candidates",
        1,
        "Draws so many noises for each image and keeps the one nearest to it (immiscible diffusion). Try 4 to 16 to"
        " learn in fewer steps; 1 is off.",
        low=1,
        high=256,
        advanced=True,
        ai_toolkit="train.optimal_noise_pairing_samples",
    )

    def __post_init__(self) -> None:
        check_values(self, "Objective Settings", _exclusions, _wrong_timesteps, _wrong_expert)

    @property
    def needs_empty_prompt(self) -> bool:
        """Whether the model is also asked for what it makes of the empty prompt."""
        return self.target == CFG_AUGMENTED

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss is of pairs of a better and a worse picture."""
        return LOSSES.get(self.loss).task == PREFERENCE

    def identity(self) -> dict[str, Any]:
        """The settings that a run is known by, as plain values."""
        return settings_to_hash(self)


def _exclusions(settings: ObjectiveSettings) -> list[str]:
    errors = []
    if settings.offset_noise < 0:
        errors.append(
            f"noise offset is {settings.offset_noise:g}, expected from 0 to 1. EveryDream2's"
            " zero_frequency_noise_ratio -1 is zero terminal SNR: switch that on, and set noise offset to 0"
        )
    if LOSSES.get(settings.loss).of_denoised and WEIGHTINGS.get(settings.weighting).needs_snr:
        errors.append(
            f"loss weighting {settings.weighting} is defined on the model's own objective; with loss function"
            f" {settings.loss} use none"
        )
    if settings.compares_pairs and settings.prior != "none":
        errors.append(
            f"loss function {settings.loss} holds on to the model as it was already: set prior preservation to none"
        )
    if settings.compares_pairs and settings.target != PLAIN:
        errors.append(
            f"loss function {settings.loss} compares pairs, and training target {settings.target} is for one picture:"
            f" set it to {PLAIN}"
        )
    if settings.compares_pairs and settings.noise_candidates > 1:
        errors.append(
            f"loss function {settings.loss} gives both pictures of a pair the same noise, which is near to one of them"
            " at most: set noise candidates to 1"
        )
    return errors


def _wrong_timesteps(settings: ObjectiveSettings) -> list[str]:
    if settings.min_timestep < settings.max_timestep:
        return []
    return [
        f"minimum timestep is {settings.min_timestep} and maximum timestep {settings.max_timestep}, expected a minimum"
        " below the maximum"
    ]


def _wrong_expert(settings: ObjectiveSettings) -> list[str]:
    errors = []
    if settings.expert == NO_EXPERT and settings.boundary:
        errors.append(
            f"expert boundary is {settings.boundary} and expert is {NO_EXPERT}: choose the expert that is trained, or"
            " set expert boundary to 0"
        )
    if settings.expert != NO_EXPERT and (settings.min_timestep > 0 or settings.max_timestep < 1):
        errors.append(
            f"expert {settings.expert} chooses the noise levels itself: set minimum timestep to 0 and maximum timestep"
            " to 1, and another border in expert boundary"
        )
    return errors


def remarks(settings: ObjectiveSettings) -> list[str]:
    """Warnings for the report: settings that work but are probably not meant."""
    if not settings.zero_terminal_snr:
        return []
    last = torch.tensor([(1 / LAST_SIGNAL - 1) ** 0.5])
    share = float(WEIGHTINGS.get(settings.weighting).weights(last, "v", settings.gamma))
    if share > _LEAST_SHARE:
        return []
    return [
        f"loss weighting {settings.weighting} counts the last noise level, which zero terminal SNR makes pure noise,"
        f" {share:.0e} times: next to nothing is learned there. To learn it, set loss weighting of Objective Settings"
        " to none or debiased"
    ]


def check_for(settings: ObjectiveSettings, prediction: str) -> None:
    """Raises ValueError when the settings do not suit a model that predicts `prediction`."""
    if prediction not in ("eps", "v", "flow"):
        raise ValueError(f"This model predicts {prediction}: training knows eps, v and flow.")
    if prediction == "flow" and WEIGHTINGS.get(settings.weighting).needs_snr:
        raise ValueError(
            f"Objective Settings: loss weighting {settings.weighting} needs a signal-to-noise ratio, which flow models"
            " lack; set it to none."
        )
    if prediction != "flow" and WEIGHTINGS.get(settings.weighting).only_flow:
        raise ValueError(
            f"Objective Settings: loss weighting {settings.weighting} is for flow models, and this model predicts"
            f" {prediction}: use min-snr or debiased."
        )
    if prediction != "flow" and TIMESTEPS.get(settings.timesteps).gives_levels:
        raise ValueError(
            f"Objective Settings: timestep sampling {settings.timesteps} draws the noise levels of flow models, and"
            f" this model predicts {prediction}: use uniform or logit-normal."
        )
    if prediction != "flow" and not settings.model_shift:
        raise ValueError(
            f"Objective Settings: only flow models have a shift of their own, and this model predicts {prediction}:"
            " switch model's own shift on."
        )
    if prediction != "flow" and settings.sigma_bounds:
        raise ValueError(
            "Objective Settings: bounds are sigmas is for flow models, whose noise levels go from 0 to 1,"
            f" and this model predicts {prediction}: switch it off. They are fractions of the schedule then."
        )
    if prediction != "flow" and settings.expert != NO_EXPERT:
        raise ValueError(
            f"Objective Settings: expert {settings.expert} is for flow models such as Wan 2.2, and this model predicts"
            f" {prediction}: set expert to {NO_EXPERT}."
        )
    if settings.zero_terminal_snr and prediction == "eps":
        raise ValueError(
            "Objective Settings: zero terminal SNR needs a model that predicts v. This one predicts eps: at a level"
            " without signal its input is the noise that it should predict, so there is nothing to learn there. Switch"
            " it off, or train a v model."
        )
    if settings.zero_terminal_snr and prediction == "flow":
        raise ValueError(
            "Objective Settings: zero terminal SNR is for v models; a flow model begins at pure noise already. Switch"
            " it off."
        )
