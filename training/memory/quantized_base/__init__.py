"""A frozen base that is quantized while adapters train beside it in full precision."""
