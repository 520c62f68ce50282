"""Reads workflows of either format, for hosts without a front end: `workflow` is where to begin."""
