"""GraftDemo: the tiny model that comes with Graft, as MODEL, CLIP and VAE."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from .. import host
from ..storage.digest import sha256_of_file
from ..storage.printable import logger
from .schema import GraftNode

log = logger(__name__)

BASE = Path(__file__).resolve().parents[1] / "demo" / "base.safetensors"


class GraftDemo(GraftNode):
    """Loads demo/base.safetensors with the host's own classes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftDemo",
            display_name="Demo Model",
            category="Graft/demo",
            description=(
                "A tiny diffusion model that comes with Graft. It draws 'a red circle left' and the like"
                " at 256 x 256 and trains in minutes without a GPU. Sample with euler, 20 steps, CFG 2. It puts the"
                " demo's LoRAs (graft_demo/zorp.safetensors, graft_demo/mauve.safetensors) into the loras folder if"
                " they are not there."
            ),
            inputs=[],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls) -> str:
        if BASE.is_file():
            return sha256_of_file(BASE)
        return "missing"

    @classmethod
    def execute(cls) -> io.NodeOutput:
        if not BASE.is_file():
            raise FileNotFoundError(
                f"{BASE} is missing: get it from Graft's repository, or run `python -m graft_nodes.demo.train_base`"
            )
        from ..demo import host_model
        from ..host.demo_files import place_loras

        lines = place_loras()
        if not lines:
            return io.NodeOutput(*host_model.demo_model(str(BASE)))
        for line in lines:
            log.info("Demo Model: %s", line)
        host.events.say_on_node(cls.hidden.unique_id if cls.hidden else None, "\n".join(lines))
        return io.NodeOutput(*host_model.demo_model(str(BASE)), ui={"text": lines})


class GraftDemoVAE(GraftNode):
    """A small VAE with weights for the demo model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftDemoVAE",
            display_name="Demo VAE",
            category="Graft/demo",
            description=(
                "A tiny VAE with weights for the latents of Demo Model, to try VAE training in seconds. Its decoder can"
                " be damaged, so that there is something to repair."
            ),
            inputs=[
                io.Float.Input(
                    "damage",
                    display_name="damage",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=0.1,
                    tooltip="Damages the decoder with noise and a color cast. 1 is easy to see; 0 is off.",
                )
            ],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, damage: float = 0.0) -> io.NodeOutput:
        from ..demo import host_model

        return io.NodeOutput(host_model.demo_vae(damage))


NODES = [GraftDemo, GraftDemoVAE]
