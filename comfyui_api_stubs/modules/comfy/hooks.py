"""Names of ComfyUI's conditioning hooks; the embedded host knows empty groups only and refuses to run others."""

import enum


class EnumHookMode(enum.Enum):
    """Whether weights of hooks are cached."""

    MinVram = "minvram"
    MaxSpeed = "maxspeed"


class EnumWeightTarget(enum.Enum):
    """Which model a weight hook changes."""

    Model = "model"
    Clip = "clip"


class HookGroup:
    """A list of hooks."""

    def __init__(self):
        self.hooks = []

    def __len__(self):
        return len(self.hooks)

    def add(self, hook):
        """Append a hook once."""
        if hook not in self.hooks:
            self.hooks.append(hook)

    def contains(self, hook):
        """Whether the hook is in the group."""
        return hook in self.hooks

    def clone(self):
        """A copy with the same hooks."""
        copy = HookGroup()
        copy.hooks = list(self.hooks)
        return copy


def create_target_dict(target=None, **kwargs):
    """{"target": target} and whatever else is said about the target."""
    return {"target": target, **kwargs} if target is not None else dict(kwargs)


def refuse(hooks):
    """Raise when there is a hook to run."""
    if hooks is not None and len(hooks):
        raise NotImplementedError(
            "conditioning hooks (scheduled LoRAs, model as LoRA) need a real ComfyUI; remove them from the workflow"
        )
