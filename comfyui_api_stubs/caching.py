"""Which results of nodes are kept for later runs: ComfyUI's four ways, their options on the command line, and the
host's executor that follows them.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .host_error import HostError

GB = 1024**3
# What a ComfyUI of 0.3.64 calls a way that newer ones have another name for.
OLDER_NAMES = {"NONE": "DEPENDENCY_AWARE"}


@dataclass(frozen=True)
class Caching:
    """How results are kept; `way` is the name in ComfyUI's CacheType."""

    way: str = "CLASSIC"
    results: int = 0  # LRU: how many of earlier workflows
    free_gb: float | None = None  # RAM_PRESSURE: how much memory has to stay free; None lets the machine decide

    def type_in(self, execution: Any) -> Any:
        """The host's CacheType for it. Raises HostError if the host has none."""
        names = (self.way, OLDER_NAMES.get(self.way, self.way))
        for name in names:
            if hasattr(execution.CacheType, name):
                return getattr(execution.CacheType, name)
        raise HostError(
            f"this ComfyUI cannot keep results as {option(self.way)} says; leave the option out, or use a newer ComfyUI"
        )

    def limits(self, memory: int) -> dict[str, float]:
        """ComfyUI's cache_args on a machine with so many bytes of memory."""
        active = self.free_gb
        if active is None:
            active = min(10.0, max(2.0, 0.1 * memory / GB))
        return {"lru": self.results, "ram": active, "ram_inactive": max(active, min(128.0, memory / GB))}


def option(way: str) -> str:
    """The option on the command line for a way."""
    return {"RAM_PRESSURE": "--cache-ram"}.get(way, f"--cache-{way.lower()}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options, under ComfyUI's names."""
    ways = parser.add_argument_group("results of nodes", "what is kept for later runs").add_mutually_exclusive_group()
    ways.add_argument(
        "--cache-classic", action="store_true", help="keep the results of the latest workflow (the default)"
    )
    ways.add_argument(
        "--cache-lru",
        type=_results,
        default=0,
        metavar="N",
        help="keep up to N results, of earlier workflows too; those unused for longest go first (0: as"
        " --cache-classic)",
    )
    ways.add_argument(
        "--cache-none", action="store_true", help="keep nothing: less memory, and every node runs every time"
    )
    ways.add_argument(
        "--cache-ram",
        nargs="?",
        type=_gigabytes,
        default=False,
        const=None,
        metavar="GB",
        help="keep results while GB of memory stay free (default: a tenth of it, from 2 to 10)",
    )


def _results(text: str) -> int:
    """Parse a number of results."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of results, 0 or more, got {text!r}")
    return int(text)


def _gigabytes(text: str) -> float:
    """Parse an amount of memory."""
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise argparse.ArgumentTypeError(
            f"expected GB of memory, such as 8, got {text!r} (write --cache-ram after the workflow's name, or as"
            " --cache-ram=8)"
        )
    return amount


def chosen(arguments: argparse.Namespace) -> Caching:
    """What the command line asks for."""
    if arguments.cache_lru:
        return Caching("LRU", results=arguments.cache_lru)
    if arguments.cache_none:
        return Caching("NONE")
    if arguments.cache_ram is not False:
        return Caching("RAM_PRESSURE", free_gb=arguments.cache_ram)
    return Caching()


def new_executor(host: Any) -> Any:
    """A new executor of the host that keeps results as it was opened to."""
    import torch

    execution, caching = host.execution, host.caching
    parameters: Mapping[str, Any] = inspect.signature(execution.PromptExecutor.__init__).parameters
    if "cache_args" in parameters:
        limits = caching.limits(host.management.get_total_memory(torch.device("cpu")))
        return execution.PromptExecutor(host.server, cache_type=caching.type_in(execution), cache_args=limits)
    if caching.way == "CLASSIC":
        return execution.PromptExecutor(host.server)
    return execution.PromptExecutor(host.server, cache_type=caching.type_in(execution), cache_size=caching.results)
