"""What a run reports: text, curves, TensorBoard files, throughput."""
