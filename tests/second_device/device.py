"""A second device in pure Python: it finds what a GPU would find, without a GPU.

Importing this makes the device `second:0` known to torch, for good: do it in a process of its own. Its tensors lie in
the CPU's memory, and:

- operations that mix them with tensors of the CPU are refused, as on CUDA: only tensors without dimensions may be
  mixed, and copies and indexing may cross (kernels.py);
- `Module.to` and `.data =` keep Parameter objects (torch_changes.py);
- `meter` counts bytes that cross, waits of the host and memory, and memory can run out (meter.py);
- pinned memory, streams and events keep their order, also for memory that is freed and taken again (streams.py);
- generators belong to a device, and `torch.autocast("second", …)` works (torch_module.py, autocast.py).

It computes at once, so it says nothing about speed.
"""

from __future__ import annotations

import torch

from . import autocast, kernels, torch_changes
from .kernels import MixedDevices
from .memory import CPU, NAME
from .meter import meter
from .streams import OutOfOrder

__all__ = ["CPU", "DEVICE", "NAME", "MixedDevices", "OutOfOrder", "meter"]

_libraries = [*kernels.register(), *autocast.register()]  # torch forgets the kernels of a library that is gone
torch_changes.apply()
DEVICE = torch.device(NAME, 0)
