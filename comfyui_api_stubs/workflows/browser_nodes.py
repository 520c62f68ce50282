"""Nodes that exist only in the browser: the front end's own and those of packs' JavaScript. No server has a class for
them, so what they do to links has to be known here.

The front end never sends them. What is linked to their output n gets what their input n gets, as with a reroute; a Get
node leads on to what is linked to the Set node of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The front end's own.
EDITOR_ONLY = frozenset(("Note", "MarkdownNote", "Reroute", "PrimitiveNode"))
# By Get node: the Set node that it reads, and whether it also sees those of the graphs around its subgraph.
SETS_OF_GETS = {"GetNode": ("SetNode", True), "easy getNode": ("easy setNode", False)}
_RGTHREE = (
    "Bookmark",
    "Fast Actions Button",
    "Fast Bypasser",
    "Fast Groups Bypasser",
    "Fast Groups Muter",
    "Fast Muter",
    "Fast Node Muter",
    "Label",
    "Mute / Bypass Relay",
    "Mute / Bypass Repeater",
    "Node Collector",
    "Node Combiner",
    "Reroute",
)
# Notes, reroutes, and switches whose effect on other nodes (muted, bypassed) is saved with those.
_PASSIVE = frozenset(
    (
        *(f"{name} (rgthree)" for name in _RGTHREE),
        *SETS_OF_GETS,
        *(name for name, _ in SETS_OF_GETS.values()),
        "easy bookmark",
        "Note+ (mtb)",
        "Note Plus (mtb)",
    )
)
# Nodes that change what the browser sends in a way that the file does not hold: they draw lots, or send to inputs that
# nothing is linked to.
ACTIVE = frozenset(
    (
        "Random Unmuter (rgthree)",
        "Anything Everywhere",
        "Anything Everywhere?",
        "Anything Everywhere3",
        "Prompts Everywhere",
        "Seed Everywhere",
    )
)
NEVER_SENT = EDITOR_ONLY | _PASSIVE
OF_THE_BROWSER = NEVER_SENT | ACTIVE
LIVES_IN_THE_BROWSER = (
    "it works only in the browser, and the file does not hold what it changes there; save the workflow with"
    " 'Export (API)' and run that file"
)
NO_SERVER_BROUGHT_IT = (
    "The file does not say that a server brought it: if it exists only in the browser, save the workflow there with"
    " 'Export (API)' and run that file"
)
# What the front end writes into the properties of a server's node.
_OF_A_SERVER = ("Node name for S&R", "cnr_id", "aux_id")


def is_never_sent(node: Mapping[str, Any], is_known: bool) -> bool:
    """Whether the front end leaves the node out. `is_known`: the host has a class of this name."""
    kind = str(node.get("type"))
    return kind in NEVER_SENT or (not is_known and kind not in ACTIVE and _is_note(node))


def may_live_in_the_browser(node: Mapping[str, Any]) -> bool:
    """Whether the file of a node that the host lacks has no sign that a server brought it."""
    properties = node.get("properties")
    return isinstance(properties, dict) and not any(name in properties for name in _OF_A_SERVER)


def _is_note(node: Mapping[str, Any]) -> bool:
    """Whether it is nothing to a server: without inputs and outputs, and no server's class."""
    return not node.get("inputs") and not node.get("outputs") and may_live_in_the_browser(node)
