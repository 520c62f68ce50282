"""python -m comfyui_api_stubs compare --comfyui PATH: prints where the embedded host and a ComfyUI differ."""

from __future__ import annotations

import argparse
import sys

from .compare import NotComfyUI, as_json, compare, report


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status: 0, or 2 when the folder is no ComfyUI."""
    parser = argparse.ArgumentParser(prog="python -m comfyui_api_stubs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("compare", help="print where the embedded host and a real ComfyUI differ")
    comparing.add_argument("--comfyui", required=True, metavar="PATH", help="folder of a ComfyUI checkout")
    comparing.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        found = compare(arguments.comfyui)
    except NotComfyUI as error:
        print(f"comfyui_api_stubs: {error}", file=sys.stderr)
        return 2
    print(as_json(found) if arguments.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
