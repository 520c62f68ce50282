"""What MkDocs asks while it builds the site: the help pages of all nodes in the navigation, and links to files that are
no pages, which lead to the repository.
"""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {"Help pages": ("en", "{}.md"), "帮助": ("zh", "{}/zh.md")}


def on_config(config: Any) -> Any:
    """Add a section with the help page of each node for each language."""
    config.repo_url = re.findall('^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    config.repo_name = config.repo_url.rpartition("/")[2]
    for section, (language, name) in LANGUAGES.items():
        nodes = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
        titles = {node["display_name"]: "web/docs/" + name.format(identifier) for identifier, node in nodes.items()}
        config.nav.append({section: [{title: titles[title]} for title in sorted(titles)]})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let the links of a page to files of the repository lead there, and those to README.md to the first page."""
    source = ROOT / ("README.md" if page.file.src_uri == "index.md" else page.file.src_uri)

    def follow(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if page.file.src_uri.endswith("/zh.md") and target.endswith(".png"):
            return f"](../{target})"  # the editor looks for pictures beside the English page
        file = (source.parent / target).resolve()
        if ":" in target or not file.exists():
            return link[0]
        name = file.relative_to(ROOT).as_posix()
        if name == "README.md":
            return f"]({'../' * page.file.src_uri.count('/')}index.md{anchor})"
        if files.get_file_from_path(name):
            return link[0]
        return f"]({config.repo_url}/blob/main/{quote(name)}{anchor})"

    return LINK.sub(follow, markdown)
