"""Loading UNet files of known families, refusing others by name, text encoders, and small host functions."""

import asyncio
import subprocess
import sys

import comfy.latent_formats
import comfy.model_base
import comfy.model_detection
import comfy.model_management as management
import comfy.sd
import comfy.supported_models
import comfy.supported_models_base
import comfy.utils
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy_api.latest import io

import comfyui_api_stubs
import nodes

EMBEDDED = comfyui_api_stubs.MODULES in sys.path
only_embedded = pytest.mark.skipif(not EMBEDDED, reason="a message of the embedded host")
COMMON = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [1],
    "channel_mult": [1],
    "use_spatial_transformer": True,
    "legacy": False,
}


def unet_file(context, linear, depth=1, **more):
    """Random weights of a UNet with one level, as wide as the family's."""
    config = {
        **COMMON,
        "transformer_depth": [depth],
        "transformer_depth_output": [depth] * 2,
        "transformer_depth_middle": depth,
        "context_dim": context,
        "use_linear_in_transformer": linear,
        "num_heads": 8,
        **more,
    }
    shapes = UNetModel(**config, device="meta").state_dict()
    g = torch.Generator().manual_seed(0)
    return {key: torch.randn(value.shape, generator=g) * 0.02 for key, value in shapes.items()}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize(("family", "context", "linear"), [("SD15", 768, False), ("SD20", 1024, True)])
def test_a_unet_file(tmp_path, prefix, family, context, linear):
    state = unet_file(context, linear)
    comfy.utils.save_torch_file(
        {prefix + key: value for key, value in state.items()}, str(tmp_path / "unet.safetensors")
    )
    patcher = comfy.sd.load_diffusion_model(str(tmp_path / "unet.safetensors"), model_options={"dtype": torch.float32})
    assert type(patcher.model.model_config).__name__ == family
    assert isinstance(patcher.get_model_object("latent_format"), comfy.latent_formats.SD15)
    loaded = patcher.model.diffusion_model.state_dict()
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], value) for key, value in state.items())
    attention = patcher.model.diffusion_model.middle_block[1].transformer_blocks[0].attn1
    assert (attention.heads, attention.dim_head) == ((8, 40) if family == "SD15" else (5, 64))
    with torch.no_grad():
        out = patcher.model.apply_model(
            torch.zeros(1, 4, 8, 8), torch.tensor([2.0]), c_crossattn=torch.zeros(1, 3, context)
        )
    assert out.shape == (1, 4, 8, 8)


def test_weights_are_stored_as_asked_and_computed_in_float32():
    patcher = comfy.sd.load_diffusion_model_state_dict(unet_file(768, False), model_options={"dtype": torch.bfloat16})
    assert patcher.model_dtype() == torch.bfloat16
    assert {value.dtype for value in patcher.model.diffusion_model.state_dict().values()} == {torch.bfloat16}
    if management.cpu_mode():
        assert patcher.model.manual_cast_dtype == torch.float32
    x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 768)
    with torch.no_grad():
        out = patcher.model.apply_model(x, torch.tensor([2.0]), c_crossattn=context)
        rounded = {key: value.float() for key, value in patcher.model.diffusion_model.state_dict().items()}
        plain = comfy.sd.load_diffusion_model_state_dict(rounded, model_options={"dtype": torch.float32})
        torch.testing.assert_close(
            out, plain.model.apply_model(x, torch.tensor([2.0]), c_crossattn=context), rtol=1e-2, atol=1e-3
        )


def test_sdxl_is_recognized_by_shape():
    config = {
        **COMMON,
        "num_res_blocks": [2, 2, 2],
        "channel_mult": [1, 2, 4],
        "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10,
        "context_dim": 2048,
        "use_linear_in_transformer": True,
        "num_head_channels": 64,
        "num_classes": "sequential",
        "adm_in_channels": 2816,
    }
    state = UNetModel(**config, device="meta").state_dict()
    assert len(state) == 1680 and sum(value.numel() for value in state.values()) == 2_567_463_684  # as published
    found = comfy.model_detection.model_config_from_unet(state, "")
    assert isinstance(found, comfy.supported_models.SDXL)
    assert {key: found.unet_config[key] for key in config if key != "image_size"} == {
        key: value for key, value in config.items() if key != "image_size"
    }


