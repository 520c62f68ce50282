"""Graft's own routes: LoRA files, stored runs, and the stop that keeps the state of a training step."""

import sys
import time

import pytest
from serving import PATIENCE, few_pictures, lora, trains


@pytest.fixture(scope="module")
def few(server):
    """Eight of the demo's pictures in the input folder."""
    few_pictures(server.place / "input")


def test_lora_files(server):
    name = 'ünï <b>\'s "style".safetensors'
    path = server.place / "models" / "loras" / name
    lora(path)
    from urllib.parse import quote

    assert name in server.ask("/graft/loras").json["loras"]
    said = server.ask(f"/graft/lora_info?name={quote(name)}").json
    assert said["name"] == name and said["size"] == path.stat().st_size
    assert (
        said["layers"] == 1
        and list(said["ranks"]) == [4]
        and said["words"] == "zorp, <b>bold</b>"
        and said["todo"] == {"factor": "2"}
    )
    (server.place / "models" / "loras" / "broken.safetensors").write_bytes(b"\xff" * 20)
    broken = server.ask("/graft/lora_info?name=broken.safetensors")
    assert broken.status == 400 and "broken.safetensors" in broken.json["error"]
    (server.place / "models" / "loras" / "pickle.pt").write_bytes(b"\x80\x02}q\x00.")
    pickled = server.ask("/graft/lora_info?name=pickle.pt")
    assert pickled.status == 400 and "pickle" in pickled.json["error"]
    assert server.ask("/graft/lora_info?name=none.safetensors").status == 404
    for query in ("", "?name=", "?name=%00", "?name=" + "x" * 2000):
        assert server.ask(f"/graft/lora_info{query}").status == 400


@pytest.mark.skipif(sys.platform == "win32", reason="a backslash is a separator there, and links need rights")
def test_a_name_with_the_other_systems_slashes_is_the_file_and_the_listed_name_comes_first(server):
    loras = server.place / "models" / "loras"
    for name in ("deep/slash.safetensors", "deep\\twin.safetensors", "deep/twin.safetensors"):
        (loras / name).parent.mkdir(exist_ok=True)
        lora(loras / name)
    (loras / "deep" / "twin.safetensors").write_bytes(b"\xff" * 20)
    said = server.ask("/graft/lora_info?name=deep%5Cslash.safetensors")
    assert said.status == 200 and said.json["size"] == (loras / "deep" / "slash.safetensors").stat().st_size
    assert server.ask("/graft/lora_info?name=deep%5Ctwin.safetensors").status == 200, "a file that is really called so"
    (server.place / "models" / "out.safetensors").write_bytes(b"")
    for name in ("deep%5C..%5C..%5Cout.safetensors", "..%5Cout.safetensors", "deep/..%5C../out.safetensors"):
        assert server.ask(f"/graft/lora_info?name={name}").status == 404, name
    (loras / "gone.safetensors").symlink_to(loras / "nowhere.safetensors")
    gone = server.ask("/graft/lora_info?name=gone.safetensors")
    assert gone.status == 404 and "a link to a missing file" in gone.json["error"]
    (loras / "gone.safetensors").unlink()


def test_what_a_missing_file_may_have_been(server):
    from urllib.parse import quote

    for name in ("style/paper cut.safetensors", "old/Zorp.safetensors", "zorp v1.safetensors", "unlike.safetensors"):
        path = server.place / "models" / "loras" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    near = {
        missing: server.ask(f"/graft/near_loras?name={quote(missing)}").json["near"]
        for missing in ("new/zorp.safetensors", "style\\paper cut.safetensors", "qqq")
    }
    assert near["new/zorp.safetensors"][0] == "old/Zorp.safetensors", "the same file in another folder comes first"
    assert near["style\\paper cut.safetensors"] == ["style/paper cut.safetensors"] and near["qqq"] == []
    assert server.ask("/graft/near_loras").status == 400


