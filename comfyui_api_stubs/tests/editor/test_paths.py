"""Path tricks in every route: nothing but 4xx, nothing of another folder in an answer, nothing
written anywhere else.
"""

import os
from urllib.parse import quote

import pytest

from comfyui_api_stubs.editor import paths
from comfyui_api_stubs.tests.editor.serving import picture
from comfyui_api_stubs.tests.editor.tricks import CLIMBS, SECRET, TRICKS, everything, not_refused, set_trap

ROUTES = [
    ("GET", "/view?filename={}"),
    ("GET", "/api/view?filename=x.png&subfolder={}"),
    ("GET", "/view?filename={}&type=input"),
    ("GET", "/view?filename=x.png&type={}"),
    ("GET", "/view?filename={}%20%5Btemp%5D"),
    ("GET", "/view?filename={}&preview=webp;50"),
    ("GET", "/view?filename={}&channel=a"),
    ("GET", "/userdata/{}"),
    ("GET", "/userdata?dir={}"),
    ("GET", "/api/v2/userdata?path={}"),
    ("POST", "/userdata/{}?overwrite=true"),
    ("DELETE", "/api/userdata/{}"),
    ("POST", "/userdata/mine.txt/move/{}"),
    ("POST", "/userdata/{}/move/mine2.txt"),
    ("GET", "/{}"),
    ("GET", "/assets/{}"),
    ("GET", "/extensions/{}"),
    ("GET", "/extensions/pack/{}"),
    ("GET", "/extensions/{}/x.js"),
    ("GET", "/docs/{}/en.md"),
    ("GET", "/docs/KSampler/{}.md"),
    ("GET", "/templates/{}"),
    ("GET", "/api/workflow_templates/pack/{}"),
    ("GET", "/api/workflow_templates/{}/x.json"),
    ("GET", "/global_subgraphs/{}"),
    ("GET", "/view_metadata/loras?filename={}"),
    ("GET", "/view_metadata/loras?filename={}.safetensors"),
    ("GET", "/view_metadata/{}?filename=x.safetensors"),
    ("GET", "/models/{}"),
    ("GET", "/experiment/models/{}"),
    ("GET", "/internal/files/{}"),
]
# Routes whose last part is an id in a table, never a file: what climbs is refused there too, the rest is an id that
# nobody has.
IDS = [
    ("GET", "/object_info/{}"),
    ("GET", "/history/{}"),
    ("GET", "/settings/{}"),
    ("POST", "/settings/{}"),
    ("GET", "/api/jobs/{}"),
]


def test_there_are_enough_tricks():
    assert len(TRICKS) >= 200 and len(CLIMBS) >= 30


@pytest.fixture(scope="module")
def trap(server):
    """Something to steal beside the server's folders, and links to it inside them."""
    yield set_trap(server)
    assert server.ask("/userdata/mine.txt").body == b"mine"


@pytest.mark.parametrize(("method", "route"), ROUTES, ids=[f"{method} {route}" for method, route in ROUTES])
def test_every_trick_is_refused(server, trap, method, route):
    assert not_refused(server, method, route) == []
    assert everything(server.place) == trap


@pytest.mark.parametrize(("method", "route"), IDS, ids=[f"{method} {route}" for method, route in IDS])
def test_ids_do_not_climb(server, trap, method, route):
    requests = [(method, route.encode().replace(b"{}", quote(trick, safe="").encode())) for trick in CLIMBS]
    answers = server.raws(requests, body=b"1" if method == "POST" else b"")
    assert [
        (target, answer)
        for (_, target), answer in zip(requests, answers, strict=True)
        if not 400 <= answer.status < 500
    ] == []
    assert everything(server.place) == trap


