"""Rounding a float32 weight to the type the model stores it in."""

import torch


def stochastic_rounding(value, dtype, seed=0):
    """`value` as `dtype`; 8-bit floats, which ComfyUI rounds stochastically, are refused."""
    if dtype in (getattr(torch, "float8_e4m3fn", None), getattr(torch, "float8_e5m2", None)):
        raise NotImplementedError(
            f"patching a weight stored as {dtype} needs a real ComfyUI; load the model as bfloat16 or float32"
        )
    return value.to(dtype=dtype)
