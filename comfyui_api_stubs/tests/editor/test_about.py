"""What the front end asks when it opens: nodes, scripts, texts, examples, blueprints, help pages, the machine."""

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from comfyui_api_stubs.tests.editor.serving import PACK as ROOT

PACK = ROOT.name


def test_the_nodes(server):
    nodes = server.ask("/object_info").json
    assert {"PackSteps", "KSampler", "SaveImage"} <= set(nodes)
    save = nodes["SaveImage"]
    assert save["output_node"] is True and save["display_name"] == "Save Image" and save["python_module"] == "nodes"
    assert save["input_order"]["required"] == ["images", "filename_prefix"]
    assert nodes["KSampler"]["output"] == ["LATENT"] and nodes["KSampler"]["output_is_list"] == [False]
    assert nodes["KSampler"]["category"] == "sampling" and nodes["KSampler"]["output_node"] is False
    step = nodes["PackSteps"]
    assert step["python_module"] == f"custom_nodes.{PACK}" and step["input"]["required"]["steps"][1]["default"] == 3
    assert server.ask("/object_info/PackSteps").json == {"PackSteps": step}
    assert server.ask("/object_info/NoSuchNode").json == {}


def test_every_script_that_is_listed_is_there(server):
    listed = server.ask("/extensions").json
    assert "/extensions/core/own.js" in listed
    ours = {f"/extensions/{PACK}/{path.relative_to(ROOT / 'web').as_posix()}" for path in (ROOT / "web").rglob("*.js")}
    assert ours and ours <= set(listed)
    for address in listed:
        reply = server.ask(address)
        assert reply.status == 200 and reply.headers["content-type"] == "text/javascript", address


def test_help_pages(server):
    for page in sorted((ROOT / "web" / "docs").glob("*.md")):
        reply = server.ask(f"/extensions/{PACK}/docs/{page.name}")
        assert (
            reply.status == 200
            and reply.headers["content-type"].startswith("text/markdown")
            and reply.body == page.read_bytes()
        )
    core = server.ask("/docs/KSampler/en.md")
    assert core.status == 200 and core.body.startswith(b"# KSampler") and b"**steps**" in core.body
    assert server.ask("/docs/NoSuchNode/en.md").status == 404
    for node_id in server.ask("/object_info").json:
        assert server.ask(f"/docs/{node_id}/en.md").status == 200, node_id


def test_translations_are_those_of_the_pack(server):
    texts = server.ask("/i18n").json
    languages = {path.name for path in (ROOT / "locales").iterdir() if path.is_dir()}
    assert set(texts) == languages and "en" in languages
    for language in languages:
        for name in ("nodeDefs", "commands", "settings"):
            path = ROOT / "locales" / language / f"{name}.json"
            if path.is_file():
                assert texts[language][name] == json.loads(path.read_text(encoding="utf-8"))


def test_examples_with_their_pictures(server):
    names = sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))
    assert server.ask("/workflow_templates").json == {}, "the front end would list them a second time"
    [module] = server.ask("/templates/index.json").json
    assert [entry["name"] for entry in module["templates"]] == names and module["moduleName"] == PACK
    assert [entry["title"] for entry in module["templates"]] == ["Two steps", "A step"]
    assert all(entry["description"] for entry in module["templates"])
    assert server.ask("/templates/index.de.json").json == [module]
    for name in names:
        source = ROOT / "example_workflows" / name
        workflow, drawn = (Path(f"{source}{suffix}").read_bytes() for suffix in (".json", ".jpg"))
        for address in (f"/api/workflow_templates/{PACK}/{quote(name)}", f"/templates/{quote(name)}"):
            assert server.ask(f"{address}.json").body == workflow
        assert server.ask(f"/api/workflow_templates/{PACK}/{quote(name)}.jpg").body == drawn
        picture = server.ask(f"/templates/{quote(name)}-1.jpg")
        assert picture.body == drawn and picture.headers["content-type"] == "image/jpeg"


def test_blueprints(server):
    found = server.ask("/global_subgraphs").json
    assert sorted(entry["name"] for entry in found.values()) == sorted(
        path.stem for path in (ROOT / "subgraphs").glob("*.json")
    )
    for key, entry in found.items():
        assert (
            entry["source"] == "custom_node"
            and entry["info"] == {"node_pack": f"custom_nodes.{PACK}"}
            and "data" not in entry
        )
        whole = server.ask(f"/global_subgraphs/{key}").json
        assert json.loads(whole["data"]) == json.loads(
            (ROOT / "subgraphs" / f"{entry['name']}.json").read_text(encoding="utf-8")
        )
    assert server.ask("/global_subgraphs/0").status == 404


def test_models_and_what_a_file_says(server):
    import torch
    from safetensors.torch import save_file

    folder = server.place / "models" / "loras" / "sub folder"
    folder.mkdir(exist_ok=True)
    file = folder / "ünï <b>'s.safetensors"
    save_file({"a": torch.zeros(2)}, file, {"ss_network_dim": "16"})
    name = f"sub folder/{file.name}"
    assert name in server.ask("/models/loras").json
    listed = {entry["name"]: entry for entry in server.ask("/experiment/models/loras").json}
    assert listed[name]["size"] == file.stat().st_size and listed[name]["pathIndex"] == 0
    from urllib.parse import quote

    assert server.ask(f"/view_metadata/loras?filename={quote(name)}").json == {"ss_network_dim": "16"}
    assert server.ask("/view_metadata/loras?filename=none.safetensors").status == 404
    assert server.ask(f"/view_metadata/vae?filename={quote(name)}").status == 404
    (folder / "short.safetensors").write_bytes(b"\xff" * 9)
    assert server.ask("/view_metadata/loras?filename=sub%20folder/short.safetensors").status == 404
    assert "loras" in server.ask("/models").json and server.ask("/models/nothing").status == 404
    kinds = {entry["name"]: entry for entry in server.ask("/experiment/models").json}
    assert ".safetensors" in kinds["loras"]["extensions"] and "custom_nodes" not in kinds


def test_the_machine(server):
    stats = server.ask("/system_stats").json
    assert stats["system"]["ram_total"] > stats["system"]["ram_free"] > 0 and stats["devices"][0]["type"] == "cpu"
    assert server.ask("/internal/logs").json == "" and server.ask("/internal/logs/raw").json["entries"] == []
    assert server.ask("/internal/logs/subscribe", "PATCH", {"clientId": "x", "enabled": True}).status == 200
    assert server.ask("/internal/files/output").status == 200 and server.ask("/internal/files/etc").status == 400


@pytest.mark.parametrize(
    "target",
    [
        "/nothing",
        "/assets/nothing.js",
        "/extensions/nobody/x.js",
        "/templates/none.json",
        "/workflow_templates/x/y.json",
    ],
)
def test_what_is_not_there_is_404(server, target):
    assert server.ask(target).status == 404
