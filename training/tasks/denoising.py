"""Training a diffusion model to denoise: what most runs do, and what preference pairs and sliders are built on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...patches.token_downsampling.unet import TRAINING
from ...patches.token_routing.route import ROUTING
from ..data.batches import Batch, BatchItem, collate
from ..data.dataset import Dataset
from ..data.listing import first_names
from ..distributed import fsdp
from ..distributed.process_group import SingleProcess
from ..memory.offload import to_device
from ..memory.quantized_base import base as quantized_base
from ..objective import experts
from ..objective.denoiser import Denoiser
from ..objective.guidance import CFG_AUGMENTED, DIFFERENTIAL, move_target, remove_guidance
from ..objective.loss import losses
from ..objective.noise import LAST_SIGNAL, perturbation
from ..objective.settings import check_for
from ..optimizers.precision import autocast, computes_in_fp16
from ..state import TrainState
from ..trainable.settings import AS_LOADED
from ..trainable.words import check_reference
from .draws import NOISE_LEVELS, Draws, NoiseDraw
from .task import Measures, TrainingContext, TrainingTask

Options = Mapping[str, Any]
TRAINING_ONLY = (
    "training-only LoRA: on for the training loss and the held-out loss, off in previews, in MODEL and in what is saved"
)


class DenoisingTask(TrainingTask):
    """The model learns to denoise the dataset's pictures."""

    takes_sliders = False

    def __init__(self, state: TrainState) -> None:
        self.objective = state.settings.objective

    def check(self, state: TrainState, denoiser: Denoiser, dataset: Dataset, group: SingleProcess) -> None:
        """Raise ValueError when the state's settings do not fit the model, the pictures or the ranks."""
        objective = self.objective
        if dataset.slider is not None and not self.takes_sliders:
            raise ValueError(f"Slider is connected, and this run is of {state.task}: begin another run with Slider.")
        check_for(objective, denoiser.prediction)
        _check_fp16(state, denoiser, group)
        if state.settings.optimizer.fused_backward and group.size > 1:
            raise ValueError(
                "Optimizer Settings: fused backward pass moves a weight before the ranks can add up their gradients:"
                " switch it off."
            )
        if state.start.adapter.quantized_base:
            _check_quantized_base(state.start.adapter.base_weights, denoiser, group)
        if state.settings.optimizer.compile != "off":
            _check_compile(denoiser, group)
        check_reference(state.start.words, objective.compares_pairs)
        if state.start.words is not None and group.shard:
            raise ValueError(
                "Train Words: --shard divides the model among ranks, and words cannot be trained beside that: start"
                " without --shard, or disconnect Train Words."
            )
        if group.shard:
            fsdp.check(state, group)
        if state.start.encodes_captions:
            _check_captions(state, denoiser, dataset)
        if objective.prior != "none" and dataset.regularization is None:
            raise ValueError(
                f"Objective Settings: prior preservation {objective.prior} needs a regularization dataset: connect one"
                " to Dataset."
            )
        if objective.needs_empty_prompt:
            _check_empty_prompt(dataset)
        if objective.zero_terminal_snr and _ends_with_signal(denoiser):
            raise ValueError(
                "Objective Settings: zero terminal SNR is on, and the model's noise levels end with signal: rescale"
                " them (zero_terminal)."
            )

    def losses(self, context: TrainingContext, batch: Batch, draws: Draws) -> Tensor:
        """Weighted errors (B,) of the model's prediction, compared as the training target says. With output
        preservation, regularization images learn what the model predicts without the trained tensors, and nothing else.
        """
        x, target, drawn = self.add_noise(context, batch, draws)
        held = None
        if self.objective.prior == "output-preservation" and batch.is_regularization.any():
            held = _base_predictions(context, batch, x, drawn.sigma, target, draws.options)
        without = None
        if self.objective.target == CFG_AUGMENTED:
            without = _without_caption(context, batch, x, drawn.sigma, draws.options)
        denoised = predict(context, batch, x, drawn.sigma, draws.options)
        compared = denoised
        if without is not None:
            compared = remove_guidance(denoised, without, self.objective.target_scale)
        elif self.objective.target == DIFFERENTIAL:
            target = move_target(denoised, target, self.objective.target_scale)
        if held is not None:
            rows = to_device(batch.is_regularization, x.device).view(-1, *[1] * (x.ndim - 1))
            compared, target = torch.where(rows, denoised, compared), torch.where(rows, held, target)
        return measure_errors(context, batch, compared, target, drawn.sigma)

    def add_noise(self, context: TrainingContext, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor, NoiseDraw]:
        """(what the network sees, the latents that it should denoise to, what was drawn) for a batch at the adapter's
        strength.
        """
        clean = latents_of(context, batch.at_strength(context.strength))
        drawn = draws.draw(self.objective, context.denoiser, clean, batch.parts)
        return *noisy(context.denoiser, clean, drawn), drawn

    def held_out(self, context: TrainingContext, item: BatchItem, draws: Draws) -> Measures:
        """The losses of a held-out picture at NOISE_LEVELS noise levels."""
        items = [item] * NOISE_LEVELS
        return Measures(self.losses(context, collate(items, self.objective.needs_empty_prompt), draws))

    def saves_memory(self, state: TrainState) -> list[str]:
        """Offload, a LoRA or a smaller one, and fewer tokens."""
        adapter, suggestions = state.start.adapter, []
        if state.settings.optimizer.offload == "none":
            suggestions.append("set offload to CPU memory")
        if adapter.full_weights:
            suggestions.append("train a LoRA instead of the full weights")
        elif adapter.rank > 16:
            suggestions.append(f"lower rank (dim) from {adapter.rank}")
        suggestions.append("train at a lower resolution, or apply ToDo to the model")
        return suggestions

    def beginning(self, state: TrainState, dataset: Dataset) -> list[str]:
        """Which expert is trained, if it is one."""
        return experts.describe(self.objective)

    def report(self, state: TrainState) -> Sequence[str]:
        """Which outputs have the weights, which expert was trained, and what sampling must know."""
        average = " (for the average use EMA Merge)" if state.average else ""
        lines = [f"MODEL has the last weights{average}", *experts.describe(self.objective)]
        if state.start.training_only:
            lines.append(TRAINING_ONLY)
        if self.objective.zero_terminal_snr:
            lines.append(
                "trained with zero terminal SNR: MODEL samples with the same noise levels. Where you load the LoRA file"
                " elsewhere, add ModelSamplingDiscrete with sampling v_prediction and zsnr on"
            )
        return lines


