"""Puts token routing on a ModelPatcher: the wrapper that takes tokens out of blocks while a training step runs."""

from __future__ import annotations

from typing import Any

from ..patches.core.clones import find_call, put_call
from ..patches.token_routing.route import RoutingCall
from ..patches.token_routing.routing_plan import Routing, plan_routing
from ..patches.token_routing.settings import RoutingSettings
from .comfyui_objects import Model

ROUTING_KEY = "graft_tread"  # of the wrapper


def apply_routing(patcher: Model, settings: RoutingSettings) -> tuple[Any, Routing, bool]:
    """Apply token routing to a ModelPatcher: (a clone with it, the plan, whether it replaces an earlier one).

    The clone is the patcher itself if no token skips anything and none did before.
    """
    plan = plan_routing(patcher.model.diffusion_model, settings)
    earlier = routing_of(patcher)
    if settings.changes_nothing and earlier is None:
        return patcher, plan, False
    clone = patcher.clone()
    put_call(clone, ROUTING_KEY, None if settings.changes_nothing else RoutingCall(settings, plan))
    return clone, plan, earlier is not None


def routing_of(patcher: Model) -> RoutingCall | None:
    """The token routing on a ModelPatcher."""
    call: RoutingCall | None = find_call(patcher, ROUTING_KEY)
    return call


def routing_metadata(patcher: Model) -> dict[str, str]:
    """The metadata of a LoRA trained on a MODEL (`ss_tread_*`), empty without token routing."""
    call = routing_of(patcher)
    if call is None:
        return {}
    return call.settings.metadata()
