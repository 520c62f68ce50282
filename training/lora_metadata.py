"""Training metadata of a saved LoRA, with the keys of kohya-ss/sd-scripts (`train_network.py`) and modelspec."""

from __future__ import annotations

import json
from typing import Any

from .data.kohya_metadata import epoch_of
from .expert_lora import expert_metadata
from .objective.loss_kinds import LOSSES
from .objective.weightings import WEIGHTINGS
from .optimizers.learning_rate_schedule import peak_rate
from .optimizers.settings import OptimizerSettings
from .state import TrainState

_SCHEDULES = {"cosine-restarts": "cosine_with_restarts"}
_PRECISIONS = {"bf16": "bf16", "full-bf16": "bf16", "fp16": "fp16"}


def lora_metadata(state: TrainState) -> dict[str, str]:
    """Metadata of a state: settings and position only, no dates, no random ids. The state's notes override them."""
    adapter, optimizer = state.start.adapter, state.settings.optimizer
    network_args = {"algo": adapter.kind, "targets": adapter.targets, "pattern": adapter.pattern}
    if adapter.factor:
        network_args["factor"] = str(adapter.factor)
    entries: dict[str, Any] = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "https://github.com/comfyanonymous/ComfyUI",
        "modelspec.title": state.run,
        "ss_output_name": state.run,
        "ss_network_module": adapter.trainable_kind.network_module,
        "ss_network_dropout": adapter.network_dropout,
        "ss_network_args": json.dumps(network_args, sort_keys=True),
        "ss_scale_weight_norms": adapter.max_norm or None,
        "ss_seed": state.start.seed,
        "ss_steps": state.step,
        "graft_run": state.start.digest,
        "graft_state": state.key,
    }
    if not adapter.full_weights:
        entries |= {"ss_network_dim": adapter.rank, "ss_network_alpha": adapter.alpha or float(adapter.rank)}
    entries |= _optimizer_metadata(optimizer) | _objective_metadata(state)
    metadata = {name: str(value) for name, value in entries.items()} | dict(state.notes)
    if metadata.get("ss_num_batches_per_epoch"):
        batches = int(metadata["ss_num_batches_per_epoch"])
        metadata["ss_epoch"] = str(epoch_of(state.step, batches, optimizer.accumulation))
    return metadata


def _optimizer_metadata(optimizer: OptimizerSettings) -> dict[str, Any]:
    if optimizer.schedule == "constant" and optimizer.warmup:
        schedule = "constant_with_warmup"
    else:
        schedule = optimizer.schedule
    record, arguments = optimizer.record, dict(optimizer.parsed_options)
    if record.has_weight_decay:
        arguments = {"weight_decay": optimizer.weight_decay, **arguments}
    argument_text = ",".join(f"{name}={value}" for name, value in arguments.items())
    return {
        "ss_learning_rate": peak_rate(optimizer),
        "ss_unet_lr": peak_rate(optimizer),
        "ss_text_encoder_lr": optimizer.text_encoder_rate or peak_rate(optimizer),
        "ss_lr_scheduler": _SCHEDULES.get(schedule, schedule),
        "ss_lr_warmup_steps": optimizer.warmup_steps,
        "ss_optimizer": record.full_name + (f"({argument_text})" if argument_text else ""),
        "ss_total_batch_size": optimizer.batch_size * optimizer.accumulation,
        "ss_gradient_accumulation_steps": optimizer.accumulation,
        "ss_gradient_checkpointing": optimizer.checkpointing,
        "ss_max_grad_norm": optimizer.clip_norm,
        "ss_mixed_precision": _PRECISIONS.get(optimizer.precision, "no"),
        "ss_max_train_steps": optimizer.total_steps,
    }


def _objective_metadata(state: TrainState) -> dict[str, Any]:
    objective = state.settings.objective
    entries = {
        "ss_loss_type": LOSSES.get(objective.loss).kohya_name,
        "ss_min_snr_gamma": None,
        "ss_debiased_estimation": False,
        "ss_noise_offset": objective.offset_noise or None,
        "ss_multires_noise_discount": objective.pyramid_noise or None,
        "ss_ip_noise_gamma": objective.ip_noise or None,
        "ss_zero_terminal_snr": objective.zero_terminal_snr,
        "ss_caption_dropout_rate": objective.conditioning_dropout,
        "ss_prior_loss_weight": objective.prior_weight,
    }
    entries.update(WEIGHTINGS.get(objective.weighting).metadata(objective.gamma))
    return entries | expert_metadata(objective)
