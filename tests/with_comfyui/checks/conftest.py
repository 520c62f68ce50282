"""Lets the checks import the tiny models beside this folder, and writes what they find about model families to the file
that GRAFT_FAMILIES names, for docs/families.md.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

CELLS = {}  # {family: {column: [{"outcome": …, "says": …}, …]}}


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("column")
        if marker is not None:
            item.user_properties += [("column", marker.args[0]), ("family", item.callspec.params["name"])]


def pytest_runtest_logreport(report):
    noted = dict(report.user_properties)
    if "column" not in noted or (report.when != "call" and report.outcome == "passed"):
        return
    says = noted.get("says", "")
    if report.outcome == "skipped":
        says = report.longrepr[2].removeprefix("Skipped: ")
    cells = CELLS.setdefault(noted["family"], {})
    cells.setdefault(noted["column"], []).append({"outcome": report.outcome, "says": says})


def pytest_sessionfinish():
    if "GRAFT_FAMILIES" in os.environ and CELLS:
        import comfyui_version

        found = {"comfyui": comfyui_version.__version__, "families": CELLS}
        Path(os.environ["GRAFT_FAMILIES"]).write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
