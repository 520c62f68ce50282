"""The rest of comfy_api: inputs that grow, 3D files, curves, ranges, videos, sounds, older versions of the API. Holds
for a real ComfyUI too, from 0.33.0 on.
"""

from __future__ import annotations

import asyncio
import importlib
import io as streams
import itertools
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
from comfy_api import latest
from comfy_api.latest import Input, InputImpl, Types, io, ui

_io = importlib.import_module("comfy_api.latest._io")
# The embedded host has the interface of 0.33.0, and older ones have only parts of it.
pytestmark = pytest.mark.skipif(not hasattr(io, "PriceBadge"), reason="0.3.64 and 0.8.0 have not all of this")


# --- inputs that grow -------------------------------------------------------------------------------------------------


def growing(optional=False):
    number = io.Int.Input("number", default=1, optional=optional)
    return io.Autogrow.Input("numbers", template=io.Autogrow.TemplatePrefix(number, "n", min=1, max=3))


def choosing():
    deep = io.DynamicCombo.Input("how", options=[io.DynamicCombo.Option("fast", [io.Float.Input("speed")])])
    options = [io.DynamicCombo.Option("one", [io.Image.Input("image")]), io.DynamicCombo.Option("two", [deep])]
    return io.DynamicCombo.Input("kind", options=options)


def finalized(socket, **live):
    schema = io.Schema(node_id="X", inputs=[io.Mask.Input("mask"), socket], hidden=[io.Hidden.unique_id])
    return _io.get_finalized_class_inputs(schema.get_v1_info(io.ComfyNode).input, live)


def test_an_input_that_grows_stands_for_those_of_its_template():
    inputs, hidden, data = finalized(growing(), **{"numbers.n0": 5, "numbers.n2": 6})
    assert list(inputs["required"]) == ["mask", "numbers.n0"]
    assert list(inputs["optional"]) == ["numbers.n1", "numbers.n2"]
    assert inputs["required"]["numbers.n0"] == ("INT", {"default": 1, "forceInput": True})
    assert hidden == {"unique_id": ("UNIQUE_ID",)}
    values = _io.build_nested_inputs({"mask": "m", "numbers.n0": 5, "numbers.n2": 6}, data)
    assert values == {"mask": "m", "numbers": {"n0": 5, "n2": 6}}


def test_an_input_that_grows_is_an_empty_dict_when_nothing_is_linked():
    inputs, _, data = finalized(growing(optional=True))
    assert list(inputs["optional"]) == ["numbers.n0", "numbers.n1", "numbers.n2"]
    assert _io.build_nested_inputs({"mask": "m"}, data) == {"mask": "m", "numbers": {}}


def test_a_choice_brings_its_inputs():
    live = {"kind": "two", "kind.how": "fast", "kind.how.speed": 0.5}
    inputs, _, data = finalized(choosing(), **live)
    assert set(inputs["required"]) == {"mask", "kind", "kind.how", "kind.how.speed"}
    values = _io.build_nested_inputs(dict(live), data)
    assert values == {"kind": {"kind": "two", "how": {"how": "fast", "speed": 0.5}}}
    told = _io.build_nested_inputs(dict(live), {**data, "create_dynamic_tuple": True})
    assert told["kind"]["how"]["speed"] == (0.5, "kind.how.speed"), "check_lazy_status learns the names"


def test_a_choice_that_is_not_there_brings_none():
    inputs, _, data = finalized(choosing(), kind="three")
    assert list(inputs["required"]) == ["mask"] and data == {}


def test_names_of_an_input_that_grows():
    template = io.Autogrow.TemplateNames(io.Image.Input("image"), ["left", "right"], min=2)
    inputs, _, _ = finalized(io.Autogrow.Input("images", template=template), **{"images.left": 1})
    assert list(inputs["required"]) == ["mask", "images.left", "images.right"]


def test_sockets_of_one_template_say_so():
    template = io.MatchType.Template("t", [io.Image, io.Mask])
    schema = io.Schema(
        node_id="X", inputs=[io.MatchType.Input("any", template)], outputs=[io.MatchType.Output(template)]
    )
    info = schema.get_v1_info(io.ComfyNode)
    kinds = {"template_id": "t", "allowed_types": "IMAGE,MASK"}
    assert info.input["required"]["any"] == ("COMFY_MATCHTYPE_V3", {"template": kinds})
    assert info.output_matchtypes == ["t"] and info.output_name == ["MATCHTYPE"]
    with pytest.raises(ValueError, match="Allowed types must be"):
        io.MatchType.Template("t", [int])


def test_a_price_names_its_widgets():
    badge = io.PriceBadge("{}", io.PriceBadgeDepends(widgets=["kind.image"]))
    told = io.Schema(node_id="X", inputs=[choosing()], price_badge=badge).get_v1_info(io.ComfyNode).price_badge
    assert told["depends_on"]["widgets"] == [{"name": "kind.image", "type": "IMAGE"}]
    with pytest.raises(ValueError, match="unknown widget"):
        badge.as_dict([])
    with pytest.raises(ValueError, match="jsonata"):
        io.PriceBadge("{}", engine="other").validate()


