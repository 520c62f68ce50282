"""What training aims at: losses, noise, timesteps."""
