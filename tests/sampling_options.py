"""What sampling hands to a model as its transformer_options, for tests that call the model themselves."""

from __future__ import annotations

from typing import Any


def sampling_options(patcher: Any) -> dict[str, Any]:
    """The patcher's own options with its wrappers (of stacks, of ToDo, of compiling) among them, merged by the open
    host's own rule.
    """
    import comfy.patcher_extension

    options = patcher.model_options.get("transformer_options", {})
    return {
        **options,
        "wrappers": comfy.patcher_extension.merge_nested_dicts(options.get("wrappers", {}), patcher.wrappers),
    }
