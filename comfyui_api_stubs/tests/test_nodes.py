"""Loading packs, and the core nodes that hold no model. Holds for a real ComfyUI too."""

from __future__ import annotations

import json
import os

import pytest
import torch

from comfyui_api_stubs.tests import ghostscript as starting
from comfyui_api_stubs.tests.which_host import REAL

V1 = """
class One:
    RETURN_TYPES = ("INT",)
    FUNCTION = "go"
    CATEGORY = "test"
    @classmethod
    def INPUT_TYPES(cls): return {"required": {}}
    def go(self): return (1,)
NODE_CLASS_MAPPINGS = dict(LoadTestV1=One)
NODE_DISPLAY_NAME_MAPPINGS = dict(LoadTestV1="One")
WEB_DIRECTORY = "./js"
"""
V3 = """
from comfy_api.latest import ComfyExtension, io
from .part import VALUE
class Two(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="LoadTestV3", display_name="Two", category="test", outputs=[io.Int.Output()])
    @classmethod
    def execute(cls): return io.NodeOutput(VALUE)
class Pack(ComfyExtension):
    async def get_node_list(self): return [Two]
async def comfy_entrypoint(): return Pack()
"""


def load(host, path, **more):
    return host.loop.run_until_complete(host.nodes.load_custom_node(str(path), **more))


def pack(folder, source, **files):
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_v1_pack(host, tmp_path):
    folder = pack(tmp_path / "one_pack", V1)
    (folder / "js").mkdir()
    assert load(host, folder)
    assert host.call("LoadTestV1") == (1,) and host.nodes.NODE_DISPLAY_NAME_MAPPINGS["LoadTestV1"] == "One"
    assert host.nodes.EXTENSION_WEB_DIRS["one_pack"] == str(folder / "js")
    assert host.node("LoadTestV1").RELATIVE_PYTHON_MODULE == "custom_nodes.one_pack"


def test_a_v3_pack_with_an_async_entry_point_and_relative_imports(host, tmp_path):
    assert load(host, pack(tmp_path / "two.pack", V3, part="VALUE = 2"))
    assert host.call("LoadTestV3") == (2,) and host.nodes.NODE_DISPLAY_NAME_MAPPINGS["LoadTestV3"] == "Two"
    info = host.node("LoadTestV3").GET_NODE_INFO_V1()
    assert info["python_module"] == "custom_nodes.two.pack"


def test_a_single_file(host, tmp_path):
    path = tmp_path / "single.py"
    path.write_text(V1.replace("LoadTestV1", "LoadTestFile"))
    assert load(host, path) and host.call("LoadTestFile") == (1,)


def test_ids_to_ignore(host, tmp_path):
    before = host.node("EmptyLatentImage")
    source = V1.replace("LoadTestV1", "EmptyLatentImage")
    assert load(host, pack(tmp_path / "thief", source), ignore={"EmptyLatentImage"})
    assert host.node("EmptyLatentImage") is before


BROKEN = (
    "raise RuntimeError('broken')",
    "x = (",
    "import no_such_module_at_all",
    "NOTHING = 1",
    "comfy_entrypoint = 3",
)


@pytest.mark.parametrize("source", BROKEN)
def test_a_broken_pack_is_left_out(host, tmp_path, source):
    before = set(host.nodes.NODE_CLASS_MAPPINGS)
    assert load(host, pack(tmp_path / "broken", source)) is False
    assert set(host.nodes.NODE_CLASS_MAPPINGS) == before


def test_saved_pictures_carry_the_workflow(host):
    from PIL import Image

    prompt = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 6, "height": 4, "batch_size": 2, "color": 0xFF8000}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "nodes/saved"}},
    }
    result = host.run(prompt, extra_data={"extra_pnginfo": {"workflow": {"id": 5}}})
    files = result["history"]["2"]["images"]
    assert [file["filename"] for file in files] == ["saved_00001_.png", "saved_00002_.png"]
    with Image.open(os.path.join(host.output, files[0]["subfolder"], files[0]["filename"])) as picture:
        assert picture.size == (6, 4) and picture.getpixel((0, 0)) == (255, 128, 0)
        assert json.loads(picture.text["prompt"]) == prompt and json.loads(picture.text["workflow"]) == {"id": 5}


