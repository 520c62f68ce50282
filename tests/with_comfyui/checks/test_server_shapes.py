"""The embedded host's server against the real one: the same requests, and answers of the same shape."""

import gzip
import json
import os
import sys
import uuid
from hashlib import sha256
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "editor"))
from serving import RealServer, Server, front_end, picture, samples, shows
from test_server_preferences import save_preview

# What a node may say of itself in the newest ComfyUI, and no node here does; and what differs by place.
UNUSED = (
    "input",
    "python_module",
    "price_badge",
    "output_matchtypes",
    "essentials_category",
    "dev_only",
    "has_intermediate_output",
)
# Entries that the real server has and this one has no use for.
LEFT_OUT = {
    "/system_stats": {"system.comfy_package_versions.*"},
    "/features": {"extension.manager.*", "supports_progress_text_metadata"},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    place = tmp_path_factory.mktemp("real")
    running = RealServer(place, os.environ["GRAFT_TEST_COMFYUI"], str(front_end(place / "front")))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    place = tmp_path_factory.mktemp("ours")
    (place / "input").mkdir()
    (place / "models" / "loras").mkdir(parents=True)
    running = Server(place, "--front-end-root", str(front_end(place / "front")))
    yield running
    running.stop()


def kind(value):
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def differences(real, ours, where=""):
    """Where the real answer has an entry that ours lacks or whose value is of another kind; nothing of either is
    something.
    """
    if real is None or ours is None:
        return []
    if kind(real) != kind(ours):
        return [f"{where}: {kind(real)} there, {kind(ours)} here"]
    if isinstance(real, dict):
        found = [f"{where}.{key}".lstrip(".") + ": missing here" for key in real if key not in ours]
        return found + [
            one
            for key in real
            if key in ours
            for one in differences(real[key], ours[key], f"{where}.{key}".lstrip("."))
        ]
    if isinstance(real, list) and real and ours:
        return differences(real[0], ours[0], f"{where}[]")
    return []


def without(found, patterns):
    import fnmatch

    return [one for one in found if not any(fnmatch.fnmatch(one.split(":")[0], pattern) for pattern in patterns)]


@pytest.mark.parametrize(
    "path",
    [
        "/prompt",
        "/queue",
        "/history",
        "/users",
        "/settings",
        "/settings/Never.Set",
        "/userdata?dir=workflows",
        "/v2/userdata",
        "/models",
        "/models/loras",
        "/experiment/models",
        "/embeddings",
        "/system_stats",
        "/features",
        "/extensions",
        "/object_info/NoSuchNode",
        "/internal/logs",
        "/internal/logs/raw",
        "/internal/folder_paths",
        "/internal/files/output",
        "/global_subgraphs",
        "/api/jobs",
    ],
)
def test_what_a_page_asks_when_it_opens(real, ours, path):
    for server in (real, ours):
        server.ask("/userdata/workflows%2Fa.json", "POST", b"{}")
    theirs, mine = real.ask(path), ours.ask(path)
    if theirs.status == 404 and path in ("/features", "/api/jobs", "/global_subgraphs", "/v2/userdata"):
        pytest.skip("newer than this ComfyUI")
    assert (theirs.status, theirs.headers["content-type"].split(";")[0]) == (
        mine.status,
        mine.headers["content-type"].split(";")[0],
    )
    ids = path in (
        "/global_subgraphs",
        "/settings",
        "/internal/folder_paths",
    )  # keys of the one are not those of the other
    found = [] if ids else differences(theirs.json, mine.json)
    assert without(found, LEFT_OUT.get(path, ())) == []
    assert kind(theirs.json) == kind(mine.json)


def test_nodes_are_described_alike(real, ours):
    theirs, mine = real.ask("/object_info").json, ours.ask("/object_info").json
    shared = sorted(set(theirs) & set(mine))
    assert {"TrainStep", "GraftLoRAStack", "SaveImage", "KSampler", "LoadImage"} <= set(shared)
    for node in shared:
        texts = (
            ()
            if theirs[node]["python_module"].startswith("custom_nodes.")
            else ("output_tooltips", "search_aliases", "deprecated")
        )
        described = {name: value for name, value in theirs[node].items() if name not in (*UNUSED, *texts)}
        assert differences(described, mine[node], node) == [], node
        graft = theirs[node]["python_module"].startswith("custom_nodes.")
        if graft:
            assert (
                theirs[node]["input_order"] == mine[node]["input_order"]
                and theirs[node]["output"] == mine[node]["output"]
            ), node


def ran(server, prompt, **more):
    answer = server.queue(prompt, **more)
    assert answer.status == 200, answer.body
    return answer.json, server.wait(answer.json["prompt_id"])


def test_queueing_and_history(real, ours):
    extra = {"extra_pnginfo": {"workflow": {"id": str(uuid.uuid4()), "nodes": []}}}
    (put, entry), (mine, own) = (
        ran(server, shows("shape"), client_id="c", extra_data=extra) for server in (real, ours)
    )
    assert differences(put, mine) == [] and differences(entry, own) == []
    assert len(entry["prompt"]) == len(own["prompt"])
    assert [event for event, _ in entry["status"]["messages"]] == [event for event, _ in own["status"]["messages"]]
    assert (
        differences([data for _, data in entry["status"]["messages"]], [data for _, data in own["status"]["messages"]])
        == []
    )
    jobs = real.ask("/api/jobs")
    if jobs.status == 200:
        assert differences(jobs.json, ours.ask("/api/jobs").json) == []
        theirs, mine = (server.ask(f"/api/jobs/{put['prompt_id']}").json for server, put in ((real, put), (ours, mine)))
        assert differences(theirs, mine) == []


def wrong(**changes):
    prompt = shows()
    for name, value in changes.items():
        node, _, field = name.partition("_")
        prompt[node[1:]]["inputs"][field] = value
    return prompt


@pytest.mark.parametrize(
    "prompt",
    [
        wrong(n1_width=-5),
        wrong(n1_width="wide"),
        wrong(n2_images=["1"]),
        {},
        {**shows(), "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x"}}},
        {"1": {"class_type": "NoSuchNode", "inputs": {}}},
        {**samples(1), "4": {**samples(1)["4"], "inputs": {**samples(1)["4"]["inputs"], "sampler_name": "none"}}},
    ],
)
def test_what_is_wrong_with_a_workflow(real, ours, prompt):
    theirs, mine = real.queue(prompt), ours.queue(prompt)
    assert theirs.status == mine.status == 400
    older = {"invalid_prompt": "missing_node_type"}  # what ComfyUI 0.3.64 calls it
    assert mine.json["error"]["type"] in (theirs.json["error"]["type"], older.get(theirs.json["error"]["type"]))
    assert differences(theirs.json["error"], mine.json["error"]) == []
    if theirs.json["node_errors"] and prompt.get("1", {}).get("class_type") == "EmptyImage":
        for node, found in theirs.json["node_errors"].items():
            own = mine.json["node_errors"][node]
            assert [error["type"] for error in found["errors"]] == [error["type"] for error in own["errors"]]
            assert differences(found, own) == [] and found["dependent_outputs"] == own["dependent_outputs"]


