"""POST /graft/preferences: two previews become a preference pair; nothing else is copied, and no other site asks."""

import io
import os
import shutil
import sys
import types

import pytest
from PIL import Image

ROUTE = "/graft/preferences"
START = "0123456789ab"


def save_preview(server, run, step, color, prompt=1, text="a zorp", size=(16, 16)):
    """The name of a file as Train Step keeps previews."""
    folder = server.place / "output" / "graft" / run / "previews"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{START}-{step:08}-weights{f'-p{prompt}' if prompt else ''}-0.jpg"
    Image.new("RGB", size, color).save(folder / name, comment=text)
    return name


def ask(server, run, better, worse, headers=None):
    return server.ask(ROUTE, "POST", {"run": run, "better": better, "worse": worse}, headers)


def test_two_previews_become_a_pair_with_their_prompt_as_caption(server):
    red, blue = (save_preview(server, "marked", step, color) for step, color in ((5, "red"), (10, "blue")))
    previews = server.place / "output" / "graft" / "marked" / "previews"
    folder = server.place / "input" / "graft_preferences" / "marked"
    kept = ask(server, "marked", blue, red)
    name = kept.json["name"]
    assert kept.json == {"folder": "graft_preferences/marked", "pairs": 1, "name": name, "captioned": True}
    assert name.startswith("steps-5-10-") and (folder / f"{name}.txt").read_text() == "a zorp"

    def holds(win, lose):
        for side, preview in (("win", win), ("lose", lose)):
            assert (folder / f"{name}.{side}.jpg").read_bytes() == (previews / preview).read_bytes()
        return len(list(folder.iterdir())) == 3

    assert holds(blue, red)
    assert ask(server, "marked", blue, red).json == kept.json and holds(blue, red)
    assert ask(server, "marked", red, blue).json == kept.json and holds(red, blue)
    rows = server.ask("/graft/dataset/folders").json["folders"]
    assert {"name": "graft_preferences/marked", "pictures": 2} in rows

    plain = [save_preview(server, "marked", step, color, 0, "") for step, color in ((5, "red"), (15, "green"))]
    unknown = ask(server, "marked", *plain).json
    assert unknown["pairs"] == 2 and not unknown["captioned"]
    assert not (folder / f"{unknown['name']}.txt").exists()


def test_what_was_marked_is_told_by_the_names_of_the_previews(server):
    def told():
        reply = server.ask(f"{ROUTE}?run=told")
        assert reply.status == 200 and reply.json["folder"] == "graft_preferences/told"
        return reply.json["pairs"], sorted(reply.json["marked"])

    assert told() == (0, [])
    red, blue, green = (
        save_preview(server, "told", at, color) for at, color in ((5, "red"), (10, "blue"), (15, "green"))
    )
    plain = [save_preview(server, "told", step, color, 0, "") for step, color in ((5, "red"), (15, "green"))]
    ask(server, "told", blue, red), ask(server, "told", green, red), ask(server, "told", *plain)
    assert told() == (3, [[plain[0], plain[1]], [blue, red], [green, red]])
    ask(server, "told", red, blue)
    assert told() == (3, [[plain[0], plain[1]], [red, blue], [green, red]]), "the other way round"

    folder, previews = (
        server.place / place for place in ("input/graft_preferences/told", "output/graft/told/previews")
    )
    same = previews / green.replace("weights", "average")
    same.write_bytes((previews / green).read_bytes())
    assert told()[1][2:] == [[same.name, red], [green, red]]
    same.unlink()
    save_preview(server, "told", 10, "black")  # the run was trained again
    assert told() == (3, [[plain[0], plain[1]], [green, red]])
    next(folder.glob("steps-5-15-*.lose.jpg")).unlink()
    (folder / "mine.win.jpg").write_bytes(b"own"), (folder / "mine.lose.jpg").write_bytes(b"pictures")
    pairs, marked = told()
    assert pairs == 3 and len(marked) == 1
    for run in ("", "..", "../graft/told", "cache"):
        assert server.ask(f"{ROUTE}?run={run}").status == 400


