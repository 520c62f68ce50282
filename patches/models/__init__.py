"""What Graft knows of each model family: one file a family, and the registry that lists them."""
