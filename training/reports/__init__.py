"""Reports of a run: text, curves, TensorBoard files, throughput."""
