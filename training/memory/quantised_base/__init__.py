"""A frozen base that is quantised while adapters train beside it in full precision."""
