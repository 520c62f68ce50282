"""Words and preference pairs are trained as diffusers' examples of textual inversion and Diffusion-DPO train them: the
same weights in diffusers' UNet and scheduler, transformers' text encoder and tokenizer, and PyTorch's AdamW give the
same losses, and the same tensors after some steps.
"""

import os
from dataclasses import replace

import comfy.sd1_clip
import pytest
import torch
import torch.nn.functional as F
from families import build, conditions, latent
from graft_nodes import host as wall
from graft_nodes.training.data.dataset import Conditioning, Dataset, WorsePicture
from graft_nodes.training.random_draws import generator
from graft_nodes.training.run.batch_loader import BatchSchedule
from tiny_encoders import ENCODERS, clip_of

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

WORD, VECTORS = "sks_hat", 3
STEPS, RATE, DECAY = 6, 5e-3, 0.01
BETA = 40.0  # of the paper; the example's --beta_dpo is half of it
UNET = {
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
    "cross_attention_dim": 12,
    "attention_head_dim": 8,  # heads, as the configs of SD 1.x count them
}


def _unet(patcher):
    """diffusers' UNet with the weights of ComfyUI's, by diffusers' own conversion."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    unet = diffusers.UNet2DConditionModel(**UNET)
    unet.load_state_dict(_converted(patcher.model.diffusion_model.state_dict(), convert_ldm_unet_checkpoint))
    return unet.requires_grad_(False).eval()


def _converted(state, convert):
    config = {**UNET, "class_embed_type": None, "addition_embed_type": None}
    named = {f"model.diffusion_model.{key}": tensor.detach().clone() for key, tensor in state.items()}
    return convert(named, config)


def _text_encoder(clip):
    """transformers' CLIP with the weights of ComfyUI's, and ComfyUI's files in transformers' tokenizer."""
    settings = ENCODERS["sd1"][3]["clip_l"]
    config = transformers.CLIPTextConfig(**settings, hidden_act="quick_gelu", eos_token_id=49407)
    encoder = transformers.CLIPTextModel(config)
    own = clip.cond_stage_model.clip_l.transformer.state_dict()
    missing, _ = encoder.load_state_dict({key: tensor.clone() for key, tensor in own.items()}, strict=False)
    assert not [key for key in missing if "position_ids" not in key]
    folder = os.path.join(os.path.dirname(comfy.sd1_clip.__file__), "sd1_tokenizer")
    return encoder.requires_grad_(False).eval(), transformers.CLIPTokenizer.from_pretrained(folder)


def _scheduler():
    """SD 1.x's."""
    return diffusers.DDPMScheduler(
        num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    )


def _drawn(state, dataset, step):
    """What the run draws for a step: its batch, timesteps and noise."""
    (batch,) = BatchSchedule.from_state(state, dataset).batches(step, 0)
    draws = generator(state.start.seed, step, "noise part 0")
    timesteps = (torch.rand(len(batch.captions), generator=draws) * 1000).long()
    return batch, timesteps, torch.randn(batch.latents.shape, generator=draws)


def _begin(host, data, **given):
    (optimizer,) = host.call(
        "GraftOptimizer",
        learning_rate=RATE,
        weight_decay=DECAY,
        batch_size=2,
        total_steps=STEPS,
        clip_norm=0.0,
        precision="float32",
    )
    state, _ = host.call("GraftTrainStart", dataset=data, optimizer=optimizer, run="as diffusers", **given)
    return state


def _same_way(found, expected, begun):
    """Both have gone the same way from `begun`, within a hundredth of its length."""
    way = torch.linalg.vector_norm(expected - begun)
    assert way > 0 and torch.linalg.vector_norm(found - expected) < 1e-2 * way


