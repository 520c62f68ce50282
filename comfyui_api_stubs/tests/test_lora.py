"""Names of weights in LoRA files, spelled out, and patched weights against the formula."""

import comfy.latent_formats
import comfy.lora
import comfy.model_base
import comfy.model_patcher
import comfy.sd
import comfy.supported_models_base
import pytest
import torch
from comfy.weight_adapter import LoRAAdapter

CPU = torch.device("cpu")
CONFIG = {
    "image_size": 32,
    "in_channels": 3,
    "out_channels": 3,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 16,
    "num_heads": 4,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": False,
    "legacy": False,
    "adm_in_channels": None,
}


@pytest.fixture
def patcher():
    class Config(comfy.supported_models_base.BASE):
        unet_config = {}  # noqa: RUF012
        unet_extra_config = {}  # noqa: RUF012

    config = Config(CONFIG)
    config.unet_config = {**CONFIG, "dtype": torch.float32}
    model = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.EPS, device=CPU)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.diffusion_model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g))
    return comfy.model_patcher.ModelPatcher(model, CPU, CPU)


def test_names_of_a_weight(patcher):
    names = comfy.lora.model_lora_keys_unet(patcher.model, {})
    weight = "diffusion_model.input_blocks.3.1.transformer_blocks.0.attn1.to_out.0.weight"
    assert {name for name, key in names.items() if key == weight} == {
        "diffusion_model.input_blocks.3.1.transformer_blocks.0.attn1.to_out.0",
        "lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_out_0",
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0",
        "lycoris_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0",
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_out",
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.processor.to_out",
    }
    spelled = {
        "lora_unet_mid_block_attentions_0_proj_in": "middle_block.1.proj_in.weight",
        "lora_unet_up_blocks_0_attentions_1_transformer_blocks_0_ff_net_0_proj": (
            "output_blocks.1.1.transformer_blocks.0.ff.net.0.proj.weight"
        ),
        "lora_unet_up_blocks_0_upsamplers_0_conv": "output_blocks.1.2.conv.weight",
        "lora_unet_up_blocks_1_resnets_0_conv_shortcut": "output_blocks.2.0.skip_connection.weight",
        "lora_unet_down_blocks_0_downsamplers_0_conv": "input_blocks.2.0.op.weight",
        "lora_unet_time_embedding_linear_2": "time_embed.2.weight",
        "lora_unet_conv_out": "out.2.weight",
    }
    assert {name: names[name] for name in spelled} == {name: f"diffusion_model.{key}" for name, key in spelled.items()}
    assert names["diffusion_model.out.2.bias"] == "diffusion_model.out.2.bias"


def test_names_of_text_encoders():
    class Encoder(torch.nn.Module):
        def state_dict(self):
            layer = "transformer.text_model.encoder.layers.7.self_attn.q_proj.weight"
            return dict.fromkeys(
                [f"clip_l.{layer}", f"clip_g.{layer}", "clip_g.transformer.text_projection.weight", "mine.embed.weight"]
            )

    names = comfy.lora.model_lora_keys_clip(Encoder(), {})
    layer = "transformer.text_model.encoder.layers.7.self_attn.q_proj"
    assert names["lora_te1_text_model_encoder_layers_7_self_attn_q_proj"] == f"clip_l.{layer}.weight"
    assert names["lora_te2_text_model_encoder_layers_7_self_attn_q_proj"] == f"clip_g.{layer}.weight"
    assert names["lora_te2_text_projection"] == "clip_g.transformer.text_projection.weight"
    assert names["text_encoders.mine.embed"] == "mine.embed.weight"
    assert names[f"text_encoder_2.{layer.removeprefix('transformer.')}"] == f"clip_g.{layer}.weight"


@pytest.mark.parametrize("alpha", [None, 2.0])
@pytest.mark.parametrize(
    "naming",
    [
        ("lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k", ".lora_up.weight", ".lora_down.weight"),
        ("unet.mid_block.attentions.0.transformer_blocks.0.attn2.processor.to_k", ".lora_B.weight", ".lora_A.weight"),
        ("diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k", ".lora.up.weight", ".lora.down.weight"),
        (
            "unet.mid_block.attentions.0.transformer_blocks.0.attn2.processor.to_k",
            "_lora.up.weight",
            "_lora.down.weight",
        ),
    ],
)
def test_lora(patcher, naming, alpha):
    name, up_name, down_name = naming
    up, down = torch.randn(64, 4), torch.randn(4, 16)
    file = {name + up_name: up, name + down_name: down}
    if alpha is not None:
        file[f"{name}.alpha"] = torch.tensor(alpha)
    weight = patcher.model.diffusion_model.middle_block[1].transformer_blocks[0].attn2.to_k.weight.clone()
    loaded, _ = comfy.sd.load_lora_for_models(patcher, None, file, 0.5, 0.0)
    loaded.patch_model(CPU)
    patched = patcher.model.diffusion_model.middle_block[1].transformer_blocks[0].attn2.to_k.weight
    torch.testing.assert_close(patched.data, weight + 0.5 * (1.0 if alpha is None else alpha / 4) * up @ down)
    loaded.unpatch_model(CPU)
    assert torch.equal(patcher.model.diffusion_model.middle_block[1].transformer_blocks[0].attn2.to_k.weight, weight)


