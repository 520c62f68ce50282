"""The training core: dataset, objective, optimizer, state, step, loop and durable store. Plain PyTorch."""
