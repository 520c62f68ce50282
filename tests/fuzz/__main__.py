"""python dev.py fuzz [TARGET …] [--cases N] [--seed S] [--case NUMBER]: a night's fuzzing, a part of it, or one case
again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
import sys

import torch

from . import engine

TARGETS = {
    "loras": "Loras",
    "states": "States",
    "widgets": "Widgets",
    "api": "ApiWorkflows",
    "editor": "EditorWorkflows",
    "datasets": "Datasets",
    "configs": "DatasetConfigs",
    "arguments": "Arguments",
    "routes": "Routes",
}
MODULES = {"api": "workflows", "editor": "workflows", "configs": "dataset_configs"}


def target(name: str) -> type[engine.Target]:
    """The class of a target; it is imported when it is asked for."""
    return getattr(importlib.import_module(f".{MODULES.get(name, name)}", __package__), TARGETS[name])


def main(arguments: list[str]) -> int:
    """Run; 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="python dev.py fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    parser.add_argument("--cases", type=int, help="of each target (default: a night's)")
    parser.add_argument("--seed", type=int, help="what the cases are drawn from (default: a new one)")
    parser.add_argument("--case", type=int, help="run only the case with this number, here")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON at the end")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    torch.set_num_threads(1)
    kinds = [target(name) for name in given.targets or TARGETS]
    if given.case is not None:
        for kind in kinds:
            print(engine.replayed(kind, seed, given.case))
        return 0
    reports = []
    print(
        f"seed {seed}\n| target | cases | of use | refused | failures | a second |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for kind in kinds:
        report = engine.watched(
            kind, seed, given.cases or kind.night, lambda line: print(line, file=sys.stderr, flush=True)
        )
        reports.append(report)
        print(report.line(), flush=True)
        for failure in report.failures:
            print(failure, flush=True)
    if given.json:
        print(json.dumps([vars(report) for report in reports]))
    return int(any(report.failures for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
