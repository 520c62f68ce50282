"""Identities are the same in every process: a run's key does not depend on hash seeds, memory or places."""

import os
import subprocess
import sys

import numpy as np
from PIL import Image

CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
import conftest, importlib.util
spec = importlib.util.spec_from_file_location("host_fixture", os.path.join(sys.argv[1], "host_fixture.py"))
module = importlib.util.module_from_spec(spec)
sys.modules["host_fixture"] = module
spec.loader.exec_module(module)
import shutil
host = module.Host(os.path.join(sys.argv[2], str(os.getpid())))
host.folder_paths.set_output_directory(os.path.join(sys.argv[2], "output"))
shutil.copytree(sys.argv[3], os.path.join(host.input, "pictures"), dirs_exist_ok=True)
model, clip, vae = host.call("GraftDemo")
model = host.call("ApplyToDo", model=model)[0]
dataset = host.call("GraftDataset", folder="pictures", vae=vae, clip=clip, resolution=256)[0]
state, report = host.call("GraftTrainStart", model=model, dataset=dataset, ema=host.call("GraftEMA")[0], seed=5)
report = host.call("TrainStep", state=state, steps=1)[5]
print("identity", state.start.digest, state.key, state.subject.unhashed, "stored result" in report)
"""


def test_identities_are_the_same_in_every_process(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i in range(3):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (256, 256, 3), dtype=np.uint8)).save(
            pictures / f"{i}.png"
        )
    here, said = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), []
    for place, seed in (("a", "1"), ("a", "2"), ("b", "3")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", CHILD, here, str(tmp_path / place), str(pictures)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("identity")).split())
    assert [line[-1] for line in said] == ["False", "True", "False"]  # the same folder finds it, another one trains
    assert said[0][:-1] == said[1][:-1] == said[2][:-1] and said[0][3] == "()"
