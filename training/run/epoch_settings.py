"""Settings that a run takes from a file at the beginning of each epoch: EveryDream2's load_settings_every_epoch.

What is taken becomes part of the state, with the step (`TrainState.taken`), and its settings are part of the position
from there on. So a run that goes on from a stored state has the settings that led to it, and a training that was given
them by hand at that step has the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...settings.declaration import settings_of
from ...storage.bounded_read import MB, read_json
from ..data.dataset import Dataset
from ..data.epoch_order import ends_epoch
from ..objective.settings import ObjectiveSettings
from ..optimizers.settings import OptimizerSettings
from ..settings import StepSettings
from ..state import Settings, TrainState, take_values

FILE = "train.json"  # in the run's folder
CLIP_SKIP = "clip_skip"
_MIN_SNR = "min_snr_gamma"
# EveryDream2's keys that can change while a run goes on, and the field of Graft's settings for each.
FIELDS = {
    "lr": "learning_rate",
    "clip_grad_norm": "clip_norm",
    "cond_dropout": "conditioning_dropout",
    "zero_frequency_noise_ratio": "offset_noise",
    "pyramid_noise_discount": "pyramid_noise",
    _MIN_SNR: "gamma",
    CLIP_SKIP: CLIP_SKIP,
    "save_every_n_epochs": "keep_epochs",
    "save_ckpts_from_n_epochs": "keep_from",
}
MODEL_KEYS = ("cond_dropout", "zero_frequency_noise_ratio", "pyramid_noise_discount", _MIN_SNR, CLIP_SKIP)  # no VAE's
_ALWAYS = ("save_full_precision", "save_optimizer")  # states are float32, and have their optimizer
_NOTHING = "Nothing is taken from it, and the settings stay as they are"
_KINDS = (OptimizerSettings, ObjectiveSettings, StepSettings)


def describe(values: Mapping[str, Any]) -> str:
    """Values by field in words, each by its setting's label."""
    labels = {CLIP_SKIP: "CLIP skip"}
    for kind in _KINDS:
        labels.update({name: one.label for name, one in settings_of(kind).items()})
    shown = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return ", ".join(f"{labels[name]} {value}" for name, value in shown.items())


def report(state: TrainState, since: int) -> list[str]:
    """What a run has taken from its file; the first `since` times are left out."""
    return [f"from step {step + 1} on, by {FILE}: {describe(values)}" for step, values in state.taken[since:]]


def find_values(content: Any, weighting: str) -> dict[str, Any]:
    """The values of a file by field, as it has them. null leaves a setting as it is, but of min_snr_gamma it switches
    min-SNR off, as 0 does.

    Args:
        content: the file's.
        weighting: the loss weighting so far.

    Raises:
        ValueError: where the content is not a table of settings.
    """
    if not isinstance(content, dict):
        raise ValueError('is not a table of settings such as {"cond_dropout": 0.04}')
    values = {FIELDS[key]: content[key] for key in FIELDS if content.get(key) is not None}
    if content.get(_MIN_SNR):
        values["weighting"] = "min-snr"
    elif _MIN_SNR in content:
        values.pop("gamma", None)
        if weighting == "min-snr":
            values["weighting"] = "none"
    return values


