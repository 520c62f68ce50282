"""Pictures in and out, and what the browser may do with them."""

import io
import json
import os
import sys

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from comfyui_api_stubs.tests.editor.serving import at_once, picture, shows
from comfyui_api_stubs.tests.ghostscript import EPS

LIMIT = 100 * 1024 * 1024


def opened(reply):
    return Image.open(io.BytesIO(reply.body))


@pytest.fixture(scope="module")
def half(server):
    """A half-transparent picture in the input folder."""
    (server.place / "input" / "half.png").write_bytes(picture())
    return "half.png"


def test_a_picture_as_it_is_and_in_parts(server, half):
    where = f"/view?filename={half}&type=input"
    assert server.ask(where).body == picture() and server.ask(where).headers["content-type"] == "image/png"
    assert server.ask(f"/view?filename={half}%20%5Binput%5D").body == picture()
    rgb = opened(server.ask(where + "&channel=rgb"))
    assert rgb.mode == "RGB" and rgb.getpixel((0, 0)) == (200, 30, 40)
    alpha = opened(server.ask(where + "&channel=a"))
    assert alpha.mode == "RGBA" and alpha.getpixel((0, 0))[3] == 128 and alpha.size == (8, 6)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ("webp;90", "WEBP"),
        ("jpeg;50", "JPEG"),
        ("jpeg", "JPEG"),
        ("bmp;1", "WEBP"),
        ("webp;900", "WEBP"),
    ],
)
def test_previews(server, half, asked, kind):
    reply = server.ask(f"/view?filename={half}&type=input&preview={asked}")
    assert reply.status == 200 and opened(reply).format == kind and opened(reply).size == (8, 6)


@pytest.mark.parametrize("how", ["preview=webp", "channel=rgb", "channel=a"])
def test_what_is_no_picture_is_said(server, how):
    (server.place / "input" / "no_picture.png").write_bytes(b"not a picture")
    assert server.ask(f"/view?filename=no_picture.png&type=input&{how}").status == 400


@pytest.mark.parametrize("how", ["preview=webp", "channel=rgb", "channel=a"])
def test_an_eps_with_a_pictures_name_is_no_picture(server, how):
    (server.place / "input" / "drawing.png").write_bytes(EPS)
    reply = server.ask(f"/view?filename=drawing.png&type=input&{how}")
    assert reply.status == 400 and "cannot identify image file" in reply.json["error"]
    reference = json.dumps({"filename": "drawing.png", "type": "input"})
    reply = server.upload("m.png", picture(), "/upload/mask", original_ref=reference)
    assert reply.status == 400 and "cannot identify image file" in reply.json["error"]


@pytest.mark.parametrize(
    "name", ["page.html", "drawing.svg", "script.js", "style.css", "data.xml", "noextension", "page.xhtml"]
)
def test_nothing_that_a_user_stored_runs_in_the_page(server, name):
    (server.place / "output" / name).write_text("<script>alert(1)</script>")
    reply = server.ask(f"/view?filename={name}")
    assert reply.headers["content-type"] == "application/octet-stream" and reply.headers[
        "content-disposition"
    ].startswith("attachment")
    assert (
        reply.headers["x-content-type-options"] == "nosniff" and "sandbox" in reply.headers["content-security-policy"]
    )
    server.ask(f"/userdata/{name}", "POST", b"<script>alert(1)</script>")
    reply = server.ask(f"/userdata/{name}")
    assert reply.headers["content-type"] == "application/octet-stream" and reply.headers[
        "content-disposition"
    ].startswith("attachment")


def test_uploads_keep_both_when_names_meet(server):
    one, two = picture(4), picture(5)
    assert server.upload("cat.png", one).json == {"name": "cat.png", "subfolder": "", "type": "input"}
    assert server.upload("cat.png", one).json["name"] == "cat.png"
    assert server.upload("cat.png", two).json["name"] == "cat (1).png"
    assert server.upload("cat.png", two).json["name"] == "cat (1).png"
    assert server.upload("cat.png", two, overwrite="true").json["name"] == "cat.png"
    assert (server.place / "input" / "cat.png").read_bytes() == two
    elsewhere = server.upload("cat.png", one, subfolder="pets/new", type="temp")
    assert elsewhere.json == {"name": "cat.png", "subfolder": "pets/new", "type": "temp"}
    assert (server.place / "temp" / "pets" / "new" / "cat.png").read_bytes() == one


@pytest.mark.parametrize(
    "name",
    [
        "with space.png",
        'quote\'s "name".png',
        "<script>.png",
        "名前.png",
        "Ünï½.png",
        "a,b;c&d=e+f%g#h?.png",
        "..dots..png",
    ],
)
def test_odd_names_come_and_go(server, name):
    from urllib.parse import quote

    stored = server.upload(name, picture()).json["name"]
    assert stored == name
    assert server.ask(f"/view?filename={quote(name, safe='')}&type=input").body == picture()


def test_uploads_have_a_form_and_a_limit(server):
    assert server.ask("/upload/image", "POST", {}).status == 400
    assert (
        server.ask("/upload/image", "POST", b"--x--", {"Content-Type": "multipart/form-data; boundary=x"}).status == 400
    )
    assert server.ask("/upload/image", "POST", b"", {"Content-Type": "multipart/form-data"}).status == 400
    assert server.upload("", picture()).status == 400
    assert server.upload("big.png", b"\0" * (LIMIT + 1)).status == 413
    assert not (server.place / "input" / "big.png").exists()
    assert server.ask("/userdata/big.bin", "POST", b"\0" * (LIMIT + 1)).status == 413
    assert not (server.place / "user" / "default" / "big.bin").exists()