def test_previews_go_to_temp(host):
    shown = host.run(
        {
            "1": {"class_type": "EmptyImage", "inputs": {"width": 6, "height": 4, "batch_size": 1, "color": 0}},
            "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
        }
    )["history"]["2"]["images"]
    assert shown[0]["type"] == "temp" and os.path.isfile(os.path.join(host.temp, shown[0]["filename"]))


def test_load_image(host):
    from PIL import Image

    picture = Image.new("RGBA", (5, 3), (255, 0, 51, 255))
    picture.putpixel((0, 0), (255, 0, 51, 0))
    picture.save(os.path.join(host.input, "loaded.png"))
    prompt = {"1": {"class_type": "LoadImage", "inputs": {"image": "loaded.png"}}}
    found = host.run(prompt, capture={"image": ["1", 0], "mask": ["1", 1]})["captured"]
    assert found["image"].shape == (1, 3, 5, 3)
    torch.testing.assert_close(found["image"][0, 1, 1], torch.tensor([1.0, 0.0, 0.2]))
    assert found["mask"].shape == (1, 3, 5) and found["mask"][0, 0, 0] == 1 and found["mask"].sum() == 1
    picture.resize((9, 9)).save(os.path.join(host.input, "loaded.png"))
    assert host.run(prompt, capture={"image": ["1", 0]})["captured"]["image"].shape == (
        1,
        9,
        9,
        3,
    ), "a changed file is read again"
    missing = host.run({"1": {"class_type": "LoadImage", "inputs": {"image": "none.png"}}}, capture={"image": ["1", 0]})
    assert (
        missing["errors"]["1"][0]["type"] == "custom_validation_failed"
        and "none.png" in missing["errors"]["1"][0]["details"]
    )


def test_latent_batches(host):
    latent = {"samples": torch.arange(3.0).reshape(3, 1, 1, 1), "noise_mask": torch.ones(1, 1, 8, 8)}
    (picked,) = host.call("LatentFromBatch", samples=latent, batch_index=1, length=5)
    assert picked["samples"].flatten().tolist() == [1, 2] and picked["batch_index"] == [1, 2]
    (repeated,) = host.call("RepeatLatentBatch", samples=picked, amount=2)
    assert repeated["samples"].flatten().tolist() == [1, 2, 1, 2] and repeated["batch_index"] == [1, 2, 3, 4]
    (masked,) = host.call("SetLatentNoiseMask", samples=latent, mask=torch.zeros(2, 8, 8))
    assert masked["noise_mask"].shape == (2, 1, 8, 8) and masked["samples"] is latent["samples"]


def test_two_batches_of_latents_become_one_in_the_size_of_the_first(host):
    first = {"samples": torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 1, 4, 4), "batch_index": [5, 6]}
    second = {"samples": torch.full((3, 1, 8, 12), 7.0)}
    (both,) = host.call("LatentBatch", samples1=first, samples2=second)
    assert both["samples"].shape == (5, 1, 4, 4) and both["samples"][:, 0, 0, 0].tolist() == [0, 1, 7, 7, 7]
    assert both["batch_index"] == [5, 6, 0, 1, 2] and first["batch_index"] == [5, 6]


class TwoEncoders:
    """A CLIP with a chunk for each word, and one for none."""

    def tokenize(self, text):
        return {name: [f"{name}-{word}" for word in text.split() or ["none"]] for name in ("g", "l")}

    def encode_from_tokens_scheduled(self, tokens, add_dict):
        return [[tokens, add_dict]]


@pytest.mark.parametrize(
    ("text_g", "text_l", "expected"),
    [
        ("a b c", "d", {"g": ["g-a", "g-b", "g-c"], "l": ["l-d", "l-none", "l-none"]}),
        ("a", "d e", {"g": ["g-a", "g-none"], "l": ["l-d", "l-e"]}),
        ("a", "", {"g": ["g-a"], "l": ["l-none"]}),
    ],
)
def test_a_text_for_each_encoder_of_sdxl(host, text_g, text_l, expected):
    sizes = {"width": 8, "height": 16, "crop_w": 1, "crop_h": 2, "target_width": 3, "target_height": 4}
    ((tokens, added),) = host.call("CLIPTextEncodeSDXL", clip=TwoEncoders(), text_g=text_g, text_l=text_l, **sizes)[0]
    assert tokens == expected and added == sizes