def test_an_api_node_asks_for_keys():
    schema = io.Schema(node_id="X", is_api_node=True)
    schema.finalize()
    names = {hidden.name for hidden in schema.hidden}
    assert names == {"auth_token_comfy_org", "api_key_comfy_org", "comfy_usage_source"}


# --- versions ---------------------------------------------------------------------------------------------------------


def test_other_names_of_the_api():
    older = importlib.import_module("comfy_api.v0_0_2")
    assert latest.IO is io and latest.UI is ui
    assert older.io.Image is io.Image and older.ComfyExtension is latest.ComfyExtension
    versions = importlib.import_module("comfy_api.version_list").supported_versions
    assert [kind.VERSION for kind in versions] == ["latest", "0.0.2", "0.0.1"]


def test_progress_by_either_door(host):
    state = importlib.import_module("comfy_execution.progress").get_progress_state()
    api = latest.ComfyAPI()
    asyncio.new_event_loop().run_until_complete(api.execution.set_progress(1, 4, node_id="7"))
    assert (state.nodes["7"]["value"], state.nodes["7"]["max"]) == (1, 4)
    latest.ComfyAPISync().execution.set_progress(3, 4, node_id="7")
    assert state.nodes["7"]["value"] == 3
    with pytest.raises(ValueError, match="node_id"):
        latest.ComfyAPISync().execution.set_progress(1, 2)


def test_types_of_v1_nodes():
    types = importlib.import_module("comfy.comfy_types")
    assert types.IO.IMAGE == "IMAGE" and str(types.IO.NUMBER) == "FLOAT,INT"
    assert not types.IO.ANY != "IMAGE" and not types.IO.NUMBER != "INT"  # noqa: SIM202  (packs rely on __ne__)
    assert types.IO.IMAGE != "MASK" and types.IO.IMAGE != 3
    assert types.CheckLazyMixin().check_lazy_status(a=None, b=1) == ["a"]
    assert issubclass(types.ComfyNodeABC, object) and types.ComfyNodeABC.__abstractmethods__ == {"INPUT_TYPES"}


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_3d_file_on_disk_and_in_memory(tmp_path):
    disk = tmp_path / "cube.OBJ"
    disk.write_bytes(b"v 0 0 0")
    first, second = Types.File3D(str(disk)), Types.File3D(streams.BytesIO(b"glTF"), "glb")
    assert (first.format, first.is_disk_backed, second.format, second.is_disk_backed) == ("obj", True, "glb", False)
    assert first.get_data().read() == b"v 0 0 0" and second.get_bytes() == second.get_bytes() == b"glTF"
    copied = [file.save_to(str(tmp_path / "new" / name)) for file, name in ((first, "a.obj"), (second, "b.glb"))]
    assert [Path(path).read_bytes() for path in copied] == [b"v 0 0 0", b"glTF"]


@pytest.mark.parametrize("points", [[(0, 0), (0.25, 0.9), (0.6, 0.5), (1, 1)], [(0.2, 0.1), (0.4, 0.1), (0.9, 0.8)]])
def test_curves_go_through_their_points_and_overshoot_none(points):
    curve_input = importlib.import_module("comfy_api.input").CurveInput
    for kind in ("monotone_cubic", "linear"):
        curve = curve_input.from_raw({"points": points, "interpolation": kind})
        assert [curve.interp(x) for x, _ in points] == pytest.approx([y for _, y in points])
        for (left, low), (right, high) in itertools.pairwise(points):
            heights = curve.interp_array(numpy.linspace(left, right, 50))
            assert heights.min() >= min(low, high) - 1e-12 and heights.max() <= max(low, high) + 1e-12
            steps = numpy.diff(heights) * (1 if high >= low else -1)
            assert (steps >= -1e-12).all(), "between two points it only rises or only falls"
        assert curve.interp(-1) == points[0][1] and curve.interp(2) == points[-1][1]


def test_a_smooth_curve_is_scipys():
    """Through evenly spaced points that bend gently the slopes are central differences, as in CubicHermiteSpline."""
    interpolate = pytest.importorskip("scipy.interpolate")
    curve = importlib.import_module("comfy_api.input").MonotoneCubicCurve([(0, 0), (1, 1), (2, 2.5), (3, 4.5)])
    spline = interpolate.CubicHermiteSpline([0, 1, 2, 3], [0, 1, 2.5, 4.5], [1, 1.25, 1.75, 2])
    places = numpy.linspace(0, 3, 40)
    assert numpy.allclose(curve.interp_array(places), spline(places))


