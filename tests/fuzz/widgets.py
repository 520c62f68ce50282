"""Texts of widgets, which may come with a workflow: stacks, block weights, schedules, patterns, rates, filters,
prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime
from typing import Any

from graft_nodes.ema import decay, weighted_sum
from graft_nodes.headless.embedded import prompt_text
from graft_nodes.patches.lora_files import block_weights, stack_rows
from graft_nodes.training.data import tags
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.optimizers import block_rates
from graft_nodes.training.trainable import patterns
from hypothesis import strategies as st

from .damage import CORPUS, damaged_bytes, damaged_json, text_of
from .engine import Target

ROWS = (
    '{"version": 1, "rows": [{"file": "a", "on": true, "model": 0.7, "clip": 1.0, "blocks": "in1: 0.5", "schedule":'
    ' "0-50%"}]}'
)
PARSERS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "rows": (stack_rows.parse, (ROWS, stack_rows.EMPTY)),
    "block weights": (block_weights.parse, ("1,0,0.5", "in1: 0.5, mid: 1", "INALL", "double_blocks.*: 0.5", "1," * 20)),
    "schedule": (stack_rows.parse_schedule, ("0-50%: 1", "0: 0, 50%: 1, 100%: 0.5", "0.2 - 0.8")),
    "patterns": (patterns.parse_patterns, ("blocks.*", "!ff", "/attn[12]/=8:4", "a=4\nb,!c", "*.to_q = 16")),
    "block rates": (block_rates.parse_block_rates, ("in* = 0.5", "/mid/ = 2\nout* = 0", "")),
    "widths": (decay.parse_widths, ("0.05 0.10", "0.1", "")),
    "mixture": (lambda text: weighted_sum.parse_shares(text, 3), ("1 2 3", "0.5, 0.5, 0", "")),
    "filters": (Filters.parse, tuple(path.read_text("utf-8") for path in sorted((CORPUS / "texts").glob("*.yaml")))),
    "prompt": (
        lambda text: prompt_text.choose(text, random.Random(0)),
        ("a {b|c {d|e}} f", "{{x}}", "\\{a|b\\}", "// note\n{a|b}"),
    ),
    "file name": (
        lambda text: prompt_text.fill_in(text, lambda *_: "x", datetime(2026, 1, 1)),
        ("%date:yyyy-MM-dd%", "a %Node.seed% b", "%%%"),
    ),
    "caption": (lambda text: tags.fill_wildcards(text, None), ("{a|b {c|d}}", "__a__, {{x}}", "a, b")),
}


class Widgets(Target):
    """See above."""

    name = "widgets"
    night = 1_000_000

    def cases(self) -> st.SearchStrategy[Any]:
        """(a parser's name, a text)."""

        def of(name: str, texts: tuple[str, ...]) -> st.SearchStrategy[Any]:
            damaged = damaged_bytes([text.encode() for text in texts], 5).map(
                lambda body: body.decode("utf-8", "surrogateescape")
            )
            count = 300 if name == "filters" else 3000
            deep = st.sampled_from(("{a|", "[", "(", "__a", "%", "//", "{", "!", ",")).map(lambda mark: mark * count)
            json_text = damaged_json([ROWS]).map(text_of).map(bytes.decode)
            return st.tuples(
                st.just(name), st.one_of(damaged, damaged, damaged, json_text if name == "rows" else damaged, deep)
            )

        return st.one_of(*(of(name, texts) for name, (_, texts) in PARSERS.items()))

    def attempt(self, case: Any) -> None:
        """Parse it."""
        name, text = case
        PARSERS[name][0](text)
