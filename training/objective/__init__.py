"""The training objective: losses, noise, timesteps."""