def test_locon_tucker_and_plain_differences(patcher):
    g = torch.Generator().manual_seed(1)
    up, down, mid = (torch.randn(shape, generator=g) for shape in ((64, 4, 1, 1), (4, 32, 1, 1), (4, 4, 3, 3)))
    bias, norm = torch.randn(64, generator=g), torch.randn(64, generator=g)
    file = {
        "lora_unet_input_blocks_3_0_in_layers_2.lora_up.weight": up,
        "lora_unet_input_blocks_3_0_in_layers_2.lora_down.weight": down,
        "lora_unet_input_blocks_3_0_in_layers_2.lora_mid.weight": mid,
        "lora_unet_input_blocks_3_0_in_layers_2.diff_b": bias,
        "lora_unet_input_blocks_3_0_out_layers_0.w_norm": norm,
        "diffusion_model.out.2.set_weight": torch.ones(3, 32, 3, 3),
    }
    block = patcher.model.diffusion_model.input_blocks[3][0]
    conv, base_bias, base_norm = (
        block.in_layers[2].weight.clone(),
        block.in_layers[2].bias.clone(),
        block.out_layers[0].weight.clone(),
    )
    loaded, _ = comfy.sd.load_lora_for_models(patcher, None, file, 2.0, 0.0)
    loaded.patch_model(CPU)
    delta = torch.einsum("or,rqhw,qi->oihw", up[..., 0, 0], mid, down[..., 0, 0])
    torch.testing.assert_close(block.in_layers[2].weight.data, conv + 2 * delta, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(block.in_layers[2].bias.data, base_bias + 2 * bias)
    torch.testing.assert_close(block.out_layers[0].weight.data, base_norm + 2 * norm)
    assert torch.equal(patcher.model.diffusion_model.out[2].weight.data, torch.ones(3, 32, 3, 3))
    loaded.unpatch_model(CPU)


def test_an_adapter_in_the_hands_of_others(patcher):
    up, down = torch.randn(64, 2), torch.randn(2, 16)
    adapter = LoRAAdapter(set(), (up, down, None, None, None, None))
    key = "diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_v.weight"
    assert patcher.add_patches({key: adapter}, 0.25) == [key]
    weight = torch.randn(64, 16)
    torch.testing.assert_close(
        comfy.lora.calculate_weight(patcher.patches[key], weight.clone(), key), weight + 0.25 * up @ down
    )


def test_dora_rescales_rows():
    up, down, magnitude = torch.randn(6, 2), torch.randn(2, 4), torch.rand(6, 1)
    adapter, weight = LoRAAdapter(set(), (up, down, 2.0, None, magnitude, None)), torch.randn(6, 4)
    expected = (weight + up @ down) * magnitude / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(
        comfy.lora.calculate_weight([(1.0, adapter, 1.0, None, None)], weight.clone(), "w"),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )


def test_unknown_names_are_logged(patcher, caplog):
    with caplog.at_level("WARNING"):
        loaded, _ = comfy.sd.load_lora_for_models(
            patcher, None, {"lora_unet_nowhere.lora_up.weight": torch.ones(1, 1)}, 1.0, 1.0
        )
    assert loaded.patches == {} and "lora_unet_nowhere.lora_up.weight" in caplog.text


def test_patches_of_another_model(patcher):
    key, base = "diffusion_model.out.2.bias", patcher.model.diffusion_model.out[2].bias.clone()
    other = patcher.clone()
    other.add_patches({key: ("diff", (torch.ones(3),))})
    merged = patcher.clone()
    merged.add_patches(other.get_key_patches("diffusion_model.out.2.bias"), 0.25, 0.75)  # as ModelMergeSimple does
    merged.patch_model(CPU)
    torch.testing.assert_close(patcher.model.diffusion_model.out[2].bias.data, 0.75 * base + 0.25 * (base + 1))
    merged.unpatch_model(CPU)
