"""The test host itself on a real ComfyUI; comfyui_api_stubs/tests runs the same on the embedded host."""


def test_runs_core_nodes(host):
    prompt = {
        "1": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 2}},
        "2": {"class_type": "RepeatLatentBatch", "inputs": {"samples": ["1", 0], "amount": 2}},
    }
    result = host.run(prompt, capture={"latent": ["2", 0]})
    assert result["success"], result["errors"]
    assert result["captured"]["latent"]["samples"].shape == (4, 4, 8, 8)
    assert host.run(prompt, capture={"latent": ["2", 0]})["cached"] == ["1", "2"]


def test_lists_errors(host):
    result = host.run(
        {"1": {"class_type": "EmptyLatentImage", "inputs": {"width": 8, "height": 64}}}, capture={"latent": ["1", 0]}
    )
    assert not result["valid"]
    assert {error["type"] for error in result["errors"]["1"]} == {"required_input_missing", "value_smaller_than_min"}


def test_pack_loads(host):
    assert not host.pack_log, host.pack_log
