"""Socket types that ComfyUI does not define: Graft's own, and those shared with other packs."""

from comfy_api.latest import io

Adapter = io.Custom("GRAFT_ADAPTER")
Dataset = io.Custom("GRAFT_DATASET")
EMA = io.Custom("GRAFT_EMA")
LoraModel = io.Custom("LORA_MODEL")
LoraStack = io.Custom("LORA_STACK")
LossMap = io.Custom("LOSS_MAP")
Objective = io.Custom("GRAFT_OBJECTIVE")
Optimizer = io.Custom("GRAFT_OPTIMIZER")
Snapshots = io.Custom("GRAFT_SNAPSHOTS")
TrainState = io.Custom("TRAIN_STATE")
