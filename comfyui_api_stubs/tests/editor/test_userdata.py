"""Saved workflows, other files of the user, and settings."""

import json
from urllib.parse import quote

from comfyui_api_stubs.tests.editor.serving import at_once


def named(name):
    """As the front end sends it."""
    return quote(name, safe="")


def test_a_new_user_has_what_the_page_asks_for(server):
    assert server.ask("/users").json == {"storage": "server", "migrated": True}
    assert server.ask("/userdata?dir=subgraphs&recurse=true").json == []
    assert server.ask("/userdata/comfy.templates.json").json == []
    css = server.ask("/userdata/user.css")
    assert css.status == 200 and css.headers["content-type"].startswith("text/css")


def test_a_workflow_is_saved_listed_moved_and_deleted(server):
    body = json.dumps({"nodes": []}).encode()
    saved = server.ask(
        f"/userdata/{named('workflows/new/my work.json')}?overwrite=true&full_info=true", "POST", body
    ).json
    assert saved["path"] == "workflows/new/my work.json" and saved["size"] == len(body) and saved["modified"] > 1e12
    assert server.ask(f"/userdata/{named('workflows/new/my work.json')}").body == body
    assert server.ask("/userdata?dir=workflows&recurse=true").json == ["new/my work.json"]
    assert server.ask("/userdata?dir=workflows").json == []
    assert server.ask("/userdata?dir=workflows&recurse=true&split=true").json == [
        ["new/my work.json", "new", "my work.json"]
    ]
    [info] = server.ask("/userdata?dir=workflows&recurse=true&full_info=true&split=false").json
    assert info["path"] == "new/my work.json" and set(info) == {"path", "size", "modified", "created"}
    again = server.ask(f"/userdata/{named('workflows/new/my work.json')}?overwrite=false", "POST", b"other")
    assert again.status == 409 and server.ask(f"/userdata/{named('workflows/new/my work.json')}").body == body
    moved = server.ask(
        f"/userdata/{named('workflows/new/my work.json')}/move/{named('workflows/better.json')}?overwrite=false", "POST"
    )
    assert moved.json == "workflows/better.json"
    assert server.ask(f"/userdata/{named('workflows/new/my work.json')}").status == 404
    server.ask(f"/userdata/{named('workflows/other.json')}", "POST", b"{}")
    onto = server.ask(
        f"/userdata/{named('workflows/other.json')}/move/{named('workflows/better.json')}?overwrite=false", "POST"
    )
    assert onto.status == 409
    tree = server.ask("/v2/userdata?path=workflows").json
    assert [(entry["type"], entry["path"]) for entry in tree] == [
        ("directory", "workflows/new"),
        ("file", "workflows/better.json"),
        ("file", "workflows/other.json"),
    ]
    folder, better, _ = tree
    assert folder == {"name": "new", "path": "workflows/new", "type": "directory"}
    assert better["name"] == "better.json" and better["size"] == len(body) and better["modified"] > 1e9
    for name in ("better.json", "other.json"):
        assert server.ask(f"/userdata/{named('workflows/' + name)}", "DELETE").status == 204
        assert server.ask(f"/userdata/{named('workflows/' + name)}", "DELETE").status == 404
    assert server.ask("/userdata?dir=workflows&recurse=true").json == []


def test_hidden_files_are_kept_but_not_listed(server):
    index = named("workflows/.index.json")
    assert server.ask(f"/userdata/{index}", "POST", b'{"favorites":[]}').status == 200
    assert server.ask(f"/userdata/{index}").json == {"favorites": []}
    assert server.ask("/userdata?dir=workflows&recurse=true").json == []


def test_odd_names_are_kept_as_they_are(server):
    for name in (
        "100%.json",
        "名前 (1).json",
        "<script>alert(1)</script>'s".replace("/", "") + ".json",
        'quo"te.json',
        "a+b&c=d#e?f.json",
    ):
        path = f"odd/{name}"
        assert server.ask(f"/userdata/{named(path)}", "POST", b"{}").json == path
        assert server.ask(f"/userdata/{named(path)}").body == b"{}"
        assert name in server.ask("/userdata?dir=odd").json
        assert server.ask(f"/userdata/{named(path)}", "DELETE").status == 204