class EpochSettings:
    """The file of settings of one call of Train Step.

    A file that cannot be read, or with a value that its setting cannot have, changes nothing: the settings stay, and
    `problem` says why, until it is right.

    Args:
        path: the file. It may come and go.
        epoch: the steps of an epoch.
        step_settings: those of Train Step.
        fit: gives the dataset with its captions encoded at another CLIP skip, as Graft counts it.
        count_clip_skip: EveryDream2's number of a CLIP skip, as Graft counts it. Raises ValueError.
        check: raises ValueError for settings that do not suit the model.
        leave_out: the keys that this kind of training cannot take.
        say: is told what is taken, and what is wrong.
    """

    def __init__(
        self,
        path: Path,
        epoch: Fraction,
        step_settings: StepSettings,
        fit: Callable[[Dataset, int], Dataset],
        count_clip_skip: Callable[[int], int],
        check: Callable[[Settings], object],
        leave_out: Collection[str] = (),
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.path, self.epoch, self.step_settings = path, epoch, step_settings
        self.fit, self.count_clip_skip, self.check = fit, count_clip_skip, check
        self.leave_out, self.say = leave_out, say
        self.problem = ""  # with the file as it is
        self.shown = ""  # what was taken last, by EveryDream2's keys
        self.notes: list[str] = []  # for the report
        self.paused_at = -1  # the step after which training pauses to take settings
        self._keys = ""  # what was read last, by EveryDream2's keys
        self._refused: dict[str, Any] | None = None  # values that could not be taken
        self._state: TrainState | None = None  # that trains now, and its dataset
        self._dataset: Dataset | None = None

    def begins_epoch(self, step: int) -> bool:
        """Whether an epoch begins after a step."""
        return step == 0 or ends_epoch(step, self.epoch, 1)

    def pauses(self, step: int) -> bool:
        """Whether training is to pause after a step, because an epoch begins and the file says something new."""
        if self._state is None or self._dataset is None or not self.begins_epoch(step):
            return False
        if not self._read(self._state, self._dataset):
            return False
        self.paused_at = step
        return True

    def take(self, state: TrainState, dataset: Dataset) -> tuple[TrainState, Dataset]:
        """The state and its dataset, where an epoch begins with what the file says."""
        self._state, self._dataset = state, dataset
        if not self.begins_epoch(state.step):
            return state, dataset
        values = self._read(state, dataset)
        if values:
            fitted = dataset
            try:
                fitted = self.fit_to(values, dataset)
            except ValueError as error:
                self._refused = values
                self._note(f"{self.path}: {error}. {_NOTHING}")
                return state, dataset
            state, dataset = take_values(state, values), fitted
            self.step_settings, self.shown = _with_values(self.step_settings, values), self._keys
            self.say(f"{self.path}, from step {state.step + 1} on: {describe(values)}")
        self._state, self._dataset = state, dataset
        return state, dataset

    def go_on(self, state: TrainState, dataset: Dataset, since: int) -> Dataset:
        """The dataset of a stored state that took settings on its way, after the first `since` of them."""
        for _, values in state.taken[since:]:
            self.step_settings = _with_values(self.step_settings, values)
            dataset = self.fit_to(values, dataset)
        return dataset

    def fit_to(self, values: Mapping[str, Any], dataset: Dataset) -> Dataset:
        """The dataset with the CLIP skip of these values."""
        if values.get(CLIP_SKIP, dataset.clip_skip) == dataset.clip_skip:
            return dataset
        return self.fit(dataset, values[CLIP_SKIP])

    def _read(self, state: TrainState, dataset: Dataset) -> dict[str, Any]:
        """What the file says and is not so yet, by field; nothing where something is wrong with it."""
        if not self.path.is_file():
            self._note(f"{self.path} is not there: no settings are taken from it")
            return {}
        try:
            content = read_json(self.path, MB, has_comments=True)
            values = self._values(content, state.settings, dataset)
        except ValueError as error:
            self._note(f"{self.path}: {error}. {_NOTHING}")
            return {}
        if values == self._refused:
            return {}
        self.problem, self._refused = "", None
        ignored = sorted(content.keys() - (FIELDS.keys() - set(self.leave_out)) - set(_ALWAYS))
        if ignored:
            self._remember(f"{self.path.name}: not taken while a run goes on: {', '.join(map(repr, ignored))}")
        if values:
            self._keys = ", ".join(f"{key} {content[key]}" for key in FIELDS if _changes(key, values))
        return values

    def _values(self, content: Any, settings: Settings, dataset: Dataset) -> dict[str, Any]:
        values = find_values(content, settings.objective.weighting)
        for key in self.leave_out:
            values.pop(FIELDS[key], None)
        if _MIN_SNR in self.leave_out:
            values.pop("weighting", None)
        if CLIP_SKIP in values:
            if type(values[CLIP_SKIP]) is not int or not 0 <= values[CLIP_SKIP] <= 24:
                raise ValueError(f"CLIP skip is {values[CLIP_SKIP]!r}, expected a whole number from 0 to 24")
            values[CLIP_SKIP] = self.count_clip_skip(values[CLIP_SKIP])
        wanted = settings.with_values(values)
        self.check(wanted)
        before = {CLIP_SKIP: dataset.clip_skip}
        after = {CLIP_SKIP: values.get(CLIP_SKIP, dataset.clip_skip)}
        steps = _with_values(self.step_settings, values)
        pairs = (
            (wanted.optimizer, settings.optimizer),
            (wanted.objective, settings.objective),
            (steps, self.step_settings),
        )
        for new, old in pairs:
            names = values.keys() & settings_of(new).keys()
            before.update({name: getattr(old, name) for name in names})
            after.update({name: getattr(new, name) for name in names})
        return {name: after[name] for name in values if after[name] != before[name]}

    def _note(self, problem: str) -> None:
        """Say what is wrong with the file, once until it is something else."""
        if problem != self.problem:
            self.problem = problem
            self.say(problem)
        self._remember(problem)

    def _remember(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _changes(key: str, values: Mapping[str, Any]) -> bool:
    return FIELDS[key] in values or (key == _MIN_SNR and "weighting" in values)


def _with_values(settings: StepSettings, values: Mapping[str, Any]) -> StepSettings:
    return replace(settings, **{name: values[name] for name in values.keys() & settings_of(settings).keys()})
