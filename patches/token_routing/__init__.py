"""TREAD: while training, some tokens skip a span of blocks."""
