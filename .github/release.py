"""What a release is, for publish.yml: writes the version, its part of CHANGELOG.md and whether it is new into the files
that GITHUB_OUTPUT and GITHUB_ENV name. Leaves with an error where the owner's name has not been set.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(project: str) -> str:
    """The version that a pyproject.toml has."""
    return re.findall(r'^version = "(.+)"$', project, re.MULTILINE)[0]


def changes(changelog: str, version: str) -> str:
    """The part of a changelog on one version, without its heading. Raises ValueError if there is none."""
    found = re.search(rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md says nothing about {version}")
    return found[1].strip()


def main() -> None:
    """Write what publish.yml asks for."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if "OWNER" in project:
        sys.exit("pyproject.toml: put the account that publishes Graft in the place of OWNER")
    released = version(project)
    tags = subprocess.run(
        ["git", "tag", "--list", f"v{released}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), released)
    with open(os.environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
        file.write(f"version={released}\nnew={'' if tags.stdout.strip() else 'yes'}\n")
    with open(os.environ["GITHUB_ENV"], "a", encoding="utf-8") as file:
        file.write(f"COMFY_NODE_CHANGELOG<<END_OF_CHANGES\n{text}\nEND_OF_CHANGES\n")


if __name__ == "__main__":
    main()
