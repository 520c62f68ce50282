"""What Apply TREAD's report says."""

from __future__ import annotations

from .routing_plan import Routing, UNetRouting
from .settings import RoutingSettings


def report(settings: RoutingSettings, plan: Routing, replaced: bool) -> str:
    """The report of Apply TREAD."""
    if settings.changes_nothing:
        if replaced:
            return "Skip ratio 0: the model's earlier token routing is taken off."
        return "Skip ratio 0: no token skips anything."
    if isinstance(plan, UNetRouting):
        where = f"the {plan.skipped} transformer blocks at the UNet's greatest width, of {plan.total}"
        lines, what = ["Start layer and end layer do not apply to UNets."], "image"
    else:
        first, last = plan.skipped[0], plan.skipped[-1]
        where = f"blocks {first} to {last} of 0 to {plan.total - 1}"
        share, what = settings.ratio * len(plan.skipped) / plan.total, plan.routed.what
        lines = [f"That is {share:.0%} of the blocks' work on {what} tokens, and more of their attention's."]
    until = ""
    if settings.disable_after >= 1:
        until = f", until step {settings.disable_after:g}"
    elif settings.disable_after > 0:
        until = f", for the first {settings.disable_after:.0%} of the run"
    lines.insert(
        0, f"In each training step{until}, a random {settings.ratio:.0%} of the {what}'s tokens skips {where}."
    )
    lines.append("Previews, validation and sampling run on the whole model.")
    if replaced:
        lines.append("It replaces the model's earlier token routing.")
    return "\n".join(lines)