def test_a_range_is_a_table_of_levels():
    levels = importlib.import_module("comfy_api.input").RangeInput
    table = levels.from_raw({"min": 0.25, "max": 0.75}).to_lut(5)
    assert table.tolist() == [0, 0, 0.5, 1, 1]
    brighter = levels.from_raw({"min": 0.0, "max": 1.0, "midpoint": 0.25}).to_lut(5)
    assert brighter.tolist() == pytest.approx([x**0.5 for x in (0, 0.25, 0.5, 0.75, 1)]), "a quarter becomes a half"


def tone(seconds, rate=8000):
    return {"waveform": torch.sin(torch.arange(int(seconds * rate)) * 0.3)[None, None], "sample_rate": rate}


def test_a_video_of_tensors_is_written_and_read(tmp_path):
    ramp = torch.linspace(0, 1, 12)[:, None, None, None].expand(12, 32, 48, 3)
    made = InputImpl.VideoFromComponents(Types.VideoComponents(ramp, Fraction(6), tone(2)))
    assert (made.get_dimensions(), made.get_duration(), made.get_frame_count()) == ((48, 32), 2.0, 12)
    path = str(tmp_path / "ramp.mp4")
    made.save_to(path, metadata={"prompt": {"1": {}}})
    video = InputImpl.VideoFromFile(path)
    assert isinstance(video, Input.Video) and video.get_dimensions() == (48, 32) and video.get_frame_rate() == 6
    assert video.get_frame_count() == 12 and video.get_duration() == pytest.approx(2, abs=0.2)
    parts = video.get_components()
    assert parts.images.shape == (12, 32, 48, 3) and (parts.images - ramp).abs().max() < 0.06
    assert parts.metadata["prompt"] == '{"1": {}}' and parts.audio["sample_rate"] == 8000
    later = video.as_trimmed(1.0, 0.5, strict_duration=True)
    assert later.get_components().images.shape[0] == 3
    assert later.get_components().images.mean() == pytest.approx(float(ramp[6:9].mean()), abs=0.03)
    assert video.as_trimmed(1.5, 5.0, strict_duration=True) is None
    copy = str(tmp_path / "copy.mp4")
    video.save_to(copy)
    again = InputImpl.VideoFromFile(copy).get_components()
    assert torch.equal(again.images, parts.images), "nothing changed, so the pictures are not compressed again"


@pytest.mark.parametrize("kind", ["flac", "mp3", "opus"])
def test_sounds_are_saved(host, kind):
    import av

    (saved,) = ui.AudioSaveHelper.get_save_audio_ui(tone(1), f"sounds/{kind}", cls=None, format=kind).as_dict()["audio"]
    with av.open(f"{host.output}/sounds/{saved['filename']}") as container:
        assert container.streams.audio[0].codec_context.name.startswith(kind)
        pieces = [frame.to_ndarray() for frame in container.decode(audio=0)]
    seconds = sum(piece.shape[-1] for piece in pieces) / {"opus": 48000}.get(kind, 8000)
    assert seconds == pytest.approx(1, abs=0.15)
    with pytest.raises(ValueError, match="Unsupported audio format"):
        ui.AudioSaveHelper.save_audio(tone(1), "x", io.FolderType.temp, None, format="wav")


def test_what_the_editor_is_shown(host):
    mask = ui.PreviewMask(torch.rand(2, 4, 6)).as_dict()
    assert len(mask["images"]) == 2
    three = ui.PreviewUI3D("cube.glb", {"zoom": 1}, bg_image=torch.rand(1, 4, 6, 3)).as_dict()["result"]
    assert three[:2] == ["cube.glb", {"zoom": 1}] and three[2].startswith("temp/bg_")
    assert ui.PreviewUI3DAdvanced("a", "b", "c").as_dict() == {"result": ["a", "b", "c"]}
    assert ui.PreviewVideo([{"filename": "a.mp4"}]).as_dict()["animated"] == (True,)
    assert len(ui.PreviewAudio(tone(0.2)).as_dict()["audio"]) == 1


class Hides:
    """A node class for one execution, with what is stored in files."""

    hidden = io.HiddenHolder("1", {"1": {"class_type": "X"}}, {"workflow": {"nodes": []}}, None, None, None)


def test_animated_pictures_hold_the_workflow(host):
    from PIL import Image

    images = torch.rand(3, 8, 10, 3)
    png = ui.ImageSaveHelper.get_save_animated_png_ui(images, "moving/png", Hides, 5.0, 4).as_dict()
    webp = ui.ImageSaveHelper.get_save_animated_webp_ui(images, "moving/webp", Hides, 5.0, True, 80, 4).as_dict()
    assert png["animated"] == webp["animated"] == (True,)
    files = [f"{host.output}/moving/{told['images'][0]['filename']}" for told in (png, webp)]
    for file in files:
        with Image.open(file) as picture:
            assert picture.n_frames == 3 and picture.size == (10, 8)
    assert b'workflow\0{"nodes": []}' in Path(files[0]).read_bytes()
    with Image.open(files[1]) as picture:
        exif = picture.getexif()
    assert exif[0x0110] == 'prompt:{"1": {"class_type": "X"}}' and exif[0x010F] == 'workflow:{"nodes": []}'
