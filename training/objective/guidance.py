"""What models with guidance distilled into them learn, so that it stays: AI-Toolkit's differential guidance and
diffusion-pipe's CFG-augmented training.

Both are written here for denoised latents. Noise, velocity and flow are linear in them at a given level, and the
factors of each formula add up to 1, so the numbers are those of the authors' formulas on the model's own prediction.
"""

from __future__ import annotations

from torch import Tensor

PLAIN, DIFFERENTIAL, CFG_AUGMENTED = "plain", "differential", "cfg-augmented"
TARGETS = (PLAIN, DIFFERENTIAL, CFG_AUGMENTED)


def move_target(denoised: Tensor, target: Tensor, scale: float) -> Tensor:
    """Differential guidance: the target moves away from the prediction, without gradients.

        target' = prediction + scale (target - prediction)

    With mse the loss is scale^2 as large, and its gradient scale times. Source: ostris/ai-toolkit,
    `do_differential_guidance` in extensions_built_in/sd_trainer/SDTrainer.py, whose default scale is 3.

    Args:
        denoised: the model's denoised latents (B, C, …).
        target: what they should be, of the same shape.
        scale: how far the target moves; 1 leaves it where it is.

    Returns:
        The new target, of the same shape and in its type.
    """
    prediction = denoised.detach()
    return prediction.to(target) + scale * (target - prediction.to(target))


def remove_guidance(denoised: Tensor, without: Tensor, scale: float) -> Tensor:
    """CFG-augmented training: the prediction is taken for a guided one, and what it was guided from is what is
    compared with the target. Solved for the conditional prediction, CFG's own formula gives

        prediction' = (prediction + (scale - 1) unconditional) / scale

    Source: tdrussell/diffusion-pipe, `FinalLayer` in models/minimax_h3.py, whose example has cfg = 4.

    Args:
        denoised: the model's denoised latents (B, C, …) for the captions.
        without: those (B, C, …) for the empty prompt at the same noise, without gradients.
        scale: the CFG that the model stands for; 1 changes nothing.

    Returns:
        Denoised latents without guidance, of the same shape.
    """
    return (denoised + (scale - 1) * without.to(denoised)) / scale
