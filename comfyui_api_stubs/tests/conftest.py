"""Opens the host that the tests run on: the embedded one, unless a ComfyUI is importable."""

import os

import pytest
import torch

import comfyui_api_stubs

torch.set_num_threads(int(os.environ.get("GRAFT_TEST_THREADS", "2")))
if comfyui_api_stubs.install():
    collect_ignore = ["real"]  # which needs a ComfyUI

# Files and folders of which every test is slow: they start processes or run workflows.
SLOW = ("tests/editor", "tests/test_compare.py", "tests/test_distribution.py", "tests/test_loading.py")


def pytest_collection_modifyitems(config, items):
    """Mark the slow files. They come first, so that no process is left alone with one at the end."""
    for item in items:
        if item.path.relative_to(config.rootpath).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The open host: see host_fixture.Host."""
    from comfyui_api_stubs.tests.host_fixture import Host

    return Host(str(tmp_path_factory.mktemp("host")))
