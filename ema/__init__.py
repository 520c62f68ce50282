"""Averaged weights: decay schedules and the shadow update. Plain PyTorch."""
