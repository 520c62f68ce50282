"""Opens the host that the tests run against: a real ComfyUI when GRAFT_TEST_COMFYUI names a checkout, else the embedded
host. With GRAFT_TEST_DEVICE=second models compute on the second device (tests/second_device), with =cuda on CUDA.
GRAFT_TEST_DYNAMIC=1 loads them on the second device with the dynamic VRAM of a real ComfyUI 0.33.
"""

import importlib.util
import os
import sys

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))

torch.set_num_threads(int(os.environ.get("GRAFT_TEST_THREADS", "2")))

if "GRAFT_TEST_COMFYUI" in os.environ:
    sys.path.insert(0, os.path.join(HERE, "with_comfyui"))
    import open_comfyui

    on_cuda = os.environ.get("GRAFT_TEST_DEVICE") == "cuda"
    open_comfyui.open_checkout(os.environ["GRAFT_TEST_COMFYUI"], cpu=not on_cuda)
else:
    from graft_nodes.headless import embedded

    embedded.install()

if os.environ.get("GRAFT_TEST_DEVICE") == "second":
    from graft_nodes.tests.second_device import comfyui, device, not_there

    comfyui.put_models_on(device.DEVICE)
    NOT_THERE = not_there.TESTS
    if os.environ.get("GRAFT_TEST_DYNAMIC") == "1":
        from graft_nodes.tests.second_device import dynamic_vram

        dynamic_vram.switch_on(device.DEVICE)
        NOT_THERE = {**not_there.TESTS, **not_there.DYNAMIC}
else:
    NOT_THERE = {}


# Files and folders of which every test is slow: they open browsers and servers, start processes, or run workflows.
# A single slow test of another file is marked where it stands: @pytest.mark.slow.
SLOW = (
    "tests/demo/test_rule.py",
    "tests/demo/test_train_base.py",
    "tests/editor",
    "tests/faults",
    "tests/fuzz",
    "tests/headless/test_command.py",
    "tests/nodes/test_apply_todo",
    "tests/nodes/test_averages.py",
    "tests/nodes/test_bad_input.py",
    "tests/nodes/test_demo.py",
    "tests/nodes/test_denoiser.py",
    "tests/nodes/test_ledger.py",
    "tests/nodes/test_lora",
    "tests/nodes/test_main_job.py",
    "tests/nodes/test_merging.py",
    "tests/nodes/test_no_dead_setting.py",
    "tests/nodes/test_processes.py",
    "tests/nodes/test_train",
    "tests/second_device",
    "tests/test_benchmarks.py",
    "tests/test_package.py",
    "tests/training/distributed",
    "tests/training/store/test_killed.py",
    "tests/with_comfyui",
)


BROWSER = ("tests/editor/test_browser_", "tests/editor/test_opens.py")


def pytest_collection_modifyitems(config, items):
    """Mark the slow files and those that need a browser. Slow files come first, so that no process is left alone with
    one at the end.
    """
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        if file.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if file.startswith(BROWSER):
            item.add_marker(pytest.mark.browser)
        for name, reason in NOT_THERE.items():
            if item.nodeid.startswith(name):
                item.add_marker(pytest.mark.skip(reason=f"not on the second device: {reason}"))
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The open host with Graft's pack loaded: see host_fixture.Host."""
    spec = importlib.util.spec_from_file_location("host_fixture", os.path.join(HERE, "host_fixture.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["host_fixture"] = module
    spec.loader.exec_module(module)
    return module.Host(str(tmp_path_factory.mktemp("host")))