@pytest.mark.skipif(REAL, reason="the real one raises a KeyError")
def test_a_clip_without_sdxls_encoders_is_named(host):
    class One(TwoEncoders):
        def tokenize(self, text):
            return {"l": [text]}

    with pytest.raises(ValueError, match="the CLIP has no CLIP-G"):
        host.call("CLIPTextEncodeSDXL", clip=One(), text_g="a", text_l="b")


def test_pictures(host):
    (both,) = host.call("ImageBatch", image1=torch.zeros(1, 4, 4, 3), image2=torch.ones(2, 8, 8, 3))
    assert both.shape == (3, 4, 4, 3) and both[1:].min() == 1
    assert host.call("ImageInvert", image=both)[0][0].min() == 1
    (plain,) = host.call("EmptyImage", width=2, height=3, batch_size=1, color=0x00FF00)
    assert plain.shape == (1, 3, 2, 3) and plain[0, 0, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("width", "height", "crop", "expected"),
    [
        (4, 0, "disabled", (2, [1, 3, 5, 7])),
        (0, 2, "disabled", (2, [1, 3, 5, 7])),
        (2, 4, "disabled", (4, [2, 6])),
        (2, 2, "center", (2, [3, 5])),
        (0, 0, "center", (4, [0, 1, 2, 3, 4, 5, 6, 7])),
    ],
)
def test_pictures_in_another_size(host, width, height, crop, expected):
    image = torch.arange(8.0).repeat(4, 1)[None, :, :, None].expand(1, 4, 8, 3)
    sizes = {"width": width, "height": height, "crop": crop}
    (scaled,) = host.call("ImageScale", image=image, upscale_method="nearest-exact", **sizes)
    rows, columns = expected
    assert scaled.shape == (1, rows, len(columns), 3) and scaled[0, 0, :, 0].tolist() == columns


def test_conditioning(host):
    one, two = [[torch.ones(1, 2, 3), {"pooled_output": torch.ones(1, 3)}]], [[torch.zeros(1, 2, 3), {}]]
    assert host.call("ConditioningCombine", conditioning_1=one, conditioning_2=two)[0] == one + two
    ((silent, settings),) = host.call("ConditioningZeroOut", conditioning=one)[0]
    assert silent.abs().sum() == 0 and settings["pooled_output"].sum() == 0 and one[0][1]["pooled_output"].sum() == 3


@pytest.mark.parametrize(
    ("kind", "value"), [("Int", 5), ("Float", 0.5), ("String", "a"), ("StringMultiline", "a\nb"), ("Boolean", True)]
)
def test_primitives(host, kind, value):
    prompt = {"1": {"class_type": f"Primitive{kind}", "inputs": {"value": value}}}
    assert host.run(prompt, capture={"value": ["1", 0]})["captured"] == {"value": value}


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (5, "5"), ([1, 2], "[1,2]"), (None, "None")])
def test_preview_any(host, value, text):
    shown = host.node("PreviewAny")().main(value)
    assert "".join(shown["ui"]["text"][0].split()) == text  # 0.33.0 indents lists


def test_a_text_encoder_that_is_none_is_named(host):
    with pytest.raises(RuntimeError, match="clip input"):
        host.call("CLIPTextEncode", clip=None, text="x")


@pytest.mark.parametrize(
    ("node_id", "inputs", "named"),
    [
        ("UNETLoader", {"unet_name": "none.safetensors", "weight_dtype": "default"}, "none.safetensors"),
        ("LoraLoaderModelOnly", {"model": None, "lora_name": "none.safetensors"}, "none.safetensors"),
        ("CheckpointLoaderSimple", {"ckpt_name": "none.safetensors"}, "none.safetensors"),
    ],
)
def test_missing_files_are_named(host, node_id, inputs, named):
    with pytest.raises(FileNotFoundError, match=named):
        host.call(node_id, **inputs)


@pytest.mark.skipif(REAL or os.name == "nt", reason="ComfyUI opens every format; the Ghostscript is a shell script")
def test_load_image_starts_no_program_for_an_eps(host, tmp_path, monkeypatch):
    started = starting.watch_ghostscript(tmp_path, monkeypatch)
    with open(os.path.join(host.input, "drawing.png"), "wb") as file:
        file.write(starting.EPS)
    with pytest.raises(OSError, match="cannot identify image file"):
        host.call("LoadImage", image="drawing.png")
    assert not started.exists()
