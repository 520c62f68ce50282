"""Serves the front end and what node packs add to the editor: scripts, help pages, translations, example workflows and
subgraph blueprints.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from ..host import Host
from . import disk
from .answers import answer, problem
from .files import served
from .paths import inside, single

log = logging.getLogger(__name__)

MOST_BYTES = 100 * disk.MB  # of a workflow or of texts
EXAMPLES = ("example_workflows", "example", "examples", "workflow", "workflows")
# What front ends of 1.49 open with: the essential templates of this title.
MODULE = {"category": "Examples", "title": "Getting Started", "type": "image", "isEssential": True}
LOCALE_FILES = ("nodeDefs", "commands", "settings")


class Packs:
    """The handlers of the routes; `add` registers them. `front_end` is the folder with the front end's index.html."""

    def __init__(self, host: Host, front_end: str):
        self.nodes, self.front_end = host.nodes, front_end

    def add(self, routes: web.RouteTableDef) -> None:
        """Register all routes except those of plain files (see `add_files`)."""
        routes.get("/extensions")(self.extensions)
        routes.get("/i18n")(self.translations)
        routes.get("/workflow_templates")(self.templates)
        routes.get("/workflow_templates/{pack}/{file}")(self.template)
        routes.get("/global_subgraphs")(self.blueprints)
        routes.get("/global_subgraphs/{id}")(self.blueprint)

    def add_files(self, routes: web.RouteTableDef) -> None:
        """Register the routes of plain files, which have no /api prefix. The last one matches every address."""
        routes.get("/")(self.start)
        routes.get("/extensions/{pack}/{file:.*}")(self.extension_file)
        routes.get("/templates/{file}")(self.own_template)
        routes.get("/user.css")(self.no_style)
        routes.get("/docs/{node}/{locale}.md")(self.help_of_core)
        routes.get("/{file:.*}")(self.file)

    async def start(self, request: web.Request) -> web.StreamResponse:
        """GET /: the front end."""
        path = os.path.join(self.front_end, "index.html")
        return web.FileResponse(
            path, headers={"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store, must-revalidate"}
        )

    async def file(self, request: web.Request) -> web.StreamResponse:
        """GET /…: a file of the front end."""
        return served(inside(self.front_end, request.match_info["file"]))

    # scripts and help pages
    async def extensions(self, request: web.Request) -> web.Response:
        """GET /extensions: the URLs of all scripts that the page loads."""
        core = [f"/{name}" for name in _below(self.front_end, "extensions/**/*.js")]
        folders = self.nodes.EXTENSION_WEB_DIRS.items()
        packs = [f"/extensions/{quote(pack)}/{name}" for pack, folder in folders for name in _below(folder, "**/*.js")]
        return answer([*core, *packs])

    async def extension_file(self, request: web.Request) -> web.StreamResponse:
        """GET /extensions/PACK/…: a script, help page or picture of a pack, or a script of the front end."""
        pack, name = request.match_info["pack"], request.match_info["file"]
        folder = self.nodes.EXTENSION_WEB_DIRS.get(pack)
        return served(inside(self.front_end, "extensions", pack, name) if folder is None else inside(folder, name))

    async def help_of_core(self, request: web.Request) -> web.Response:
        """GET /docs/NODE/LOCALE.md: help for a core node: its description, inputs and outputs, read from its class."""
        node_id = request.match_info["node"]
        cls = self.nodes.NODE_CLASS_MAPPINGS.get(node_id)
        if cls is None or not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z]{2,4})?", single(request.match_info["locale"])):
            return web.Response(status=404)
        title = self.nodes.NODE_DISPLAY_NAME_MAPPINGS.get(node_id, node_id)
        return web.Response(text=_help(title, cls), content_type="text/markdown")

    # translations
    async def translations(self, request: web.Request) -> web.Response:
        """GET /i18n: the translations of all packs, by language."""
        return answer(await asyncio.to_thread(self._translations))

    def _translations(self) -> dict[str, Any]:
        translations: dict[str, Any] = {}
        for folder in self.nodes.LOADED_MODULE_DIRS.values():
            for language in sorted(path for path in Path(folder, "locales").glob("*") if path.is_dir()):
                texts = _json(language / "main.json")
                texts.update({name: content for name in LOCALE_FILES if (content := _json(language / f"{name}.json"))})
                translations[language.name] = _merged(translations.get(language.name, {}), texts)
        return translations

    # examples
    async def templates(self, request: web.Request) -> web.Response:
        """GET /workflow_templates: the names, by pack, of the examples that index.json does not list. It lists all of
        them, with titles and descriptions; the front end would show those in both lists twice.
        """
        return answer({})

    async def template(self, request: web.Request) -> web.StreamResponse:
        """GET /workflow_templates/PACK/NAME.json or .jpg: an example or its picture."""
        folder = self.nodes.LOADED_MODULE_DIRS.get(request.match_info["pack"])
        if folder is None:
            return web.Response(status=404)
        paths = [inside(os.path.join(folder, name), request.match_info["file"]) for name in EXAMPLES]
        return served(next((path for path in paths if os.path.isfile(path)), paths[0]))

    async def own_template(self, request: web.Request) -> web.StreamResponse:
        """GET /templates/index.json, NAME.json, NAME-1.jpg: ComfyUI serves its own templates here; this server serves
        the packs' examples.
        """
        file = request.match_info["file"]
        if re.fullmatch(r"index(\.[A-Za-z-]+)?\.json", file):
            return answer(await asyncio.to_thread(self._index))
        if file == "index_logo.json":
            return answer({})
        stem, extension = os.path.splitext(single(file))
        name = (stem.removesuffix("-1") if extension == ".jpg" else stem) + extension
        example = next((path for _, path in self._examples() if path.with_suffix(extension).name == name), None)
        if example is None:
            return web.Response(status=404)
        return served(str(example.with_suffix(extension)))

    def _examples(self) -> list[tuple[str, Path]]:
        """(pack, file) of every example workflow."""
        folders = self.nodes.LOADED_MODULE_DIRS.items()
        return [
            (pack, path)
            for pack, folder in folders
            for name in EXAMPLES
            for path in sorted(Path(folder, name).glob("*.json"), key=lambda path: path.stem)
        ]

    def _index(self) -> list[dict[str, Any]]:
        """The examples of each pack, in the format of the front end's list of templates. The front end asks
        /workflow_templates/PACK for them, and has an entry with the pack's name.
        """
        modules: dict[str, list[dict[str, Any]]] = {}
        for pack, path in self._examples():
            modules.setdefault(pack, []).append(_template(pack, path))
        return [{**MODULE, "moduleName": pack, "templates": entries} for pack, entries in modules.items()]

    async def no_style(self, request: web.Request) -> web.Response:
        """GET /user.css: always empty; the user's style sheet is /userdata/user.css."""
        return web.Response(text="", content_type="text/css")

    # blueprints
    async def blueprints(self, request: web.Request) -> web.Response:
        """GET /global_subgraphs: the subgraphs that packs offer as nodes, by id."""
        return answer({key: entry for key, (entry, _) in self._blueprints().items()})

    async def blueprint(self, request: web.Request) -> web.Response:
        """GET /global_subgraphs/ID: one subgraph with its workflow."""
        blueprint = self._blueprints().get(request.match_info["id"])
        if blueprint is None:
            return problem("there is no such subgraph", 404)
        entry, path = blueprint
        return answer({**entry, "data": disk.read(path, MOST_BYTES).decode("utf-8")})

    def _blueprints(self) -> dict[str, tuple[dict[str, Any], Path]]:
        blueprints = {}
        for pack, folder in self.nodes.LOADED_MODULE_DIRS.items():
            for path in sorted(Path(folder, "subgraphs").glob("*.json")):
                key = hashlib.sha256(f"{pack}/{path.name}".encode()).hexdigest()
                blueprints[key] = (
                    {"source": "custom_node", "name": path.stem, "info": {"node_pack": f"custom_nodes.{pack}"}},
                    path,
                )
        return blueprints


