"""Names of ComfyUI's conditioning hooks; the embedded host knows empty groups only and refuses to run others."""

import enum


class EnumHookMode(enum.Enum):
    """Whether weights of hooks are cached."""

    MinVram = "minvram"
    MaxSpeed = "maxspeed"


class EnumHookType(enum.Enum):
    """What a hook changes."""

    Weight = "weight"
    ObjectPatch = "object_patch"
    AdditionalModels = "add_models"
    TransformerOptions = "transformer_options"
    Injections = "add_injections"


class EnumWeightTarget(enum.Enum):
    """Which model a weight hook changes."""

    Model = "model"
    Clip = "clip"


class EnumHookScope(enum.Enum):
    """Which conditionings a hook speaks to."""

    AllConditioning = "all_conditioning"
    HookedOnly = "hooked_only"


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

    def get_type(self, hook_type):
        """The hooks of one type."""
        return [hook for hook in self.hooks if hook.hook_type == hook_type]

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
