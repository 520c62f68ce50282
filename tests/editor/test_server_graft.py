"""Graft's own routes: LoRA files, stored runs, and the stop that keeps the state of a training step."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time

import pytest
from graft_nodes.tests.training.data.making_clips import write_clip, write_frames
from serving import PATIENCE, Server, few_pictures, front_end, lora, picture, trains


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

    for name in ("style/paper cut.safetensors", "old/Quill.safetensors", "quill v1.safetensors", "unlike.safetensors"):
        path = server.place / "models" / "loras" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    near = {
        missing: server.ask(f"/graft/near_loras?name={quote(missing)}").json["near"]
        for missing in ("new/quill.safetensors", "style\\paper cut.safetensors", "qqq")
    }
    assert near["new/quill.safetensors"][0] == "old/Quill.safetensors", "the same file in another folder comes first"
    assert near["style\\paper cut.safetensors"] == ["style/paper cut.safetensors"] and near["qqq"] == []
    assert server.ask("/graft/near_loras").status == 400


def picture_of(said):
    """The picture in a data URL."""
    import base64
    import io

    from PIL import Image

    head, _, text = said["picture"].partition(",")
    assert head == "data:image/webp;base64" and said["problem"] == ""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_a_preview_picture_lies_beside_the_file_or_in_it(server):
    import base64

    loras = server.place / "models" / "loras"
    lora(loras / "seen.safetensors")
    asked = "/graft/lora_preview?name=seen.safetensors"
    assert server.ask(asked).json == {"picture": "", "problem": ""}
    thumbnail = base64.b64encode(picture(30, 20)).decode()
    lora(loras / "seen.safetensors", {"modelspec.thumbnail": f"data:image/png;base64,{thumbnail}"})
    assert picture_of(server.ask(asked).json).size == (30, 20)
    (loras / "seen.preview.png").write_bytes(picture(1000, 500))
    assert picture_of(server.ask(asked).json).size == (256, 128), "a small copy"
    (loras / "seen.png").write_bytes(b"<svg onload=alert(1)>")
    assert server.ask(asked).json == {
        "picture": "",
        "problem": "seen.png cannot be shown as a picture (UnidentifiedImageError)",
    }
    for wrong, status in (("", 400), ("?name=..%2Fx", 404), ("?name=none.safetensors", 404)):
        assert server.ask(f"/graft/lora_preview{wrong}").status == status


def test_trigger_words_come_from_notes_beside_the_file_too(server):
    loras = server.place / "models" / "loras"
    lora(loras / "noted.safetensors")
    (loras / "noted.json").write_text('{"activation text": "zorp, hat", "preferred weight": 0.8}')
    (loras / "noted.civitai.info").write_text('{"trainedWords": ["zorp style", 3, "zorp, hat"]}')
    said = server.ask("/graft/lora_info?name=noted.safetensors").json
    assert said["noted"] == ["zorp, hat", "zorp style"] and said["words"] == "zorp, <b>bold</b>"


def test_a_rows_texts_are_checked_and_its_blocks_are_the_files(server):
    from urllib.parse import urlencode

    def asked(**query):
        return server.ask("/graft/lora_row?" + urlencode({"name": "blocks.safetensors", **query})).json

    lora(server.place / "models" / "loras" / "blocks.safetensors")
    assert asked() == {"blocks": [["IN01", 1.0]], "problems": {}}
    assert asked(blocks="IN=0.5, OUT05=0")["blocks"] == [["IN01", 0.5]]
    seventeen = "1,0.25" + ",0" * 15
    assert asked(blocks=seventeen, schedule="0.2-0.8") == {"blocks": [["IN01", 0.25]], "problems": {}}
    wrong = asked(blocks="1,2", schedule="0.8-0.2")["problems"]
    assert wrong["blocks"].startswith("expected a list of 17") and wrong["schedule"].startswith("expected a start")
    foreign = asked(blocks="D=0, S05=1")["problems"]["blocks"]
    assert foreign == "this file is for a model without D, S05; its blocks are IN01"
    assert asked(name="none.safetensors", blocks="XX=1")["problems"]["blocks"].startswith("XX is not a block")
    assert server.ask("/graft/lora_row?name=a&blocks=" + "1" * 4001).status == 400


OCTETS, JSON = {"Content-Type": "application/octet-stream"}, {"Content-Type": "application/json"}


def test_a_dropped_file_is_stored_whole_checked_and_never_in_place_of_another(server, tmp_path):
    loras = server.place / "models" / "loras"
    lora(tmp_path / "new.safetensors")
    content = (tmp_path / "new.safetensors").read_bytes()

    def send(name, body=content, headers=OCTETS):
        return server.ask(f"/graft/lora_upload?name={name}", "POST", body, headers)

    assert server.ask(f"/graft/lora_upload?name=new.safetensors&size={len(content)}").status == 200
    assert send("new.safetensors").json == {"name": "new.safetensors", "new": True}
    assert (loras / "new.safetensors").read_bytes() == content
    assert "new.safetensors" in server.ask("/graft/loras").json["loras"]
    assert send("NEW.safetensors").json == {"name": "new.safetensors", "new": False}, "the same file"

    lora(tmp_path / "other.safetensors", {"note": "another"})
    other = (tmp_path / "other.safetensors").read_bytes()
    swapped = content[:-1] + bytes([content[-1] ^ 1])
    (loras / "in" / "here").mkdir(parents=True)
    (loras / "folder.safetensors").mkdir()
    (loras / "in" / "here" / "below.safetensors").write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    from safetensors.torch import save
    from torch import zeros

    model = save({"model.diffusion_model.out.0.weight": zeros(4), "first_stage_model.decoder.conv_in.weight": zeros(4)})
    for name, body, status, said in (
        ("new.safetensors", other, 409, "there is another LoRA of this name (new.safetensors), with other content"),
        ("new.safetensors", swapped, 409, "there is another LoRA of this name"),
        ("below.safetensors", swapped, 409, "there is another LoRA of this name (in/here/below.safetensors)"),
        ("folder.safetensors", content, 409, "there is another LoRA of this name (folder.safetensors)"),
        ("model.safetensors", model, 400, "is not a LoRA: none of its 2 tensors"),
        ("cut.safetensors", content[:-10], 400, "cut.safetensors is not a whole safetensors file"),
        ("pickle.safetensors", b"PK\x03\x04" + bytes(40), 400, "is a pickle"),
        ("new.pt", content, 400, "is not a safetensors file"),
        ("..%2Fnew2.safetensors", content, 400, "cannot be the name of a file"),
        ("a%5Cb.safetensors", content, 400, "cannot be the name of a file"),
        (".hidden.safetensors", content, 400, "cannot be the name of a file"),
        ("nul.safetensors", content, 400, "cannot be the name of a file"),
        ("", content, 400, "name is missing"),
    ):
        reply = send(name, body)
        assert reply.status == status and said in reply.json["error"], (name, reply.body)
        assert str(server.place) not in reply.json["error"]
    assert server.ask("/graft/lora_upload?name=new.safetensors&size=7").status == 409
    large = server.ask(f"/graft/lora_upload?name=big.safetensors&size={5 * 10**9}")
    assert large.status == 413 and "more than the 4 GB" in large.json["error"]
    assert server.ask("/graft/lora_upload?name=big.safetensors&size=x").status == 400
    assert send("form.safetensors", headers={"Content-Type": "text/plain"}).status == 415
    for headers in ({"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        assert send("evil.safetensors", headers={**OCTETS, **headers}).status == 403
    assert (loras / "new.safetensors").read_bytes() == content
    names = {path.name for path in loras.iterdir()}
    assert not {name for name in names if name.startswith((".", "evil", "cut", "model", "form", "big", "below"))}, names


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_dropped_file_does_not_replace_a_link_to_a_missing_file(server, tmp_path):
    link = server.place / "models" / "loras" / "unplugged.safetensors"
    link.symlink_to(tmp_path / "disk" / "unplugged.safetensors")
    lora(tmp_path / "sent.safetensors")
    content = (tmp_path / "sent.safetensors").read_bytes()
    reply = server.ask("/graft/lora_upload?name=unplugged.safetensors", "POST", content, OCTETS)
    assert reply.status != 200 and "is a link to a missing file; put the file back" in reply.json["error"]
    assert link.is_symlink()
    link.unlink()


def test_no_file_is_taken_where_it_is_switched_off_or_the_disk_is_full(monkeypatch):
    import shutil
    import types

    import folder_paths
    from graft_nodes.host import lora_routes

    monkeypatch.setenv("GRAFT_UPLOAD_GB", "0")
    with pytest.raises(lora_routes.Refused, match="takes no LoRA files from the browser") as refused:
        lora_routes.check_upload("a.safetensors", 10)
    assert refused.value.status == 403
    monkeypatch.setenv("GRAFT_UPLOAD_GB", "lots")
    with pytest.raises(ValueError, match="GRAFT_UPLOAD_GB is 'lots'"):
        lora_routes.check_upload("a.safetensors", 10)
    monkeypatch.delenv("GRAFT_UPLOAD_GB")
    monkeypatch.setattr(folder_paths, "get_folder_paths", lambda kind: ["."])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**9))
    with pytest.raises(lora_routes.Refused, match=r"has 1.0 GB left: make room for 'a.safetensors' first") as refused:
        lora_routes.check_upload("a.safetensors", 10**9)
    assert refused.value.status == 507


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
    assert server.ask(f"/graft/runs/short%20run/{'0' * 64}?until=9").status == 404
    wrong = server.ask(f"/graft/runs/short%20run/{'0' * 64}?until=x")
    assert wrong.status == 400 and "until: expected the number of a step, found 'x'" in wrong.body.decode()
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
        answer = server.ask(f"/graft/stop?run={run}", "POST", {})
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
    assert server.ask("/graft/stop?run=stopped", "POST", {}).status == 409
    prompt_id = server.queue(trains("stopped", 100_000)).json["prompt_id"]
    stop(server, "stopped")
    entry = server.wait(prompt_id)
    [second] = entry["outputs"]["4"]["graft_run"]
    shown = server.ask(f"/graft/runs/stopped/{second['key']}").json
    before = server.ask(f"/graft/runs/stopped/{first['key']}").json
    assert shown["step"] > reached and shown["history"]["loss"][:reached] == before["history"]["loss"]


def test_a_step_is_asked_to_save_its_state_now_and_says_what_it_cannot(server, few):
    assert server.ask("/graft/save?run=asked", "POST", {}).status == 409
    prompt_id = server.queue(trains("asked", 100_000)).json["prompt_id"]
    end = time.monotonic() + PATIENCE
    while server.ask("/graft/save?run=asked", "POST", {}).status != 200:
        assert time.monotonic() < end
        time.sleep(0.05)
    refused = server.ask("/graft/sample?run=asked", "POST", {})
    assert refused.status == 409 and "that can sample now" in refused.json["error"]
    while not server.ask("/graft/runs/asked").json.get("states"):
        assert time.monotonic() < end
        time.sleep(0.05)
    stop(server, "asked")
    assert server.wait(prompt_id)["status"]["status_str"] == "success"
    assert len(server.ask("/graft/runs/asked").json["states"]) >= 2, "the one saved, and the one stopped at"


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


def test_a_dataset_is_looked_at_before_it_runs(server):
    folder = server.place / "input" / "looked" / "3_cats"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture(64, 48, (number, 30, 40)))
    (folder / "0.txt").write_text("a <b>cat</b>", encoding="utf-8")
    (folder / "bad.png").write_bytes(b"no picture")
    rows = server.ask("/graft/dataset/folders").json
    assert not rows["cut"] and {"name": "looked/3_cats", "pictures": 5} in rows["folders"]
    inputs = {"folder": "looked", "resolution": 64, "bucket_step": 16, "validation": 0.25, "vae": ["1", 2]}
    seen = server.ask("/graft/dataset/glance", "POST", inputs).json
    assert (seen["count"], seen["train"], seen["held_out"], seen["a_round"]) == (4, 3, 1, 12)
    assert seen["problems"] == [{"name": "3_cats/bad.png", "message": "not a picture that can be read"}]
    assert seen["pictures"][0]["name"] == "3_cats/0.png" and seen["pictures"][0]["caption"] == "a <b>cat</b>"
    assert sum(row["train"] for row in seen["buckets"]) == 4 and not seen["refusal"]
    apart = server.ask("/graft/dataset/glance", "POST", {**inputs, "validation_folder": "looked/3_cats"}).json
    assert (apart["train"], apart["held_out"]) == (4, 5)
    filters = {"filters": "validation: {consider_every_nth: 2}"}
    chosen = server.ask("/graft/dataset/glance", "POST", {**inputs, **filters}).json
    assert (chosen["train"], chosen["held_out"]) == (2, 2)  # of 0, 1, 2, 3 and one that cannot be read: 0, 2 and bad
    for change, said in (
        ({"folder": "look"}, "there is no folder 'look' in ComfyUI's input folder; did you mean looked?"),
        ({"folder": ""}, "image folder is empty"),
        ({"folder": "../input"}, "is outside ComfyUI's input folder"),
        ({"folder": ["1", 0]}, "image folder is ['1', 0], expected text"),
        ({"resolution": "x"}, "expected a whole number"),
        ({"filters": "crop: left"}, "crop"),
    ):
        refused = server.ask("/graft/dataset/glance", "POST", {**inputs, **change})
        assert refused.status in (400, 404) and said in refused.json["error"], refused.json
        assert str(server.place) not in refused.json["error"]
    assert server.ask("/graft/dataset/glance", "POST", ["not", "an", "object"]).status == 400
    assert server.ask("/graft/dataset/glance", "POST", b" " * (5 << 20), JSON).status == 413


def test_clips_have_thumbnails_captions_and_counts(server):
    folder = server.place / "input" / "moving"
    write_clip(folder / "walk.mkv", 9, (64, 32))
    write_frames(folder / "run.frames", 6, (64, 32))
    (folder / "walk.txt").write_text("a cat walks")
    (folder / "bad.mp4").write_bytes(b"#EXTM3U")
    (server.place / "outside.frames").mkdir()
    (rows,) = [row for row in server.ask("/graft/dataset/folders").json["folders"] if row["name"] == "moving"]
    assert rows["pictures"] == 3
    inputs = {"folder": "moving", "resolution": 64, "bucket_step": 32, "frames": "5"}
    seen = server.ask("/graft/dataset/glance", "POST", inputs).json
    shown = [(row["name"], row["frames"], row["parts"], row["caption"]) for row in seen["pictures"]]
    assert shown == [("run.frames", [5], 1, ""), ("walk.mkv", [5], 1, "a cat walks")]
    assert [problem["name"] for problem in seen["problems"]] == ["bad.mp4"]
    for name in ("walk.mkv", "run.frames"):
        answer = server.ask(f"/graft/dataset/thumbnail?folder=moving&name={name}")
        assert answer.status == 200 and answer.body[8:12] == b"WEBP"
        assert server.ask(f"/graft/dataset/caption?folder=moving&name={name}").status == 200
    for name, status in (
        ("bad.mp4", 400),
        ("none.mp4", 404),
        ("none.frames", 404),
        ("../../outside.frames", 400),
    ):
        refused = server.ask(f"/graft/dataset/thumbnail?folder=moving&name={name}")
        assert refused.status == status and str(server.place) not in refused.json["error"], (name, refused.json)
    off = server.ask("/graft/dataset/glance", "POST", {**inputs, "frames": "0"}).json
    assert off["count"] == 6 and any(note.startswith("2 clips are left out") for note in off["notes"])
    for file in (folder / "run.frames").iterdir():
        file.unlink()
    refused = server.ask("/graft/dataset/glance", "POST", {**inputs, "frames": "0"})
    assert refused.status == 400 and "set frames of clips" in refused.json["error"]


def test_thumbnails_are_kept_until_the_file_changes(server):
    folder = server.place / "input" / "small"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture(640, 320, (200, 30, 40)))
    first = server.ask("/graft/dataset/thumbnail?folder=small&name=a.png")
    assert first.status == 200 and first.headers["content-type"] == "image/webp" and first.body[8:12] == b"WEBP"
    tag = {"If-None-Match": first.headers["etag"]}
    assert server.ask("/graft/dataset/thumbnail?folder=small&name=a.png", headers=tag).status == 304
    (folder / "a.png").write_bytes(picture(640, 322, (200, 30, 40)))
    assert server.ask("/graft/dataset/thumbnail?folder=small&name=a.png", headers=tag).status == 200
    (folder / "text.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    (folder / "secret.txt").write_text("secret")
    (server.place / "out.png").write_bytes(picture())
    for name, status in (
        ("text.png", 400),
        ("secret.txt", 400),
        ("none.png", 404),
        ("../../out.png", 400),
        ("..%5C..%5Cout.png", 400),
    ):
        refused = server.ask(f"/graft/dataset/thumbnail?folder=small&name={name}")
        assert refused.status == status and str(server.place) not in refused.json["error"], name


def test_a_caption_is_read_and_written_unless_it_has_changed(server):
    folder = server.place / "input" / "edited"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture())
    (folder / "a.txt").write_bytes(b"old\r\nsecond\r\n")
    address, named = "/graft/dataset/caption", {"folder": "edited", "name": "a.png", "captions": "txt"}
    read = server.ask(f"{address}?folder=edited&name=a.png&captions=txt&encoding=utf-8").json
    assert (read["file"], read["text"]) == ("a.txt", "old\r\nsecond\r\n")
    elsewhere = server.ask(f"{address}?folder=edited&name=a.png&captions=metadata")
    assert elsewhere.status == 400 and "caption source metadata reads kohya's" in elsewhere.json["error"]
    wrote = server.ask(address, "POST", {**named, "text": "new", "version": read["version"]}).json
    assert wrote["before"] == read["text"] and (folder / "a.txt").read_bytes() == b"new"
    stale = server.ask(address, "POST", {**named, "text": "mine", "version": read["version"]})
    assert stale.status == 409 and "has changed on disk" in stale.json["error"]
    undone = server.ask(address, "POST", {**named, "text": wrote["before"], "version": wrote["version"]})
    assert undone.status == 200 and (folder / "a.txt").read_bytes() == b"old\r\nsecond\r\n"
    for change in ({"name": "../a.txt"}, {"name": "a.txt"}, {"folder": ".."}, {"text": 3}, {"encoding": "hex"}):
        body = {**named, "text": "x", "version": undone.json["version"], **change}
        assert server.ask(address, "POST", body).status == 400, change
    body = {**named, "text": "x", "version": undone.json["version"]}
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        assert server.ask(address, "POST", body, headers).status == 403
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "a.txt"]
    assert (folder / "a.txt").read_bytes() == b"old\r\nsecond\r\n"


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_no_link_leads_out_of_the_input_folder(server):
    folder = server.place / "input" / "links"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture())
    (server.place / "secret.txt").write_text("secret")
    (server.place / "secret.png").write_bytes(picture())
    (folder / "a.txt").symlink_to(server.place / "secret.txt")
    (folder / "b.png").symlink_to(server.place / "secret.png")
    refused = server.ask("/graft/dataset/caption?folder=links&name=a.png")
    assert refused.status == 400 and "leaves the input folder" in refused.json["error"]
    assert server.ask("/graft/dataset/thumbnail?folder=links&name=b.png").status == 400


def test_a_dropped_caption_lies_beside_its_picture_and_nothing_is_written_over(server):
    for name, content in (("a.png", picture()), ("a.txt", b"a caption"), ("a.caption", b"another")):
        stored = server.upload(name, content, subfolder="dropped/10_cats", type="input")
        assert stored.status == 200 and stored.json["name"] == name
    again = server.upload("a.txt", b"other", subfolder="dropped/10_cats", type="input").json
    assert again["name"] == "a (1).txt"
    assert (server.place / "input" / "dropped" / "10_cats" / "a.txt").read_bytes() == b"a caption"


def test_a_dataset_config_is_read_before_a_run(server):
    root = server.place / "input" / "configured"
    for name in ("1_cat", "dogs"):
        (root / name).mkdir(parents=True)
    file = root / "dataset_config.toml"
    file.write_text(
        "[general]\nresolution = 512\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'configured/1_cat'\n"
        "[[datasets.subsets]]\nimage_dir = 'configured/dogs'\n"
    )
    inputs = {"folder": "configured/dataset_config.toml", "resolution": 256}
    seen = server.ask("/graft/dataset/glance", "POST", inputs)
    assert seen.status == 200 and seen.json["folders"] == ["configured/1_cat", "configured/dogs"]

    file.write_text("[[datasets]]\nresolutoin = 512\n[[datasets.subsets]]\nimage_dir = 'configured/dogs'\n")
    refused = server.ask("/graft/dataset/glance", "POST", inputs)
    assert refused.status == 400 and "resolutoin" in refused.json["error"]
    gone = server.ask("/graft/dataset/glance", "POST", {**inputs, "folder": "configured/gone.toml"})
    assert gone.status == 404 and str(server.place) not in gone.json["error"]


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send there")
def test_ctrl_c_ends_while_files_arrive_slowly_and_leaves_nothing_of_them(tmp_path):
    place = tmp_path
    (place / "models" / "loras").mkdir(parents=True)
    server = Server(place, "--front-end-root", str(front_end(place / "front")))
    over = threading.Event()
    head = (
        f"POST /graft/lora_upload?name=slow%d.safetensors HTTP/1.1\r\nHost: {server.host}:{server.port}\r\n"
        "Content-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\n"
    )
    connections = [socket.create_connection((server.host, server.port)) for _ in range(8)]

    def drip():
        while not over.wait(0.2):
            for connection in connections:
                with contextlib.suppress(OSError):  # the server has ended
                    connection.sendall(b"x")

    for number, connection in enumerate(connections):
        connection.sendall((head % number).encode())
    threading.Thread(target=drip, daemon=True).start()
    while len(os.listdir(place / "models" / "loras")) < 8:
        time.sleep(0.05)
    assert server.stop(signal.SIGINT) == 0
    over.set()
    for connection in connections:
        connection.close()
    assert os.listdir(place / "models" / "loras") == []
    assert "Traceback" not in "\n".join(server.lines)