def test_a_finished_run_is_shown_again(server, few):
    entry = server.wait(server.queue(trains("short run", 4)).json["prompt_id"])
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    [result] = entry["outputs"]["4"]["graft_run"]
    assert result["run"] == "short run"
    [listed] = [run for run in server.ask("/graft/runs").json["runs"] if run["run"] == "short run"]
    assert listed["step"] == 4 and listed["states"] >= 1
    states = server.ask("/graft/runs/short%20run").json["states"]
    assert states[-1]["key"] == result["key"] and states[-1]["step"] == 4
    shown = server.ask(f"/graft/runs/short%20run/{result['key']}").json
    history = shown["history"]
    assert shown["step"] == 4 and len(history["loss"]) == len(history["rate"]) == len(history["norm"]) == 4
    assert history["average_validation"] == [], "it keeps no average"
    assert [step for step, _ in history["validation"]] == [0, 2, 4] and all(loss > 0 for loss in history["loss"])
    assert server.ask("/graft/runs/short%20run/latest").json == shown
    assert server.ask(f"/graft/runs/short%20run/{result['key'][:32]}").json == shown
    assert server.ask(f"/graft/runs/short%20run/{'0' * 64}").status == 404
    state = server.place / "output" / "graft" / "short run" / result["key"][:32] / "state.json"
    before = state.read_text()
    state.write_text(before.replace('"step": 4', '"step": 5'))
    damaged = server.ask(f"/graft/runs/short%20run/{result['key']}")
    assert damaged.status == 409 and "hash" in damaged.json["error"]
    state.write_text(before)


def stop(server, run):
    """Ask until there is a step to stop."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        answer = server.ask(f"/graft/stop?run={run}", "POST")
        if answer.status == 200:
            return answer.json
        assert answer.status == 409 and run in answer.json["error"]
        time.sleep(0.05)
    raise AssertionError("nothing ran that could be stopped")


def test_a_stopped_step_keeps_its_state_and_goes_on_when_queued_again(server, few):
    prompt_id = server.queue(trains("stopped", 100_000)).json["prompt_id"]
    assert stop(server, "stopped") == {"run": "stopped", "stopping": True}
    entry = server.wait(prompt_id)
    assert entry["status"]["status_str"] == "success"
    [first] = entry["outputs"]["4"]["graft_run"]
    reached = server.ask(f"/graft/runs/stopped/{first['key']}").json["step"]
    assert 1 <= reached < 100_000
    assert server.ask("/graft/stop?run=stopped", "POST").status == 409
    prompt_id = server.queue(trains("stopped", 100_000)).json["prompt_id"]
    stop(server, "stopped")
    entry = server.wait(prompt_id)
    [second] = entry["outputs"]["4"]["graft_run"]
    shown = server.ask(f"/graft/runs/stopped/{second['key']}").json
    before = server.ask(f"/graft/runs/stopped/{first['key']}").json
    assert shown["step"] > reached and shown["history"]["loss"][:reached] == before["history"]["loss"]


def test_what_is_wrong_with_a_file_names_no_folder_and_quotes_nothing(server):
    import json

    loras = server.place / "models" / "loras"
    header = json.dumps({"a secret of this file": "another secret"}).encode()
    contents = {
        "quoted.safetensors": len(header).to_bytes(8, "little") + header,
        "short.safetensors": b"a secret",
        "pickled.safetensors": b"\x80\x02}q\x00.a secret",
    }
    for name, content in contents.items():
        (loras / name).write_bytes(content)
        reply = server.ask(f"/graft/lora_info?name={name}")
        assert reply.status == 400 and name in reply.json["error"]
        assert "secret" not in reply.json["error"] and str(server.place) not in reply.json["error"]
        (loras / name).unlink()
    state = server.place / "output" / "graft" / "of nobody" / ("0" * 32) / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    reply = server.ask(f"/graft/runs/of%20nobody/{'0' * 32}")
    assert reply.status == 409 and "state.json" in reply.json["error"] and str(server.place) not in reply.json["error"]


@pytest.mark.parametrize(
    "headers", [{"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
)
def test_no_other_site_stops_a_step_whatever_the_host_lets_through(headers):
    """ComfyUI 0.3.64 lets these requests through to the pack's routes."""
    import asyncio
    import json
    import types

    from graft_nodes.host import routes

    handlers = {}

    class Table(list):
        def get(self, path):
            return lambda handler: handlers.setdefault(path, handler)

        post = get

    instance = types.SimpleNamespace(routes=Table())
    routes.register_on(instance)

    def ask(given):
        request = types.SimpleNamespace(method="POST", headers=given, query={"run": "mine"})
        reply = asyncio.run(handlers["/graft/stop"](request))
        return reply.status, json.loads(reply.text)["error"]

    assert ask(headers) == (403, "another site's page asked for this; only ComfyUI's own page may")
    for own in ({}, {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:8188"}, {"Sec-Fetch-Site": "none"}):
        assert ask(own) == (409, "no training step of run 'mine' is running")