def _below(folder: str, pattern: str) -> list[str]:
    """The files that match the pattern, as URLs relative to the folder."""
    return sorted(quote(path.relative_to(folder).as_posix()) for path in Path(folder).glob(pattern) if path.is_file())


def _template(pack: str, path: Path) -> dict[str, Any]:
    """An example in the front end's list of templates."""
    return {
        "name": path.stem,
        "title": _title(path.stem),
        "description": _first_note(path),
        "mediaType": "image",
        "mediaSubtype": "jpg",
        "tags": [pack],
        "models": [],
        "openSource": True,
    }


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is no file, or if it is broken (which is logged)."""
    try:
        content = json.loads(disk.read(path, MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        log.error("%s is not JSON, so its texts are missing: %s", path, error)
        return {}
    if isinstance(content, dict):
        return content
    return {}


def _title(stem: str) -> str:
    """A file's name as a title: with spaces it is one already."""
    if " " in stem:
        return stem
    return stem.replace("_", " ").capitalize()


def _first_note(path: Path) -> str:
    """The first paragraph below the heading of the first note in an example, without * and `; empty without a note."""
    notes = [
        node for node in _json(path).get("nodes", ()) if "Note" in str(node.get("type")) and node.get("widgets_values")
    ]
    if notes:
        lines = str(notes[0]["widgets_values"][0]).splitlines()
    else:
        lines = []
    return next((re.sub(r"[*`]", "", line) for line in lines if line.strip() and not line.startswith("#")), "")


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested dicts; where both have a value, the second one wins."""
    merged = dict(first)
    for key, value in second.items():
        existing = merged.get(key)
        merged[key] = _merged(existing, value) if isinstance(existing, dict) and isinstance(value, dict) else value
    return merged


def _help(title: str, cls: Any) -> str:
    """A help page made from the DESCRIPTION, inputs and outputs of a node class."""
    lines = [f"# {title}", "", getattr(cls, "DESCRIPTION", "") or "A node of the host.", "", "## Inputs", ""]
    for group in ("required", "optional"):
        for name, entry in cls.INPUT_TYPES().get(group, {}).items():
            if isinstance(entry[0], str):
                kind = entry[0]
            else:
                kind = "one of a list"
            tooltip = (entry[1] if len(entry) > 1 else {}).get("tooltip", "")
            lines.append(f"- **{name}** ({kind}{', optional' if group == 'optional' else ''}) {tooltip}".rstrip())
    return "\n".join([*lines, "", "## Outputs", "", *(f"- {kind}" for kind in cls.RETURN_TYPES)]) + "\n"
