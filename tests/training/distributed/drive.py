"""The command line as a rank of torchrun, with nodes that say where they ran, and a rank that kills itself when it is
told to.

GRAFT_KILL=ATTEMPT:RANK:STEP:WHERE ends that rank with SIGKILL in that attempt, at that step: `inside` a collective, or
`outside`; `asked` is SIGTERM.
"""

import os
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
PLACE = Path(os.environ["GRAFT_TEST_PLACE"])
RANK, ATTEMPT = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

from graft_nodes.headless import command, hosts  # noqa: E402


class Drawn:
    """A number that is another one on every rank."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"told": ("STRING", {"default": ""})}}

    def run(self, told):
        (PLACE / f"drawn-{RANK}").touch()
        return (1000 + int(RANK),)


class Seen:
    """Writes what came into a file, by the rank that ran it."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"number": ("INT", {"default": 0}), "losses": ("LOSS_MAP",)}}

    def run(self, number, losses):
        (PLACE / f"seen-{RANK}").write_text(repr((number, losses["loss"])))
        return ()


class Fails:
    """A LORA_MODEL that cannot be had on the rank that is named."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "rank": ("STRING", {"default": ""})}}

    def run(self, model, rank):
        if rank == RANK:
            raise FileNotFoundError("the disk of this machine has no such model")
        return (model,)


def arm() -> None:
    """Have this rank kill itself, if it is the one."""
    for told in filter(None, os.environ.get("GRAFT_KILL", "").split(",")):
        attempt, rank, step, where = told.split(":")
        if (attempt, rank) == (ATTEMPT, RANK):
            kill_at(int(step), where == "inside", signal.SIGTERM if where == "asked" else signal.SIGKILL)


def kill_at(last: int, inside: bool, how: signal.Signals) -> None:
    """End this process when its gradients are to leave for that time: just before, or when the others wait for the rest
    of them.
    """
    gradients = sys.modules[next(name for name in sys.modules if name.endswith(".training.distributed.gradient_sum"))]
    real, times = gradients.Bucket.launch, []

    def launch(self, group):
        times.append(1)
        if inside:
            real(self, group)
        if len(times) == last:
            os.kill(os.getpid(), how)
        if not inside:
            real(self, group)

    gradients.Bucket.launch = launch


def main() -> int:
    """Run the command line, in a real ComfyUI where the tests have one."""
    if "GRAFT_TEST_COMFYUI" in os.environ:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "with_comfyui"))
        import open_comfyui

        open_comfyui.open_checkout(os.environ["GRAFT_TEST_COMFYUI"])
    load = hosts.load_nodes

    def load_with_these(host: hosts.Host) -> None:
        load(host)
        host.nodes.NODE_CLASS_MAPPINGS.update(TestDrawn=Drawn, TestSeen=Seen, TestFails=Fails)
        importing = host.nodes.NODE_CLASS_MAPPINGS["TrainStep"].__module__.partition(".nodes.")[0]
        __import__(f"{importing}.training.distributed.gradient_sum")
        arm()

    hosts.load_nodes = load_with_these
    return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
