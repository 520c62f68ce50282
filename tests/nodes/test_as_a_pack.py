"""Graft as any node pack: the embedded host's pytest plugin loads it and finds nothing wrong with its nodes, and a
second copy beside it does not come in between.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from graft_nodes.nodes import NODES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_graft_loads_and_its_nodes_are_valid(tmp_path):
    words = ["-p", "graft_nodes.comfyui_api_stubs.pytest_plugin", f"--comfy-pack={ROOT}", "-k", "not workflow"]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) == 1 + len(NODES), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["graft", "ComfyUI-Graft", "my Graft 1.0"])
def test_a_second_copy_stands_back_and_both_are_named(host, tmp_path, caplog, name):
    (tmp_path / name).symlink_to(ROOT)
    nodes, folders = dict(host.nodes.NODE_CLASS_MAPPINGS), dict(host.nodes.EXTENSION_WEB_DIRS)
    assert not host.loop.run_until_complete(host.nodes.load_custom_node(str(tmp_path / name)))
    assert nodes == host.nodes.NODE_CLASS_MAPPINGS and folders == host.nodes.EXTENSION_WEB_DIRS
    assert f"Graft is there twice: {ROOT} is used, {tmp_path / name} is not. Remove one, and restart." in caplog.text
