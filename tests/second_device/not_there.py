"""Node tests that do not run on the second device, and why: how the node id of each begins, and the reason."""

_NF4 = "bitsandbytes compiles NF4 for devices that it does not know, and torch.compile does not know this one either"
_INT8 = "bitsandbytes leaves int8 weights on the CPU when it does not know the device"
_QUANTISED = "tests/nodes/test_lora_quantised.py"
_TEXT_ENCODER = "the text encoder stays on the CPU, so that nothing is planned: another test of the file says so"
_COMPILED = "torch.compile looks into the second device's own Python, and counts what it finds there as changed"

TESTS: dict[str, str] = {
    "tests/nodes/test_apply_todo_compile.py": _COMPILED,
    "tests/nodes/test_memory_plan.py::test_a_text_encoder_that_is_trained_or_whose_words_are_is_planned": _TEXT_ENCODER,
    "tests/nodes/test_lora_quantised_convolutions.py::test_every_kind_on_quantised_convolutions[nf4-auto]": _NF4,
    f"{_QUANTISED}::test_a_stack_on_a_quantised_model[nf4]": _NF4,
    f"{_QUANTISED}::test_a_changed_strength_on_a_quantised_model[nf4]": _NF4,
    f"{_QUANTISED}::test_a_stack_on_a_quantised_model[int8]": _INT8,
    f"{_QUANTISED}::test_a_changed_strength_on_a_quantised_model[int8]": _INT8,
}
