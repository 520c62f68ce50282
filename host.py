"""The wall to ComfyUI: models, folders, progress and events (comfy.*, folder_paths, server). It translates and holds no policy."""

from __future__ import annotations

# --- LoRA keys, injections, attention patches -------------------------------------------------------------------------------------


# --- denoiser, conditioning, latents, fingerprint ---------------------------------------------------------------------------------


# --- folders, progress, interruption ----------------------------------------------------------------------------------------------


# --- demo model -------------------------------------------------------------------------------------------------------------------
