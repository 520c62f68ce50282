"""A plugin of pytest for tests on a GPU, which compare bytes: operations that have a deterministic way take it."""

import torch

torch.use_deterministic_algorithms(True, warn_only=True)
