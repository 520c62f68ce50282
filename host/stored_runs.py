"""The stored runs of ComfyUI's output folder, for commands."""

from __future__ import annotations

from . import folders


def table_of(run: str) -> str:
    """The measurements of a run up to its furthest state, as CSV.

    Raises FileNotFoundError, with the names of the runs that there are, or ValueError for no name of a run.
    """
    from ..training.reports.curve_table import curve_table
    from ..training.store import listing

    root = folders.training_folder()
    try:
        return curve_table(listing.describe_state(root, run, "latest")["history"])
    except FileNotFoundError as error:
        names = ", ".join(one["run"] for one in listing.runs(root)) or "none"
        raise FileNotFoundError(f"{error}. Stored runs: {names}") from error
