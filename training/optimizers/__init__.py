"""Optimizers, their settings and learning rates; one record per optimizer."""
