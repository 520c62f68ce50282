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
_PARTLY = "a paged model is never partly on the device in the older sense"
_LORA = "tests/nodes/test_lora.py"

DYNAMIC: dict[str, str] = {  # with dynamic VRAM
    "tests/nodes/test_training.py::test_full_weights_come_out_as_differences_that_the_model_takes": _NOT_MERGED,
    f"{_LORA}::test_a_changed_strength_opens_no_file_and_checks_no_tensor[merge]": _NOT_MERGED,
    f"{_LORA}::test_a_model_that_is_not_wholly_on_the_device[partly": _PARTLY,
    f"{_LORA}::test_a_norm_beside_weights_that_cannot_be_merged_is_left_to_the_host[model_lowvram": _PARTLY,
}
