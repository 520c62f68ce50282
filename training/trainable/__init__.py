"""Which weights are trained, and how adapters are installed on the model."""
