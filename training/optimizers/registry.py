"""The optimizers that Graft knows, by name. To add one, write its record in `kinds` and list it here."""

from __future__ import annotations

from ...patches.registry import Registry
from .kinds import (
    adacoor,
    adafactor,
    adamw,
    adamw8bit,
    adopt,
    automagic,
    came,
    lion,
    muon,
    prodigy,
    prodigyplus,
    schedulefree,
    sgd,
)
from .record import OptimizerRecord

OPTIMIZERS: Registry[OptimizerRecord] = Registry(
    "optimizer",
    (
        adamw.RECORD,
        adamw8bit.RECORD,
        adafactor.RECORD,
        lion.RECORD,
        prodigy.RECORD,
        schedulefree.RECORD,
        muon.RECORD,
        adacoor.RECORD,
        sgd.RECORD,
        adopt.RECORD,
        came.RECORD,
        automagic.RECORD,
        prodigyplus.RECORD,
    ),
)