def latents_of(context: TrainingContext, latents: Tensor) -> Tensor:
    """Latents of the dataset (B, C, …, h, w) as the network expects them, on its device."""
    return context.denoiser.process_in(to_device(latents, context.denoiser.device, torch.float32))


def noisy(denoiser: Denoiser, clean: Tensor, drawn: NoiseDraw) -> tuple[Tensor, Tensor]:
    """(what the network sees, the latents that it should denoise to)."""
    sigma, noise, extra = drawn
    target = clean
    if extra is not None:
        target = clean + perturbation(denoiser.prediction, sigma).view(-1, *[1] * (clean.ndim - 1)) * extra
        noise = noise + extra
    return denoiser.noisy(clean, noise, sigma), target


def errors(
    context: TrainingContext, batch: Batch, x: Tensor, target: Tensor, sigma: Tensor, options: Options
) -> Tensor:
    """The weighted errors of the model as it is now.

    Args:
        context: the run.
        batch: B pictures of one size.
        x: their noisy latents (B, C, …, h, w).
        target: the latents that they should denoise to.
        sigma: noise levels (B,).
        options: what patches of the model are told.

    Returns:
        Errors (B,).
    """
    return measure_errors(context, batch, predict(context, batch, x, sigma, options), target, sigma)


def predict(context: TrainingContext, batch: Batch, x: Tensor, sigma: Tensor, options: Options) -> Tensor:
    """The denoised latents of the model as it is now, for the captions of a batch; `errors` has the same arguments."""
    with autocast(context.start_state.settings.optimizer, context.denoiser):
        conditionings = context.encode(batch.captions, batch.conditionings)
        return context.denoiser.denoise(x, sigma, conditionings, options)