def test_a_word_is_trained_as_by_diffusers_textual_inversion(host, monkeypatch):
    clip = clip_of("sd1", monkeypatch)
    with torch.inference_mode():
        model = build("sd1", context_dim=12)
    captions = [f"a photo of a {WORD}", f"a rendering of a {WORD} on a table"]
    conditionings = wall.encoding.encode_captions(clip, ["", *captions])
    data = Dataset.from_latents([latent("sd1", seed) for seed in range(2)], captions, conditionings)
    (words,) = host.call(
        "GraftWords", words=WORD, initial="fox", count=VECTORS, learning_rate=0.0, max_norm=0.0, alone=True
    )
    (objective,) = host.call("GraftObjective", conditioning_dropout=0.0)
    state = _begin(host, data, model=model, clip=clip, words=words, objective=objective)
    begun = state.trained[f"bundle_emb.{WORD}.clip_l"]
    trained = host.call("TrainStep", state=state, steps=STEPS, validate_every=0)[0]

    unet, (encoder, tokenizer), scheduler = _unet(model), _text_encoder(clip), _scheduler()
    names = [WORD, *(f"{WORD}_{number}" for number in range(1, VECTORS))]
    assert tokenizer.add_tokens(names) == VECTORS
    encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    table = encoder.get_input_embeddings().weight
    rows = tokenizer.convert_tokens_to_ids(names)
    (fox,) = tokenizer.encode("fox", add_special_tokens=False)
    with torch.no_grad():
        table[rows] = table[fox].clone()
    assert torch.equal(table[rows], begun)
    table.requires_grad_(True)
    before = table.detach().clone()
    optimizer = torch.optim.AdamW([table], lr=RATE, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        batch, timesteps, noise = _drawn(state, data, step)
        clean = batch.latents.float() * 0.18215
        texts = [caption.replace(WORD, " ".join(names)) for caption in batch.captions]
        ids = tokenizer(texts, padding="max_length", max_length=77, return_tensors="pt").input_ids
        context = encoder(ids)[0]
        found = unet(scheduler.add_noise(clean, noise, timesteps), timesteps, context).sample
        loss = F.mse_loss(found, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        others = torch.ones(len(table), dtype=torch.bool)
        others[rows] = False
        with torch.no_grad():  # the example puts every other token's vector back
            table[others] = before[others]
        losses.append(float(loss.detach()))
    assert list(trained.history.loss) == pytest.approx(losses, rel=2e-4)
    _same_way(trained.trained[f"bundle_emb.{WORD}.clip_l"], table[rows].detach(), begun)


def test_pairs_are_trained_as_by_diffusers_example_of_diffusion_dpo(host):
    """Here every attention weight is trained, and the reference is a frozen copy, as in the paper."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    with torch.inference_mode():
        model = build("sd1", context_dim=12)
    captions = ["a", "b"]
    texts = {text: Conditioning(*conditions("sd1", seed)) for seed, text in enumerate(("", *captions))}
    made = Dataset.from_latents([latent("sd1", seed) for seed in range(2)], captions, texts)
    worse = [WorsePicture(latent("sd1", 5 + seed).float()) for seed in range(2)]
    images = tuple(replace(image, worse=other) for image, other in zip(made.images, worse, strict=True))
    data = replace(made, images=images)
    (adapter,) = host.call("GraftAdapter", kind="full", targets="attention")
    (objective,) = host.call("GraftObjective", loss="dpo", beta=BETA, conditioning_dropout=0.0)
    state = _begin(host, data, model=model, adapter=adapter, objective=objective)
    trained = host.call("TrainStep", state=state, steps=STEPS, validate_every=0)[0]
    begun = model.model.diffusion_model.state_dict()
    moved = _converted({**begun, **trained.trained}, convert_ldm_unet_checkpoint)
    begun = _converted(begun, convert_ldm_unet_checkpoint)

    unet, reference, scheduler = _unet(model), _unet(model), _scheduler()
    weights = {key: weight for key, weight in unet.named_parameters() if not torch.equal(moved[key], begun[key])}
    assert len(weights) == len(trained.trained)
    optimizer = torch.optim.AdamW(
        [weight.requires_grad_(True) for weight in weights.values()], RATE, weight_decay=DECAY
    )
    losses = []
    for step in range(STEPS):
        batch, timesteps, noise = _drawn(state, data, step)
        clean = torch.cat([batch.latents, batch.worse]).float() * 0.18215
        timesteps, noise = timesteps.repeat(2), noise.repeat(2, 1, 1, 1)
        context = torch.cat([texts[caption].context for caption in batch.captions]).repeat(2, 1, 1)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        preferred = _preferred(unet(noisy, timesteps, context).sample, noise)
        with torch.no_grad():
            base = _preferred(reference(noisy, timesteps, context).sample, noise)
        loss = -F.logsigmoid(BETA / 2 * (preferred - base)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert max(losses) - min(losses) > 0.05
    assert list(trained.history.loss) == pytest.approx(losses, rel=1e-3)
    for key, weight in weights.items():
        _same_way(moved[key], weight.detach(), begun[key])


def _preferred(found, noise):
    """By how much the error of each worse picture is larger than that of the better one."""
    better, worse = F.mse_loss(found, noise, reduction="none").mean(dim=(1, 2, 3)).chunk(2)
    return worse - better
