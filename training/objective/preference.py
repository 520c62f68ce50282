"""Preference tuning: the loss of a pair of pictures of which people like one better, against the model as it was.

Diffusion-DPO (Wallace 2023, arXiv 2311.12908, eq. 14) as its authors' script computes it (SalesforceAIResearch's
`train.py`):

    loss = -log sigmoid(-beta / 2 * ((e_better - e_worse) - (r_better - r_worse)))

`e` is the error of the trained model, `r` that of the reference, which is the model without what is trained. An error
is the mean of the squared error of the prediction over all numbers of the latent, times the loss weighting (the paper's
omega, 1 by default). Both pictures get the same noise and timestep. The paper's beta is 2000 for SD 1.5 and 5000 for
SDXL, with this mean and this 1/2. diffusers' research script leaves the 1/2 out, so its beta_dpo counts twice as much.

For flow models the errors are those of the velocity, as in Flow-DPO (Liu 2025, arXiv 2501.13918) with a constant beta,
which works better there than one that depends on the timestep.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROUNDING = 1e-6  # of a pair's errors


def margins(errors: Tensor, reference: Tensor) -> Tensor:
    """How much more than the reference the model prefers the better picture: (r_better - r_worse) - (e_better -
    e_worse).

    Args:
        errors: the model's weighted errors (2B,): of the better pictures, then of the worse ones in the same order.
        reference: the same (2B,) of the model without what is trained.

    Returns:
        The margins (B,).
    """
    better, worse = errors.chunk(2)
    reference_better, reference_worse = reference.chunk(2)
    return (reference_better - reference_worse) - (better - worse)


def pair_losses(beta: float, margins: Tensor) -> Tensor:
    """The loss of each pair, -log sigmoid(beta / 2 * margin).

    Args:
        beta: how strongly the model is kept near the reference: 2000 in the paper for SD 1.5, 5000 for SDXL.
        margins: the pairs' margins (B,), from `margins`.

    Returns:
        The losses (B,), log 2 where the margin is 0.
    """
    return -F.logsigmoid(0.5 * beta * margins)


def implicit_accuracy(errors: Tensor, reference: Tensor) -> Tensor:
    """The share of pairs whose better picture the model prefers more than the reference does; ties count half.

    What rounding alone can make of equal predictions is a tie, so that it is 0.5 before the first step.

    Args:
        errors: the model's weighted errors (2B,): of the better pictures, then of the worse ones in the same order.
        reference: the same (2B,) of the model without what is trained.

    Returns:
        A number from 0 to 1, as a tensor without dimensions.
    """
    found = margins(errors, reference)
    rounding = _ROUNDING * sum(torch.cat([errors, reference]).chunk(4))
    right = (found > rounding).to(torch.float32)
    ties = (found.abs() <= rounding).to(torch.float32)
    return (right + 0.5 * ties).mean()
