"""Node tests that do not run on the second device, and why: how the node id of each begins, and the reason."""

_NF4 = "bitsandbytes compiles NF4 for devices that it does not know, and torch.compile does not know this one either"
_INT8 = "bitsandbytes leaves int8 weights on the CPU when it does not know the device"
_QUANTIZED = "tests/nodes/test_lora_quantized.py"
_TEXT_ENCODER = "the text encoder stays on the CPU, so that nothing is planned: another test of the file says so"
_COMPILED = "torch.compile looks into the second device's own Python, and counts what it finds there as changed"

TESTS: dict[str, str] = {
    "tests/nodes/test_apply_todo_compile.py": _COMPILED,
    "tests/nodes/test_memory_plan.py::test_a_text_encoder_that_is_trained_or_whose_words_are_is_planned": _TEXT_ENCODER,
    "tests/nodes/test_lora_quantized_convolutions.py::test_every_kind_on_quantized_convolutions[nf4-auto]": _NF4,
    f"{_QUANTIZED}::test_a_stack_on_a_quantized_model[nf4]": _NF4,
    f"{_QUANTIZED}::test_a_changed_strength_on_a_quantized_model[nf4]": _NF4,
    f"{_QUANTIZED}::test_a_stack_on_a_quantized_model[int8]": _INT8,
    f"{_QUANTIZED}::test_a_changed_strength_on_a_quantized_model[int8]": _INT8,
}

_NOT_MERGED = "nothing is merged into pages: stacks work at the activations there, and the report says so"
_HOST_LEAVES = "ComfyUI has nothing in a paged model's weights either: it patches them when they come in"
_HOOKS = "ComfyUI refuses LoRA hooks on paged models"
_PARTLY = "a paged model is never partly on the device in the older sense"
_LORA = "tests/nodes/test_lora.py"

_LEDGER = "tests/nodes/test_ledger.py"
_FAMILY = "tests/nodes/test_made_up_family.py"

DYNAMIC: dict[str, str] = {  # with dynamic VRAM
    "tests/nodes/test_tlora.py::test_it_is_saved_and_the_ranks_follow_the_noise": _NOT_MERGED,
    "tests/nodes/test_made_up_adapter.py::test_it_is_trained_saved_and_applied": _NOT_MERGED,
    f"{_FAMILY}::test_a_saved_lora_is_loaded_again[merge": _NOT_MERGED,
    f"{_FAMILY}::test_block_weights": _NOT_MERGED,
    f"{_LEDGER}::test_clone_and_clone_deleted_while_loaded[merge": _NOT_MERGED,
    f"{_LEDGER}::test_a_load_that_fails[at once-merge": _NOT_MERGED,
    f"{_LEDGER}::test_a_load_that_fails[at its end-merge": _NOT_MERGED,
    f"{_LEDGER}::test_a_stack_that_fails_leaves_nothing_loaded[merge": _NOT_MERGED,
    f"{_LEDGER}::test_the_hosts_own_loader_before_and_after": _NOT_MERGED,
    f"{_LEDGER}::test_an_ejected_model_is_the_base_and_then_the_patched_one_again": _NOT_MERGED,
    f"{_LEDGER}::test_two_loaded_clones_with_different_stacks_alternate": _NOT_MERGED,
    f"{_LEDGER}::test_kept_weights_go_when_the_model_is_unloaded": _NOT_MERGED,
    f"{_LEDGER}::test_kept_weights_go_with_the_model_when_the_clone_has_gone_before[merge": _NOT_MERGED,
    f"{_LEDGER}::test_two_imports_of_the_pack_share_the_models_ledger": _NOT_MERGED,
    f"{_LEDGER}::test_what_merging_extracting_and_saving_see[merge": _NOT_MERGED,
    f"{_LEDGER}::test_what_merging_extracting_and_saving_see[host": _HOST_LEAVES,
    f"{_LEDGER}::test_mode_host_is_what_other_nodes_see": _NOT_MERGED,
    f"{_LEDGER}::test_model_options_can_be_copied": _NOT_MERGED,
    f"{_LEDGER}::test_text_encoders_too[merge": _NOT_MERGED,
    f"{_LEDGER}::test_a_failed_load_leaves_no_other_packs_injection[merge": _NOT_MERGED,
    f"{_LEDGER}::test_a_workflow_leaves_the_files_bytes[False-merge": _NOT_MERGED,
    f"{_LEDGER}::test_random_sequences": _HOOKS,
    f"{_LEDGER}::test_lora_hooks": _HOOKS,
    f"{_LEDGER}::test_dora_at_the_activations_is_of_the_weights_that_hooks_have_changed": _HOOKS,
    f"{_LEDGER}::test_dora_that_is_merged_is_of_a_weight_that_the_host_changes_at_each_use": _NOT_MERGED,
    f"{_LEDGER}::test_stochastic_rounding_is_an_option": _NOT_MERGED,
    "tests/nodes/test_training.py::test_full_weights_come_out_as_differences_that_the_model_takes": _NOT_MERGED,
    f"{_LORA}::test_a_changed_strength_opens_no_file_and_checks_no_tensor[merge]": _NOT_MERGED,
    f"{_LORA}::test_a_model_that_is_not_wholly_on_the_device[partly": _PARTLY,
    f"{_LORA}::test_a_norm_beside_weights_that_cannot_be_merged_is_left_to_the_host[model_lowvram": _PARTLY,
}
