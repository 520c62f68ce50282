"""What a model predicts (EPS, V, flow) and its noise levels (ComfyUI's `comfy.model_sampling`)."""

import torch

from comfy.ldm.modules.diffusionmodules.util import make_beta_schedule


def rescale_zero_terminal_snr_sigmas(sigmas):
    """Noise levels shifted and scaled so that the last one has (nearly) no signal (Lin 2023, algorithm 1)."""
    signal = (1 / (sigmas**2 + 1)).sqrt()
    first, last = signal[0].clone(), signal[-1].clone()
    alpha_bar = ((signal - last) * first / (first - last)) ** 2
    alpha_bar[-1] = 4.8973451890853435e-08  # ComfyUI's stand-in for zero, which has no finite sigma
    return ((1 - alpha_bar) / alpha_bar) ** 0.5


def reshape_sigma(sigma, noise_dim):
    """(B,) to (B, 1, …) of noise_dim dimensions, a single value to a scalar."""
    return sigma.view(()) if sigma.nelement() == 1 else sigma.view(sigma.shape[:1] + (1,) * (noise_dim - 1))


class EPS:
    """The model predicts the noise: x = x0 + sigma n."""

    sigma_data: float

    def calculate_input(self, sigma, noise):
        """The noisy latent at unit variance."""
        return noise / (reshape_sigma(sigma, noise.ndim) ** 2 + self.sigma_data**2) ** 0.5

    def calculate_denoised(self, sigma, model_output, model_input):
        """x0 from the prediction."""
        return model_input - model_output * reshape_sigma(sigma, model_output.ndim)

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        """The latent with noise of that level."""
        sigma = reshape_sigma(sigma, noise.ndim)
        return noise * (torch.sqrt(1.0 + sigma**2.0) if max_denoise else sigma) + latent_image

    def inverse_noise_scaling(self, sigma, latent):
        """The latent as a sampler returns it."""
        return latent


class V_PREDICTION(EPS):
    """The model predicts the velocity alpha n - sigma x0 (Salimans 2022)."""

    def calculate_denoised(self, sigma, model_output, model_input):
        """x0 from the prediction."""
        sigma, data = reshape_sigma(sigma, model_output.ndim), self.sigma_data
        total = sigma**2 + data**2
        return model_input * data**2 / total - model_output * sigma * data / total**0.5


class CONST:
    """The model predicts the flow n - x0 of x = (1 - sigma) x0 + sigma n."""

    def calculate_input(self, sigma, noise):
        """The noisy latent as it is."""
        return noise

    def calculate_denoised(self, sigma, model_output, model_input):
        """x0 from the prediction."""
        return model_input - model_output * reshape_sigma(sigma, model_output.ndim)

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        """The latent with noise of that level."""
        sigma = reshape_sigma(sigma, noise.ndim)
        return sigma * noise + (1.0 - sigma) * latent_image

    def inverse_noise_scaling(self, sigma, latent):
        """The latent as a sampler returns it."""
        return latent / (1.0 - reshape_sigma(sigma, latent.ndim))


class ModelSamplingDiscrete(torch.nn.Module):
    """A table of noise levels for timesteps 0 to 999, interpolated in the logarithm."""

    sigmas: torch.Tensor
    log_sigmas: torch.Tensor

    def __init__(self, model_config=None, zsnr=None):
        super().__init__()
        settings = {} if model_config is None else model_config.sampling_settings
        self._register_schedule(
            given_betas=None,
            beta_schedule=settings.get("beta_schedule", "linear"),
            timesteps=settings.get("timesteps", 1000),
            linear_start=settings.get("linear_start", 0.00085),
            linear_end=settings.get("linear_end", 0.012),
            zsnr=settings.get("zsnr", False) if zsnr is None else zsnr,
        )
        self.sigma_data = 1.0

    def _register_schedule(
        self,
        given_betas=None,
        beta_schedule="linear",
        timesteps=1000,
        linear_start=1e-4,
        linear_end=2e-2,
        cosine_s=8e-3,
        zsnr=False,
    ):
        betas = (
            make_beta_schedule(beta_schedule, timesteps, linear_start, linear_end, cosine_s)
            if given_betas is None
            else given_betas
        )
        self.num_timesteps, self.linear_start, self.linear_end, self.zsnr = len(betas), linear_start, linear_end, zsnr
        alpha_bar = torch.cumprod(1.0 - betas, dim=0)
        sigmas = ((1 - alpha_bar) / alpha_bar) ** 0.5
        self.set_sigmas(rescale_zero_terminal_snr_sigmas(sigmas) if zsnr else sigmas)

    def set_sigmas(self, sigmas):
        """Replace the table."""
        self.register_buffer("sigmas", sigmas.float())
        self.register_buffer("log_sigmas", sigmas.log().float())

    @property
    def sigma_min(self):
        """The lowest noise level."""
        return self.sigmas[0]

    @property
    def sigma_max(self):
        """The highest noise level."""
        return self.sigmas[-1]

    def timestep(self, sigma):
        """The timestep whose noise level is nearest in the logarithm."""
        distance = sigma.log().to(self.log_sigmas.device) - self.log_sigmas[:, None]
        return distance.abs().argmin(dim=0).view(sigma.shape).to(sigma.device)

    def sigma(self, timestep):
        """The noise level of a timestep; fractions are interpolated."""
        t = timestep.float().to(self.log_sigmas.device).clamp(0, len(self.sigmas) - 1)
        low, high, weight = t.floor().long(), t.ceil().long(), t.frac()
        return ((1 - weight) * self.log_sigmas[low] + weight * self.log_sigmas[high]).exp().to(timestep.device)

    def percent_to_sigma(self, percent):
        """The noise level at a share of the sampling, 0 the start."""
        if percent <= 0.0:
            return 999999999.9
        return 0.0 if percent >= 1.0 else self.sigma(torch.tensor((1.0 - percent) * 999.0)).item()


def time_snr_shift(alpha, t):
    """Flow time shifted towards noise by alpha (Esser 2024)."""
    return t if alpha == 1.0 else alpha * t / (1 + (alpha - 1) * t)


class ModelSamplingDiscreteFlow(torch.nn.Module):
    """Flow time from 0 to 1 as noise level, shifted; timesteps are times the multiplier."""

    sigmas: torch.Tensor

    def __init__(self, model_config=None):
        super().__init__()
        settings = {} if model_config is None else model_config.sampling_settings
        self.set_parameters(shift=settings.get("shift", 1.0), multiplier=settings.get("multiplier", 1000))

    def set_parameters(self, shift=1.0, timesteps=1000, multiplier=1000):
        """Replace shift and table."""
        self.shift, self.multiplier = shift, multiplier
        self.register_buffer("sigmas", self.sigma((torch.arange(1, timesteps + 1, 1) / timesteps) * multiplier))

    @property
    def sigma_min(self):
        """The lowest noise level."""
        return self.sigmas[0]

    @property
    def sigma_max(self):
        """The highest noise level."""
        return self.sigmas[-1]

    def timestep(self, sigma):
        """The timestep that the model is told for a noise level."""
        return sigma * self.multiplier

    def sigma(self, timestep):
        """The noise level of a timestep before shifting."""
        return time_snr_shift(self.shift, timestep / self.multiplier)

    def percent_to_sigma(self, percent):
        """The noise level at a share of the sampling, 0 the start."""
        if percent <= 0.0:
            return 1.0
        return 0.0 if percent >= 1.0 else time_snr_shift(self.shift, 1.0 - percent)
