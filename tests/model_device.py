"""The devices of the models that tests build: GRAFT_TEST_DEVICE names the one that they compute on, the CPU without
it.
"""

import os

import torch

CPU = torch.device("cpu")
NAME = os.environ.get("GRAFT_TEST_DEVICE", "cpu")
LOAD = CPU if NAME == "cpu" else torch.device(NAME, 0)
DEVICES = {"load_device": LOAD, "offload_device": CPU}
