"""The kinds of training: one file each, and the registry that lists them."""
