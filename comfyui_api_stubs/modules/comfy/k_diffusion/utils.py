"""Shapes for samplers."""


def append_dims(x, target_dims):
    """x with dimensions of size one appended up to target_dims."""
    if x.ndim > target_dims:
        raise ValueError(f"tensor has {x.ndim} dimensions, more than the {target_dims} asked for")
    return x.reshape(*x.shape, *(1 for _ in range(target_dims - x.ndim)))
