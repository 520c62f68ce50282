"""`curve`: prints the measurements of a stored run as CSV."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from . import hosts, log
from .embedded import HostError
from .torchrun import of_pack


def main(arguments: argparse.Namespace) -> int:
    """Print the table of a run's furthest state; returns 1 if the run is not stored or cannot be read."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            choice = hosts.choose(arguments.comfyui, arguments.embedded, os.environ)
            host = hosts.open_host(choice, True, arguments.input, arguments.output, make_folders=False)
        table = of_pack(host, "host.stored_runs").table_of(arguments.run)
    except (HostError, OSError, ValueError) as error:
        log.say(f"graft_nodes: {error}", sys.stderr)
        return 1
    log.write(table)
    return 0
