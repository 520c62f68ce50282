"""Records the front end's own API export of every editor workflow in workflows/, with the schemas of the nodes that
they use.

Not a test: run it by hand, with Playwright and a Chromium, against a running ComfyUI that serves the front end to
record and has odd_nodes.py among its custom nodes:

    python comfyui_api_stubs/tests/workflows/record_exports.py http://127.0.0.1:8188 --chromium /usr/bin/chromium

For each workflows/NAME.editor.json it writes NAME.api.json, and then schemas.json for all of them.
`--folder group_nodes` records that folder instead, as NAME.VERSION.json, and leaves schemas.json as it is: front end
1.27.10 still has group nodes, 1.58.1 makes subgraphs of them. `link_table` is recorded with 1.58.1, and `browser_nodes`
with KJNodes' setgetnodes.js among the extensions too.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path

from playwright.sync_api import Error, sync_playwright

FOLDER = Path(__file__).parent / "workflows"
EXPORT = """async (workflow) => {
  await window.app.loadGraphData(workflow);
  await new Promise((done) => setTimeout(done, 300));
  return (await window.app.graphToPrompt()).output;
}"""


def main() -> None:
    """Record every workflow of the folder (or the named ones)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--chromium", default=None)
    parser.add_argument("--folder", default=FOLDER.name)
    arguments = parser.parse_args()
    paths = sorted(FOLDER.with_name(arguments.folder).glob("*.editor.json"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(arguments.url)
        page.wait_for_function(
            "window.app && window.app.vueAppReady !== false && window.app.extensionManager && window.app.graph"
        )
        page.wait_for_timeout(3000)
        version = page.evaluate("window.__COMFYUI_FRONTEND_VERSION__")
        for path in paths:
            if arguments.names and path.name.split(".")[0] not in arguments.names:
                continue
            try:
                output = page.evaluate(EXPORT, json.loads(path.read_text(encoding="utf-8")))
            except Error as error:
                print(path.name, "is not exported by the front end:", error.message.splitlines()[0])
                continue
            kind = "api" if arguments.folder == FOLDER.name else version
            target = path.with_name(path.name.replace(".editor.", f".{kind}."))
            target.write_text(json.dumps(output, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(path.name, len(output), "nodes")
        browser.close()
    if arguments.folder == FOLDER.name:
        write_schemas(arguments.url, version)


def write_schemas(url: str, version: str) -> None:
    """Keep what /object_info says of the nodes in the recorded exports (without tooltips)."""
    with urllib.request.urlopen(f"{url}/object_info") as answer:
        everything = json.load(answer)
    used = {
        node["class_type"]
        for path in FOLDER.glob("*.api.json")
        for node in json.loads(path.read_text(encoding="utf-8")).values()
    }
    for path in FOLDER.glob("*.editor.json"):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        sheets = [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]
        used |= {node["type"] for sheet in sheets for node in sheet["nodes"]} & set(everything)
    found = {}
    for name in sorted(used):
        info = everything[name]
        kinds = [kind for kind in ("required", "optional") if kind in info["input"]]
        inputs = {kind: {key: _plain(entry) for key, entry in info["input"][kind].items()} for kind in kinds}
        found[name] = {
            "title": info["display_name"],
            "inputs": inputs,
            "outputs": info["output"],
            "output_node": info["output_node"],
        }
    text = json.dumps({"frontend": version, "nodes": found}, indent=1, ensure_ascii=False)
    (FOLDER / "schemas.json").write_text(text + "\n", encoding="utf-8")


def _plain(entry: list) -> list:
    return [entry[0], *({key: value for key, value in settings.items() if key != "tooltip"} for settings in entry[1:])]


if __name__ == "__main__":
    main()
