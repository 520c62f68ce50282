"""Linear layers and what goes into them, with numbers that are drawn from a seed."""

import torch
from torch import nn

CPU = torch.device("cpu")


def layer(rows=48, columns=32, bias=True, dtype=torch.float32):
    draws = torch.Generator().manual_seed(1)
    line = nn.Linear(columns, rows, bias=bias, dtype=dtype).requires_grad_(False)
    for p in line.parameters():
        p.copy_(torch.randn(p.shape, generator=draws))
    return line


def seen(*shape, dtype=torch.float32):
    """Tokens of very different sizes."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return (x * torch.logspace(-3, 3, shape[-2])[:, None]).to(dtype).requires_grad_()