def test_sd15_has_the_published_size():
    config = {
        **COMMON,
        "num_res_blocks": [2] * 4,
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1] * 6 + [0] * 2,
        "transformer_depth_output": [1] * 9 + [0] * 3,
        "transformer_depth_middle": 1,
        "context_dim": 768,
        "num_heads": 8,
    }
    state = UNetModel(**config, device="meta").state_dict()
    assert len(state) == 686 and sum(value.numel() for value in state.values()) == 859_520_964


@only_embedded
def test_what_cannot_be_loaded_says_why(tmp_path):
    path = str(tmp_path / "full.safetensors")
    keys = ("first_stage_model.decoder.conv_in.weight", "model.diffusion_model.out.0.bias")
    comfy.utils.save_torch_file({key: torch.ones(1) for key in keys}, path)
    with pytest.raises(RuntimeError, match=r"full\.safetensors is a full checkpoint .*real ComfyUI"):
        comfy.sd.load_checkpoint_guess_config(path)
    path = str(tmp_path / "some_lora.safetensors")
    comfy.utils.save_torch_file({"lora_unet_x.lora_up.weight": torch.ones(1)}, path)
    with pytest.raises(RuntimeError, match=r"some_lora\.safetensors is not a diffusion model .*LoRA node"):
        comfy.sd.load_diffusion_model(path)
    with pytest.raises(ValueError, match=r"model\.ckpt: the embedded host loads \.safetensors only"):
        comfy.sd.load_diffusion_model("model.ckpt")
    (tmp_path / "cut.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ValueError, match=r"cut\.safetensors is not a whole safetensors file"):
        comfy.sd.load_diffusion_model(str(tmp_path / "cut.safetensors"))
    state = unet_file(768, False)
    del state["out.2.weight"]
    state["out.2.weight_misspelled"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"1 weights are missing .*out\.2\.weight"):
        comfy.sd.load_diffusion_model_state_dict(state)
    with pytest.raises(NotImplementedError, match="VAE needs a real ComfyUI"):
        comfy.sd.VAE(sd={})


class Tokenizer:
    """Letters as tokens."""

    def __init__(self, embedding_directory=None, tokenizer_data=None):
        self.data = tokenizer_data

    def tokenize_with_weights(self, text, return_word_ids=False, **kwargs):
        return {"mine": [[(ord(letter) - 97, 1.0) for letter in text]]}

    def state_dict(self):
        return {}


class Encoder(torch.nn.Module):
    """An embedding; notes its options."""

    def __init__(self, dtype=None, device=None, model_options=None, width=4):
        super().__init__()
        self.dtypes, self.options = {dtype}, []
        self.embed = torch.nn.Embedding(26, width, dtype=dtype, device=device)

    def set_clip_options(self, options):
        self.options.append(options)

    def reset_clip_options(self):
        self.options.append("reset")

    def encode_token_weights(self, tokens):
        cond = self.embed(torch.tensor([[token for token, _ in tokens["mine"][0]]]))
        return cond, cond.mean(1), {"extra": 1}

    def load_sd(self, state):
        return self.load_state_dict(state, strict=False)


@pytest.fixture
def clip():
    target = comfy.supported_models_base.ClipTarget(Tokenizer, Encoder)
    target.params["width"] = 6
    return comfy.sd.CLIP(target, model_options={"dtype": torch.float32})


def test_a_text_encoder_of_ones_own(clip):
    tokens = clip.tokenize("abz")
    assert tokens == {"mine": [[(0, 1.0), (1, 1.0), (25, 1.0)]]}
    with torch.no_grad():
        ((cond, options),) = clip.encode_from_tokens_scheduled(tokens, add_dict={"start_percent": 0.5})
        table = clip.cond_stage_model.embed.weight
        assert torch.equal(cond, table[[0, 1, 25]][None]) and torch.equal(
            options["pooled_output"], table[[0, 1, 25]].mean(0)[None]
        )
        assert options["start_percent"] == 0.5 and options["extra"] == 1
        assert torch.equal(clip.encode("b"), table[[1]][None])
    assert clip.cond_stage_model.options[0] == "reset"


def test_a_clip_clone_with_patches(clip):
    table = clip.cond_stage_model.embed.weight.detach().clone()
    other = clip.clone()
    other.clip_layer(-2)
    assert other.add_patches({"embed.weight": ("diff", (torch.ones(26, 6),))}, 0.5) == ["embed.weight"]
    with torch.no_grad():
        torch.testing.assert_close(other.encode("c")[0, 0], table[2] + 0.5)
        assert {"layer": -2} in clip.cond_stage_model.options
        assert torch.equal(clip.encode("c")[0, 0], table[2])
    assert torch.equal(clip.get_key_patches()["embed.weight"][0][0], table) and torch.equal(
        clip.get_sd()["embed.weight"], table
    )
    missing, unexpected = clip.load_sd({"embed.weight": table * 2, "other": table})
    assert (missing, unexpected) == ([], ["other"])


def test_interruption_is_raised_once():
    management.interrupt_current_processing()
    assert management.processing_interrupted()
    with pytest.raises(management.InterruptProcessingException):
        management.throw_exception_if_processing_interrupted()
    management.throw_exception_if_processing_interrupted()


def test_progress_goes_to_the_hook():
    told, before = [], comfy.utils.PROGRESS_BAR_HOOK
    try:
        comfy.utils.set_progress_bar_global_hook(
            lambda value, total, preview, node_id=None: told.append((value, total, preview))
        )
        bar = comfy.utils.ProgressBar(4)
        bar.update(1)
        bar.update_absolute(9, 5, "preview")
    finally:
        comfy.utils.set_progress_bar_global_hook(before)
    assert told == [(1, 4, None), (5, 5, "preview")]


@only_embedded
def test_a_pack_with_a_list_for_its_nodes_is_told_what_is_wanted(tmp_path, caplog):
    (tmp_path / "pack.py").write_text("NODE_CLASS_MAPPINGS = []", encoding="utf-8")
    assert asyncio.run(nodes.load_custom_node(str(tmp_path / "pack.py"))) is False
    assert "its NODE_CLASS_MAPPINGS is a list, and must be a dict of node classes by id" in caplog.text


@only_embedded
def test_a_node_whose_execute_is_no_class_method_is_told_so():
    class Node(io.ComfyNode):
        @classmethod
        def define_schema(cls):
            return io.Schema("Node")

        def execute(self):
            return io.NodeOutput()

    with pytest.raises(TypeError, match="execute of Node is not a class method; write @classmethod above it"):
        Node.GET_SCHEMA()


def test_resizing():
    assert comfy.utils.repeat_to_batch_size(torch.arange(3), 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert comfy.utils.repeat_to_batch_size(torch.arange(3), 2).tolist() == [0, 1]
    image = torch.arange(16.0).reshape(1, 1, 2, 8)
    assert comfy.utils.common_upscale(image, 2, 2, "nearest-exact", "center").tolist() == [[[[3, 4], [11, 12]]]]
    assert comfy.utils.common_upscale(image, 4, 1, "area", "disabled").tolist() == [[[[4.5, 6.5, 8.5, 10.5]]]]


def test_state_dict_prefixes():
    state = {"a.x": 1, "a.y": 2, "b": 3}
    assert comfy.utils.state_dict_prefix_replace(state, {"a.": "c."}, filter_keys=True) == {
        "c.x": 1,
        "c.y": 2,
    } and state == {"b": 3}
    assert comfy.utils.state_dict_prefix_replace({"a.x": 1, "b": 3}, {"a.": ""}) == {"x": 1, "b": 3}


@only_embedded
def test_importing_the_host_is_quick_and_needs_torch_numpy_safetensors_and_tqdm_alone():
    code = (
        f"import sys; sys.path.insert(0, {comfyui_api_stubs.MODULES!r}); import torch, numpy, safetensors.torch; known"
        " = set(sys.modules);import comfy.sd, comfy.samplers, comfy.sample; print(sorted({m.split('.')[0] for m in"
        " set(sys.modules) - known if getattr(sys.modules[m], '__file__', None) and 'site-packages' in"
        " sys.modules[m].__file__}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['tqdm']"
