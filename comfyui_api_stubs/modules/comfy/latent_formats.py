"""How latents of a model family are scaled and how many channels they have."""


class LatentFormat:
    """Latents as they are."""

    scale_factor = 1.0
    latent_channels = 4
    latent_dimensions = 2
    latent_rgb_factors = None
    latent_rgb_factors_bias = None
    taesd_decoder_name = None

    def process_in(self, latent):
        """From the VAE's scale to the model's."""
        return latent * self.scale_factor

    def process_out(self, latent):
        """From the model's scale to the VAE's."""
        return latent / self.scale_factor


class SD15(LatentFormat):
    """Stable Diffusion 1.x and 2.x."""

    def __init__(self, scale_factor=0.18215):
        self.scale_factor = scale_factor


class SDXL(LatentFormat):
    """Stable Diffusion XL."""

    scale_factor = 0.13025