def test_pictures_and_user_files(real, ours):
    for server in (real, ours):
        assert server.upload("up.png", picture()).json == {"name": "up.png", "subfolder": "", "type": "input"}
        assert server.upload("up.png", picture()).json["name"] == "up.png"
        assert server.upload("up.png", picture(9)).json["name"] == "up (1).png"
        assert server.ask("/view?filename=up.png&type=input").body == picture()
        for query in ("channel=rgb", "channel=a", "preview=jpeg;50", "preview=webp"):
            assert server.ask(f"/view?filename=up.png&type=input&{query}").status == 200
        assert server.ask("/view?filename=none.png").status == 404 and server.ask("/view").status in (400, 404)
        assert server.ask("/userdata/x%2Fy.json?overwrite=false", "POST", b"{}").json == "x/y.json"
        assert server.ask("/userdata/x%2Fy.json?overwrite=false", "POST", b"{}").status == 409
        assert server.ask("/userdata/x%2Fy.json/move/x%2Fz.json", "POST").json == "x/z.json"
        assert server.ask("/userdata?dir=x&recurse=true&split=true").json == [["z.json", "z.json"]]
        assert server.ask("/userdata/x%2Fz.json", "DELETE").status == 204
        assert server.ask("/userdata/x%2Fz.json").status == 404
        assert server.ask("/settings/A.b", "POST", b"[1]").status == 200 and server.ask("/settings/A.b").json == [1]
    theirs, mine = (server.ask("/userdata/i.json?full_info=true", "POST", b"{}").json for server in (real, ours))
    assert differences(theirs, mine) == []


