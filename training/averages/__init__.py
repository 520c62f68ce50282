"""Averages of snapshots and files, and how well they do."""
