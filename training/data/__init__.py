"""Reads images and captions from disk and prepares them for training."""