def test_files_that_run_no_code_are_shown_as_what_they_are(server):
    kinds = {
        "note.txt": "text/plain",
        "data.json": "application/json",
        "picture.webp": "image/webp",
        "film.mp4": "video/mp4",
        "song.mp3": "audio/mpeg",
        "letters.woff2": "font/woff2",
    }
    for name, kind in kinds.items():
        server.ask(f"/userdata/{name}", "POST", b"x")
        reply = server.ask(f"/userdata/{name}")
        assert reply.headers["content-type"].startswith(kind), name
        assert reply.headers["content-disposition"] == f'inline; filename="{name}"'


def test_what_is_not_there_or_in_the_way(server):
    assert server.ask("/userdata").status == 400
    assert server.ask("/userdata?dir=nowhere").status == 404
    assert server.ask("/v2/userdata?path=nowhere").status == 404
    assert server.ask("/v2/userdata?path=comfy.settings.json").status == 400
    assert server.ask("/userdata/nothing.json").status == 404
    server.ask("/userdata/plain", "POST", b"a file")
    assert 400 <= server.ask(f"/userdata/{named('plain/below')}", "POST", b"x").status < 500
    assert server.ask("/userdata/workflows", "POST", b"x").status == 409
    assert server.ask(f"/userdata/plain/move/{named('plain/below')}", "POST").status in range(400, 500)
    assert server.ask("/userdata/plain").body == b"a file"


def test_settings_are_merged_and_survive_a_broken_file(server):
    assert server.ask("/settings", "POST", {"Pack.a": 1, "Pack.b": [1, {"c": None}]}).status == 200
    assert server.ask("/settings/Pack.a", "POST", b'"two"').status == 200
    assert server.ask("/settings/Pack.a").json == "two"
    assert server.ask("/settings/Pack.never").json is None
    everything = server.ask("/settings").json
    assert everything["Pack.b"] == [1, {"c": None}] and everything["Comfy.Notification.ShowVersionUpdates"] is False
    assert server.ask("/settings/Pack.a", "POST", b"{").status == 400
    path = server.place / "user" / "default" / "comfy.settings.json"
    before = path.read_text()
    path.write_text("{ broken")
    assert server.ask("/settings").json == {}
    assert (path.parent / "comfy.settings.json.broken").read_text() == "{ broken"
    path.write_text(before)
    assert server.ask("/settings").json == everything


def test_of_many_that_save_a_new_file_at_once_one_wins_and_the_others_are_told(server):
    for turn in range(5):
        target = f"/userdata/{named(f'workflows/once{turn}.json')}"

        def save(number, target=target):
            return number, server.ask(f"{target}?overwrite=false", "POST", b"%d" % number).status

        replies = at_once(30, save)
        [winner] = [number for number, status in replies if status == 200]
        assert sorted(status for _, status in replies) == [200] + [409] * 29
        assert server.ask(target).body == b"%d" % winner


def test_of_many_that_are_renamed_to_one_name_at_once_none_is_lost(server):
    for turn in range(5):
        for number in range(20):
            server.ask(f"/userdata/{named(f'moving/{number}.json')}", "POST", b"%d" % number)
        target = f"moving/to{turn}.json"

        def move(number, target=target):
            return server.ask(
                f"/userdata/{named(f'moving/{number}.json')}/move/{named(target)}?overwrite=false", "POST"
            )

        statuses = [reply.status for reply in at_once(20, move)]
        assert sorted(statuses) == [200] + [409] * 19
        winner = statuses.index(200)
        assert server.ask(f"/userdata/{named(target)}").body == b"%d" % winner
        left = server.ask("/userdata?dir=moving").json
        assert {f"{number}.json" for number in range(20) if number != winner} <= set(left)
