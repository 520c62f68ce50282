"""The command line in a process of its own, with the nodes of odd_nodes.py in its host: python drive.py run
WORKFLOW.json …

With GRAFT_TEST_COMFYUI the host is that checkout (opened on the CPU, its folders in a temporary place), else the
embedded one.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parents[1] / "comfyui_api_stubs" / "tests" / "workflows")]

import odd_nodes  # noqa: E402
from graft_nodes.headless import command, hosts  # noqa: E402


def main() -> int:
    """Run the command line."""
    if "GRAFT_TEST_COMFYUI" in os.environ:
        sys.path.insert(0, str(HERE.parent / "with_comfyui"))
        import open_comfyui

        open_comfyui.open_checkout(os.environ["GRAFT_TEST_COMFYUI"])
    load = hosts.load_nodes

    def load_with_odd_nodes(host: hosts.Host) -> None:
        load(host)
        host.nodes.NODE_CLASS_MAPPINGS.update(odd_nodes.NODE_CLASS_MAPPINGS)
        host.nodes.NODE_DISPLAY_NAME_MAPPINGS.update(odd_nodes.NODE_DISPLAY_NAME_MAPPINGS)

    hosts.load_nodes = load_with_odd_nodes
    return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
