"""Prints what the embedded host's core nodes say of themselves, as JSON; test_core_nodes.py starts it in a process
without a ComfyUI.
"""

from __future__ import annotations

import asyncio
import json
import sys


def described(cls) -> dict:
    """A node's inputs (type and limits by name), outputs and whether it is an output node, comparable between hosts."""
    inputs = {}
    for category, entries in cls.INPUT_TYPES().items():
        for name, entry in entries.items():
            options = entry[1] if not isinstance(entry, str) and len(entry) > 1 else {}
            kind = "hidden" if category == "hidden" else "COMBO" if isinstance(entry[0], list) else str(entry[0])
            limits = {key: options[key] for key in ("default", "min", "max", "multiline") if key in options}
            choices = entry[0] if isinstance(entry[0], list) else []
            inputs[name] = {"category": category, "type": kind, "limits": limits, "choices": list(choices)}
    return {
        "inputs": inputs,
        "outputs": [str(kind) for kind in cls.RETURN_TYPES],
        "output_node": bool(getattr(cls, "OUTPUT_NODE", False)),
    }


def main() -> None:
    """Describe every core node of the open host."""
    import nodes

    asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    json.dump({node_id: described(cls) for node_id, cls in nodes.NODE_CLASS_MAPPINGS.items()}, sys.stdout)


if __name__ == "__main__":
    from graft_nodes.headless import embedded

    assert embedded.install(), "a real ComfyUI is importable here"
    main()