def test_what_is_no_pair_of_previews_is_refused(server):
    red, blue = (save_preview(server, "refused", step, color) for step, color in ((5, "red"), (10, "blue")))
    other = save_preview(server, "refused", 10, "blue", 2, "a fish")
    small = save_preview(server, "refused", 15, "blue", size=(8, 8))
    damaged = save_preview(server, "refused", 20, "blue")
    previews = server.place / "output" / "graft" / "refused" / "previews"
    (previews / damaged).write_bytes(b"no picture")
    (previews / "own.jpg").write_bytes((previews / red).read_bytes())
    gone = red.replace("00000005", "00000025")
    for run, better, worse, status, said in (
        ("refused", red, red, 400, "the same picture"),
        ("refused", red, other, 400, "different prompts"),
        ("refused", red, small, 400, "different sizes"),
        ("refused", red, damaged, 400, "the preview of step 20 is damaged"),
        ("refused", red, gone, 404, "the preview of step 25 has been removed; choose another step"),
        ("refused", red, "own.jpg", 400, "is not a preview of a run"),
        ("refused", red, f"../previews/{blue}", 400, "is not a preview of a run"),
        ("refused", f"..\\previews\\{red}", blue, 400, "is not a preview of a run"),
        ("refused", red, "/etc/passwd", 400, "is not a preview of a run"),
        ("refused", red, "", 400, "is not a preview of a run"),
        ("refused", red, 3, 400, "worse is 3, expected a name"),
        ("../graft/refused", red, blue, 400, "expected a plain folder name"),
        ("..", red, blue, 400, "expected a plain folder name"),
        ("", red, blue, 400, "expected a plain folder name"),
        (None, red, blue, 400, "expected a name"),
    ):
        reply = ask(server, run, better, worse)
        assert reply.status == status and said in reply.json["error"], (run, better, worse, reply.body)
        assert str(server.place) not in reply.json["error"]
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        assert ask(server, "refused", red, blue, headers).status == 403
    assert server.ask(f"{ROUTE}?run=refused&better={red}&worse={blue}").json["pairs"] == 0, "a link writes nothing"
    assert not (server.place / "input" / "graft_preferences" / "refused").exists()


def test_a_changed_pair_and_a_folder_that_cannot_be_made_are_named(server):
    red, blue = (save_preview(server, "changed", step, color) for step, color in ((5, "red"), (10, "blue")))
    name = ask(server, "changed", red, blue).json["name"]
    folder = server.place / "input" / "graft_preferences" / "changed"
    (folder / f"{name}.lose.jpg").write_bytes(b"retouched")
    reply = ask(server, "changed", red, blue)
    assert reply.status == 409 and f"{name}.lose.jpg has been changed since it was marked" in reply.json["error"]
    save_preview(server, "blocked", 5, "red"), save_preview(server, "blocked", 10, "blue")
    (folder.parent / "blocked").write_text("a file in the folder's place")
    reply = ask(server, "blocked", red, blue)
    said = "graft_preferences/blocked in ComfyUI's input folder: Not a directory"
    assert (reply.status, reply.json["error"]) == (500, said)


def test_a_full_disk_and_a_folder_that_can_only_be_read_say_what_to_do(monkeypatch, tmp_path):
    import errno

    import folder_paths
    from graft_nodes.host import preference_routes
    from graft_nodes.tests.faults.disk import Disk, fails

    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(tmp_path / "input"))
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(tmp_path / "output"))
    place = types.SimpleNamespace(place=tmp_path)
    red, blue = (save_preview(place, "mine", step, color) for step, color in ((5, "red"), (10, "blue")))
    for number, status, next_step in ((errno.ENOSPC, 507, "free some space"), (errno.EROFS, 500, "make the drive wri")):
        with Disk(tmp_path / "input", 5, fails(number), lasting=True).installed():
            found, answer = preference_routes.mark({"run": "mine", "better": red, "worse": blue})
        assert found == status and answer["error"].startswith("graft_preferences/mine in ComfyUI's input folder: ")
        assert next_step in answer["error"] and str(tmp_path) not in answer["error"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_no_link_leads_out_of_the_previews_or_into_another_folder(server, tmp_path):
    red, blue = (save_preview(server, "linked", step, color) for step, color in ((5, "red"), (10, "blue")))
    outside = io.BytesIO()
    Image.new("RGB", (16, 16), "green").save(outside, format="JPEG", comment="a zorp")
    (tmp_path / "secret.jpg").write_bytes(outside.getvalue())
    link = red.replace("00000005", "00000015")
    os.symlink(tmp_path / "secret.jpg", server.place / "output" / "graft" / "linked" / "previews" / link)
    reply = ask(server, "linked", red, link)
    assert reply.status == 400 and "is a link to another folder" in reply.json["error"]
    ask(server, "linked", red, blue)
    pairs = server.place / "input" / "graft_preferences" / "linked"
    outside_too = next(pairs.glob("*.lose.jpg"))
    outside_too.write_bytes(outside.getvalue())
    outside_too.rename(pairs / outside_too.name.replace("5-10", "5-15"))
    better = next(pairs.glob("*.win.jpg"))
    better.rename(pairs / better.name.replace("5-10", "5-15"))
    assert server.ask(f"{ROUTE}?run=linked").json == {"folder": "graft_preferences/linked", "pairs": 1, "marked": []}
    shutil.rmtree(pairs)
    (server.place / "input" / "graft_preferences").mkdir(exist_ok=True)
    os.symlink(tmp_path, server.place / "input" / "graft_preferences" / "linked")
    reply = ask(server, "linked", red, blue)
    assert reply.status == 400 and "leaves ComfyUI's input folder" in reply.json["error"]
    assert "leaves ComfyUI's input folder" in server.ask(f"{ROUTE}?run=linked").json["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["secret.jpg"]