def test_slashes_and_dots_as_they_are(server, trap):
    climbing = (
        b"/../secret.txt",
        b"/assets/../../secret.txt",
        b"/extensions/pack/../../secret.txt",
        b"/view/../secret.txt",
        b"//secret.txt",
        b"/./../secret.txt",
        b"/assets/%2e%2e/%2e%2e/secret.txt",
        b"/api/userdata/../secret.txt",
        b"/..",
        b"/..;/secret.txt",
    )
    for target in climbing:
        answer = server.raw("GET", target)
        assert 400 <= answer.status < 500 and SECRET not in answer.body, target
    for target in (
        b"http://127.0.0.1/etc/passwd",
        b"http://elsewhere.example/",
        b"*",
        b"",
        b"etc/passwd",
        b"/\xff\xfe",
        b"/%",
    ):
        answer = server.raw("GET", target)
        assert 400 <= answer.status < 500, target


@pytest.mark.parametrize("field", ["name", "subfolder", "type"])
def test_uploads_stay_where_they_belong(server, trap, field):
    for trick in TRICKS:
        if field == "name" and set("\r\n") & set(trick):
            continue  # they end the header that they stand in
        name = trick if field == "name" else "x.png"
        texts = {} if field == "name" else {field: trick}
        answer = server.upload(name, picture(), **texts)
        if field == "name" and answer.status == 200:
            assert answer.json["name"] == os.path.basename(answer.json["name"]) and not set("/\\:") & set(
                answer.json["name"]
            ), trick
            (server.place / "input" / answer.json["name"]).unlink()
        else:
            assert 400 <= answer.status < 500, f"{field} {trick!r} gave {answer.status} {answer.body!r}"
    assert everything(server.place) == trap


def test_masks_read_nothing_from_elsewhere(server, trap):
    import json

    for trick in TRICKS:
        for reference in (
            {"filename": trick},
            {"filename": "x.png", "subfolder": trick},
            {"filename": "x.png", "type": trick},
        ):
            answer = server.upload("m.png", picture(), "/upload/mask", original_ref=json.dumps(reference))
            assert 400 <= answer.status < 500, f"{reference} gave {answer.status}"
    for reference in ("", "null", "[]", "{}", '{"filename": 3}', '{"filename": ""}', "{"):
        assert server.upload("m.png", picture(), "/upload/mask", original_ref=reference).status == 400
    assert everything(server.place) == trap


def test_folders_are_not_listed(server):
    folders = (
        "/assets",
        "/assets/",
        "/extensions/core",
        "/extensions/core/",
        "/extensions/pack",
        "/extensions/pack/docs",
        "/templates/",
        "/view?filename=.",
        "/view?filename=&subfolder=.",
        "/userdata/.",
        "/userdata/workflows",
        "/api/workflow_templates/pack",
    )
    for target in folders:
        assert 400 <= server.ask(target).status < 500, target


@pytest.mark.parametrize("error", [ValueError("Paths don't have the same drive"), OSError(36, "File name too long")])
def test_a_name_that_the_system_cannot_place_is_refused(tmp_path, monkeypatch, error):
    """Windows raises the first for a link to another drive."""

    def raises(paths):
        raise error

    with monkeypatch.context() as changed:
        changed.setattr(os.path, "commonpath", raises)
        with pytest.raises(paths.PathRefused, match=r"'b\.png' is not the name of a file: "):
            paths.inside(str(tmp_path), "a", "b.png")
    assert paths.inside(str(tmp_path), "a", "b.png") == str(tmp_path / "a" / "b.png")


# 31 names of 140 letters are longer than a path may be; 1,900 folders would be made by a function that calls itself
DEEP = {"deep": ("d", 1900), "long": ("d" * 140, 31), "just too deep": ("d", paths.DEEPEST + 1)}


@pytest.mark.parametrize("name", DEEP)
def test_folders_that_are_nested_too_deep_are_refused(server, name):
    part, depth = DEEP[name]
    folder = "/".join([part] * depth)
    upload = server.upload("q.png", picture(), subfolder=folder)
    written = server.ask(f"/userdata/{quote(folder + '/a.json', safe='')}", "POST", b"{}")
    for answer in (upload, written):
        assert 400 <= answer.status < 500 and "error" in answer.json, answer.body


def test_as_many_folders_as_may_be_are_made(server):
    folder = "/".join(["d"] * paths.DEEPEST)
    assert server.upload("q.png", picture(), subfolder=folder).status == 200