def test_a_mask_becomes_the_pictures_transparency(server):
    texts, original = PngInfo(), io.BytesIO()
    texts.add_text("workflow", '{"kept": true}')
    Image.new("RGB", (8, 6), (10, 20, 30)).save(original, format="PNG", pnginfo=texts)
    (server.place / "input" / "photo.png").write_bytes(original.getvalue())
    reference = json.dumps({"filename": "photo.png", "subfolder": "", "type": "input"})
    reply = server.upload(
        "masked.png", picture(8, 6, (0, 0, 0, 77)), "/upload/mask", original_ref=reference, subfolder="clipspace"
    )
    assert reply.json == {"name": "masked.png", "subfolder": "clipspace", "type": "input"}
    masked = Image.open(server.place / "input" / "clipspace" / "masked.png")
    assert masked.getpixel((3, 3)) == (10, 20, 30, 77) and masked.text == {"workflow": '{"kept": true}'}
    assert server.upload("m.png", picture(3, 3), "/upload/mask", original_ref=reference).status == 400
    missing = json.dumps({"filename": "nobody.png"})
    assert server.upload("m.png", picture(), "/upload/mask", original_ref=missing).status == 404


def test_the_workflow_is_in_a_saved_picture(server):
    extra = {"extra_pnginfo": {"workflow": {"nodes": [], "id": "w"}}}
    server.wait(server.queue(shows("with_workflow"), extra_data=extra).json["prompt_id"])
    saved = opened(server.ask("/view?filename=with_workflow_00001_.png"))
    assert json.loads(saved.text["workflow"]) == {"nodes": [], "id": "w"} and "EmptyImage" in saved.text["prompt"]


def test_a_form_of_50_000_fields_is_refused(server):
    fields = {f"field {number}": "x" for number in range(50_000)}
    reply = server.upload("many.png", picture(), **fields)
    assert reply.status == 400 and b"more than 100 fields" in reply.body
    assert not (server.place / "input" / "many.png").exists()


def test_a_form_of_100_fields_is_taken(server):
    fields = {f"field {number}": "x" for number in range(99)}
    assert server.upload("enough.png", picture(), **fields).status == 200
    assert (server.place / "input" / "enough.png").is_file()


def test_a_form_inside_another_form_is_refused(server):
    inner = b'--in\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--in--\r\n'
    head = (
        b'--out\r\nContent-Disposition: form-data; name="image"\r\nContent-Type: multipart/mixed; boundary=in\r\n\r\n'
    )
    form = {"Content-Type": "multipart/form-data; boundary=out"}
    reply = server.ask("/upload/image", "POST", head + inner + b"\r\n--out--\r\n", form)
    assert reply.status == 400 and b"a form inside another form" in reply.body


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_link_to_nothing_hides_no_other_file(server):
    places = {
        "models/loras": "/experiment/models/loras",
        "input": "/internal/files/input",
        "user/default/workflows": "/userdata?dir=workflows&full_info=true",
    }
    for folder, route in places.items():
        (server.place / folder / "real.safetensors").write_bytes(picture())
        link = server.place / folder / "dangling.safetensors"
        link.symlink_to(server.place / "nothing")
        reply = server.ask(route)
        link.unlink()
        (server.place / folder / "real.safetensors").unlink()
        assert reply.status == 200 and "real.safetensors" in reply.body.decode(), route
        assert "dangling" not in reply.body.decode(), route


@pytest.mark.parametrize("route", ["/upload/image", "/upload/mask"])
def test_uploads_of_one_name_at_once_are_all_kept(server, route):
    (server.place / "input" / "seen.png").write_bytes(picture(6, 6, (1, 2, 3)))
    reference = {"original_ref": json.dumps({"filename": "seen.png", "type": "input"})}
    for turn in range(5):

        def upload(number, turn=turn):
            content = picture(6, 6, (0, 0, turn, number))
            return number, server.upload(f"race{turn}.png", content, route, subfolder="race", **reference)

        replies = at_once(40, upload)
        assert [reply.status for _, reply in replies] == [200] * 40
        names = {number: reply.json["name"] for number, reply in replies}
        assert len(set(names.values())) == 40
        for number, name in names.items():
            with Image.open(server.place / "input" / "race" / name) as stored:
                assert stored.convert("RGBA").getpixel((0, 0))[3] == number, name
    assert not [name for name in os.listdir(server.place / "input" / "race") if name.endswith(".partial")]


def test_the_same_picture_uploaded_at_once_is_one_file(server):
    replies = at_once(20, lambda _: server.upload("same.png", picture(), subfolder="twenty"))
    assert {reply.json["name"] for reply in replies} == {"same.png"}
    assert os.listdir(server.place / "input" / "twenty") == ["same.png"]


def test_an_upload_takes_no_name_that_a_link_to_nothing_has(server):
    (server.place / "input" / "gone.png").symlink_to("not-there.png")
    assert server.upload("gone.png", picture()).json["name"] == "gone (1).png"
    assert os.path.islink(server.place / "input" / "gone.png")