def measure_errors(context: TrainingContext, batch: Batch, denoised: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """The weighted errors of denoised latents.

    Args:
        context: the run.
        batch: B pictures of one size, with their masks.
        denoised: what the model made (B, C, …, h, w).
        target: what it should have made.
        sigma: noise levels (B,).

    Returns:
        Errors (B,).
    """
    denoiser, mask = context.denoiser, None
    if batch.mask is not None:
        mask = to_device(batch.mask, denoiser.device)
    objective = context.start_state.settings.objective
    return losses(objective, denoiser.prediction, denoised, target, sigma, mask, batch.parts)


def switch_off_routing(options: Options) -> Options:
    """The options for the model that teaches: no token skips a block of it. A validation routes nothing."""
    if TRAINING not in options:
        return options
    where = {key: value for key, value in options[TRAINING].items() if key != ROUTING}
    return {**options, TRAINING: where}


def _base_predictions(
    context: TrainingContext, batch: Batch, x: Tensor, sigma: Tensor, target: Tensor, options: Options
) -> Tensor:
    """The target, where that of regularization images is what the model predicts without the trained tensors."""
    rows = batch.is_regularization.nonzero().flatten()
    conditionings = [batch.conditionings[i] for i in rows.tolist()]
    rows = to_device(rows, x.device)
    options = switch_off_routing(options)
    with context.switch_off_trained(), autocast(context.start_state.settings.optimizer, context.denoiser):
        base = context.denoiser.denoise(x[rows], sigma[rows], conditionings, options)
    return target.index_copy(0, rows, base.to(target))


@torch.no_grad()
def _without_caption(context: TrainingContext, batch: Batch, x: Tensor, sigma: Tensor, options: Options) -> Tensor:
    """The denoised latents of the model as it is now, for the empty prompt."""
    nothing = replace(batch, captions=("",) * len(batch.captions), conditionings=batch.empty)
    return predict(context, nothing, x, sigma, switch_off_routing(options))


def _ends_with_signal(denoiser: Denoiser) -> bool:
    """Whether the model's last noise level has any signal left. A plan has no numbers to tell it from."""
    if denoiser.device.type == "meta":
        return False
    return float(denoiser.sigma(torch.tensor([1 - 2**-24], device=denoiser.device))) ** -2 > 2 * LAST_SIGNAL


def _check_fp16(state: TrainState, denoiser: Denoiser, group: SingleProcess) -> None:
    """Raise ValueError where what computes in fp16, because of the device or of the model, cannot have a loss scale.
    Training precision fp16 itself is refused elsewhere.
    """
    optimizer = state.settings.optimizer
    if optimizer.precision == "fp16" or not computes_in_fp16(optimizer, denoiser):
        return
    found = (
        f"Optimizer Settings: training precision {optimizer.precision} computes in fp16 with this model on this device"
    )
    if optimizer.fused_backward:
        raise ValueError(
            f"{found}, and a fused backward pass moves weights before it is known whether a gradient overflowed: switch"
            " it off, or set training precision to bf16."
        )
    if group.shard:
        raise ValueError(
            f"{found}, and its loss scale is for weights that a rank holds whole: set training precision to bf16, or"
            " start without --shard."
        )


def _check_quantized_base(base_weights: str, denoiser: Denoiser, group: SingleProcess) -> None:
    """Raise ValueError where the base cannot be quantized."""
    if group.shard:
        raise ValueError(
            f"Adapter Settings: base weights is {base_weights}, and --shard divides the weights as loaded: start"
            f" without --shard, or set base weights to {AS_LOADED}."
        )
    if not quantized_base.chosen_layers(denoiser.module):
        raise ValueError(
            f"Adapter Settings: base weights is {base_weights}, and no linear layer of the model can be"
            f" ({quantized_base.remark(denoiser.module, base_weights)}): set base weights to {AS_LOADED}."
        )


def _check_compile(denoiser: Denoiser, group: SingleProcess) -> None:
    """Raise ValueError when blocks cannot be compiled here."""
    from ..run.compiled_blocks import check_compiler

    if group.shard:
        raise ValueError(
            "Optimizer Settings: compile is blocks, and --shard divides the blocks among ranks: set compile to off, or"
            " start without --shard."
        )
    check_compiler(denoiser.device)


def _check_empty_prompt(dataset: Dataset) -> None:
    """Raise ValueError where a sample brings its conditioning and none for the empty prompt."""
    images = dataset.images + dataset.held_out
    if dataset.regularization is not None:
        images += dataset.regularization.images
    lacking = [image.name for image in images if image.brought is not None and image.brought.empty is None]
    if lacking:
        raise ValueError(
            f"Objective Settings: training target {CFG_AUGMENTED} compares with the empty prompt, which {len(lacking)}"
            f" of {len(images)} samples lack: {first_names(lacking)}. Connect CLIP, or an empty conditioning, to"
            " Samples."
        )


def _check_captions(state: TrainState, denoiser: Denoiser, dataset: Dataset) -> None:
    """Raise ValueError when the captions cannot be encoded in every step, as what is trained asks for."""
    what, off = "Adapter Settings: train text encoder is on", "switch it off"
    if state.start.words is not None:
        what, off = "Train Words is connected", "disconnect it"
    if denoiser.text_encoder is None:
        raise ValueError(f"{what}, and there is no text encoder to train: connect CLIP.")
    if any(any(image.seen) for image in dataset.images):
        raise ValueError(
            f"{what}, and this text encoder sees the control pictures, so that every caption would be encoded with its"
            f" pictures in every step, which Graft does not do: {off}."
        )
    if dataset.brings_conditionings:
        raise ValueError(
            f"{what}, and the samples of Samples bring conditionings that are encoded already: {off}, or train on"
            " folders."
        )