def test_graft_routes_are_on_both(real, ours):
    for server in (real, ours):
        for prefix in ("", "/api"):
            offered = ["graft_demo/zorp.safetensors", "graft_demo/mauve.safetensors"]
            assert server.ask(f"{prefix}/graft/loras").json == {"loras": offered}
            assert server.ask(f"{prefix}/graft/runs").json == {"runs": []}
            assert server.ask(f"{prefix}/graft/runs/none").status == 404
            assert server.ask(f"{prefix}/graft/runs/none/latest").status == 404
            assert server.ask(f"{prefix}/graft/runs/..%2Fx/latest").status in (400, 404)
            assert server.ask(f"{prefix}/graft/runs/none/nokey").status == 400
            assert server.ask(f"{prefix}/graft/lora_info?name=../../x.safetensors").status == 404
            assert server.ask(f"{prefix}/graft/lora_info").status == 400
            assert server.ask(f"{prefix}/graft/stop?run=none", "POST", {}).status == 409
            assert server.ask(f"{prefix}/graft/stop", "POST", {}).status == 400


def test_no_route_of_graft_takes_what_another_site_sends_or_what_is_compressed(real, ours):
    body = gzip.compress(json.dumps({"folder": "none"}).encode())
    for server in (real, ours):
        for prefix in ("", "/api"):
            for headers in ({"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
                assert server.ask(f"{prefix}/graft/stop?run=none", "POST", {}, headers).status == 403
            packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            answer = server.ask(f"{prefix}/graft/dataset/glance", "POST", body, packed)
            assert answer.status == 415
            assert server.ask(f"{prefix}/graft/dataset/glance", "POST", {"folder": "none"}).status != 415


def test_no_page_of_another_site_writes_a_caption_at_the_address_that_the_network_knows(real):
    """ComfyUI compares Origin with Host on this machine's own addresses only."""
    folder = real.place / "input" / "kept"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(picture())
    (folder / "a.txt").write_text("my caption")
    change = {"folder": "kept", "name": "a.png", "text": None, "version": sha256(b"my caption").hexdigest()}
    page = {"Host": "192.168.1.5:8188", "Origin": "http://evil.example"}
    for prefix in ("", "/api"):
        address, body = f"{prefix}/graft/dataset/caption", json.dumps(change).encode()
        assert real.ask(address, "POST", body, {**page, "Content-Type": "text/plain"}).status == 403
        assert real.ask(address, "POST", change, page).status == 403
        without_origin = {"Host": page["Host"], "Content-Type": "text/plain"}
        assert real.ask(address, "POST", body, without_origin).status == 415
    assert (folder / "a.txt").read_text() == "my caption"
    own = {"Host": page["Host"], "Origin": f"http://{page['Host']}"}
    assert real.ask("/graft/dataset/caption", "POST", change, own).status == 200
    assert not (folder / "a.txt").exists()


def test_a_marked_pair_of_previews_is_told_on_both(real, ours):
    for server in (real, ours):
        red, blue = (save_preview(server, "marked", step, color) for step, color in ((5, "red"), (10, "blue")))
        for prefix in ("", "/api"):
            body = {"run": "marked", "better": blue, "worse": red}
            assert server.ask(f"{prefix}/graft/preferences", "POST", body).status == 200
            told = server.ask(f"{prefix}/graft/preferences?run=marked").json
            assert told == {"folder": "graft_preferences/marked", "pairs": 1, "marked": [[blue, red]]}
