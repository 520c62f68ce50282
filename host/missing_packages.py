"""Which training features need a package that is not installed."""

from __future__ import annotations

from ..storage.printable import pip_install


def missing_packages() -> list[str]:
    """One sentence for each feature whose package is missing: what it is and what to install."""
    from ..training.optimizers import build
    from ..training.optimizers.registry import OPTIMIZERS
    from ..training.reports import tensorboard

    messages = [message for optimizer in OPTIMIZERS.names() for message in build.missing_package(optimizer)]
    try:
        tensorboard.check()
    except ValueError:
        messages.append(f"TensorBoard logs of Train Step need the package tensorboard: {pip_install('tensorboard')}")
    return messages
