"""What the training nodes say: in words and numbers, from states and outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from ...ema.decay import EMASettings
from ..data.dataset import Dataset
from ..data.epoch_order import batches_per_epoch
from ..optimizers.checks import remarks
from ..optimizers.learning_rate_schedule import peak_rate
from ..run.call import Outcome
from ..state import TrainState
from ..store.store import DiskUse


def beginning(state: TrainState, dataset: Dataset, unhashed: Sequence[str]) -> str:
    """A run before its first step."""
    adapter, settings = state.start.adapter, state.settings.optimizer
    count = sum(tensor.numel() for tensor in state.trained.values())
    if adapter.full_weights:
        size = ""
    else:
        size = f", rank {adapter.rank}, alpha {adapter.alpha or adapter.rank:g}"
    whole = adapter.full_weights
    modules = len({(name if whole else name.removesuffix(".weight")).rpartition(".")[0] for name in state.trained})
    rounds = batches_per_epoch(dataset, settings.batch_size) / settings.accumulation
    lines = [
        f"run {state.run!r}, identity {state.start.digest[:16]}",
        f"trains {count:,} numbers in {modules} modules: {adapter.kind} on {adapter.targets}{size}",
        (
            f"{settings.optimizer} at {peak_rate(settings):g}, {settings.schedule} over {settings.total_steps} steps, "
            f"batch {settings.batch_size} x {settings.accumulation}"
        ),
        *remarks(settings),
        f"{len(dataset.images)} pictures, {len(dataset.held_out)} held out; a round is {rounds:g} steps",
    ]
    if not dataset.held_out:
        lines.append("no picture is held out, so there is no validation")
    if state.start.ema is not None:
        lines.append(
            f"average: {state.start.ema.schedule}, every {state.start.ema.interval} steps" + _more(state.start.ema)
        )
    if unhashed:
        lines.append("results are neither stored nor reused, these cannot be hashed: " + ", ".join(unhashed))
    return "\n".join(lines)


def _more(ema: EMASettings) -> str:
    said = ""
    if ema.snapshots:
        widths = " and ".join(f"{width:g}" for width in ema.widths)
        said += f"; snapshots every {ema.snapshots} steps, of widths {widths}"
    return said + (f"; the weights are set to it every {ema.switch_every} steps" if ema.switch_every else "")


def disk_use(used: DiskUse) -> str:
    """The report's sentence on the disk space of a run and of all runs, and on their limit."""
    if used.states == 1:
        states = "1 state"
    else:
        states = f"{used.states} states"
    said = (
        f"the run's folder holds {states}, {used.run / 1e6:.1f} MB; delete it to free them. All runs hold"
        f" {used.every / 1e9:.2f} GB"
    )
    if not used.limit:
        return f"{said}, without a limit (GRAFT_STORE_GB is 0)"
    if used.every > used.limit:
        needed = ", more than that because this run or unfinished ones need it"
    else:
        needed = ""
    return f"{said} of at most {used.limit / 1e9:g} (GRAFT_STORE_GB){needed}"


def step(
    before: TrainState, outcome: Outcome, unhashed: Sequence[str], pictures: Sequence[Mapping[str, str]] = ()
) -> str:
    """What a call of TrainStep did."""
    state = outcome.state
    losses = state.history.loss[before.step :]
    lines = [f"run {state.run!r}: step {before.step} to {state.step}, {outcome.trained} trained now"]
    lines += [*outcome.notes, *remarks(state.settings.optimizer)]
    if outcome.trained and outcome.seconds:
        lines.append(f"{outcome.seconds / outcome.trained:.3f} s a step, {outcome.seconds:.1f} s in all")
    if losses:
        some = max(1, min(10, len(losses) // 2))
        lines.append(
            f"loss {losses[0]:.4g} at the first step, {losses[-1]:.4g} at the last; mean of the first {some}"
            f" {fmean(losses[:some]):.4g}, of the last {some} {fmean(losses[-some:]):.4g}"
        )
    if state.history.comparable:
        (first_step, first), (last_step, last) = state.history.comparable[0], state.history.comparable[-1]
        best = state.history.best
        if best is None:
            among = "none of them finite"
        else:
            among = f"best {best[1]:.4g} at {best[0]}"
        lines.append(f"held-out loss {first:.4g} at step {first_step}, {last:.4g} at {last_step}, {among}")
        if best is not None and outcome.best is not None and outcome.best != outcome.folder:
            lines.append(
                f"the state of the best step is kept in {outcome.best}; {best[0]} steps from the same beginning give it"
            )
    count = sum(tensor.numel() for tensor in state.trained.values())
    lines.append(
        f"{count:,} trained numbers, MODEL has the last weights{' (the average: EMA Merge)' if state.average else ''}"
    )
    if state.settings.objective.zero_terminal_snr:
        lines.append(
            "trained with zero terminal SNR: MODEL samples with the same noise levels. With the LoRA's file elsewhere"
            " use ModelSamplingDiscrete with sampling v_prediction and zsnr on"
        )
    if pictures:
        lines.append(
            f"{len(pictures)} previews, from {pictures[0]['filename']} to {pictures[-1]['filename']} in the run's"
            " folder"
        )
    if outcome.folder is not None:
        lines.append(f"stored in {outcome.folder}")
        if outcome.used is not None:
            lines.append(disk_use(outcome.used))
    elif unhashed:
        lines.append("not stored, these cannot be hashed: " + ", ".join(unhashed))
        if state.start.ema is not None and state.start.ema.snapshots:
            lines.append("so no snapshots of averages were kept")
    return "\n".join(lines)
