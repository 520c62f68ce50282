"""What Graft knows about each model family: one file per family, and the registry that lists them."""
