"""Optimizers, their settings and learning rates; one record an optimizer."""
