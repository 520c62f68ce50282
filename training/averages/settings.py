"""The settings of EMA Merge: which average of weights, and how it is put on a model."""

from __future__ import annotations

from dataclasses import dataclass

from ...settings.declaration import check_values, setting

PROFILES = ("latest", "width", "best", "uniform", "exponential", "weights", "search")


@dataclass(frozen=True)
class AverageSettings:
    """The settings of EMA Merge; plain values, checked on creation. `weights` is text: what it means depends on the
    profile.
    """

    profile: str = setting(
        "averaging profile",
        "latest",
        "Which average to use. latest: the EMA kept during training, or the last file. width: an average of the"
        " width below. best: tries several widths and takes the one with the lowest held-out loss. uniform: the"
        " plain mean. exponential: newer files count more. weights: the numbers you give. search: finds each"
        " snapshot's share by held-out loss.",
        choices=PROFILES,
    )
    width: float = setting(
        "average width",
        0.1,
        "For width and exponential: how far back the average reaches, as a fraction of the run (its standard"
        " deviation). Raise it for a smoother result, lower it to stay closer to the last weights.",
        low=0.001,
        high=0.28,
        step=0.005,
    )
    weights: str = setting(
        "weights or widths",
        "",
        "For profile weights: one number per file, in the order of the report. For profiles best and search: the"
        " widths to try; leave empty to try ten.",
    )
    strength: float = setting(
        "strength",
        1.0,
        "How strongly the average is applied. 1 applies it as it is; 0 leaves the model unchanged.",
        low=-10.0,
        high=10.0,
        step=0.01,
    )
    mode: str = setting(
        "patch mode",
        "auto",
        "How the average is put on the model, as in Patch Model with LoRA Stack. Keep auto unless the report tells"
        " you otherwise.",
        choices=("auto", "merge", "bypass", "host"),
        advanced=True,
    )
    algebra: str = setting(
        "averaging method",
        "auto",
        "How LoRA files are averaged. factors averages the up and down matrices, for files of one run. products"
        " averages what they do to the weights, for any ranks. auto uses factors if all files come from the same run,"
        " and products otherwise.",
        choices=("auto", "factors", "products"),
        advanced=True,
    )
    rank: int = setting(
        "maximum rank",
        0,
        "For averaging method products: reduce the average to this rank by SVD. 0 is exact and adds up the ranks of"
        " the files.",
        low=0,
        high=4096,
        advanced=True,
    )
    search_tries: int = setting(
        "search tries",
        60,
        "For profile search: how many averages it tries. Each takes as long as validating half of the held-out"
        " images. Raise it if you have many snapshots and time.",
        low=1,
        high=10000,
        advanced=True,
    )
    search_seed: int = setting(
        "search seed",
        0,
        "For profile search: sets the order in which directions are tried. The same seed gives the same average. Try"
        " another one to see how much the result depends on it.",
        low=0,
        high=0xFFFFFFFFFFFFFFFF,
        advanced=True,
    )

    def __post_init__(self) -> None:
        check_values(self, "EMA Merge")
