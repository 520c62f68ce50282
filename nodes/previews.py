"""Nodes of previews by the user's own graph: what lies between Preview Begin and Preview End runs at each preview."""

from __future__ import annotations

from typing import Any, NamedTuple

from comfy_api.latest import io

from .schema import GraftNode, Previews, search_aliases


class Shown(NamedTuple):
    """What one preview made: images (B, h, w, 3) in 0..1, ComfyUI's video and its audio; None where there is none."""

    images: Any = None
    video: Any = None
    audio: Any = None


class GraftPreviewBegin(GraftNode):
    """Gives the nodes of a preview what is trained, as it is at that step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftPreviewBegin",
            display_name="Preview Begin",
            category="Graft/training",
            description=(
                "Begins previews with your own nodes: it gives them the model at that step of the training. The nodes"
                " between this one and Preview End run at every preview of Train Step."
            ),
            **search_aliases("preview", "sample", "training preview", "sample while training"),
            inputs=[],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                io.Clip.Output(display_name="CLIP"),
                io.Vae.Output(display_name="VAE"),
                io.Int.Output(display_name="step"),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        from ..host.preview_graph import GIVEN
        from ..host.trainable_vae import block_output

        message = (
            "Preview Begin gives a model only while Train Step makes a preview. Connect what comes behind it to Preview"
            " End alone, and that to previews of Train Step."
        )
        return io.NodeOutput(*(block_output(message) for _ in GIVEN))


class GraftPreviewEnd(GraftNode):
    """Takes what the nodes of a preview have made."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftPreviewEnd",
            display_name="Preview End",
            category="Graft/training",
            description=(
                "Ends previews with your own nodes: at every preview, what you connect here is shown on Train Step"
                " and kept with the run."
            ),
            **search_aliases("preview", "sample", "training preview", "sample while training"),
            inputs=[
                io.Image.Input("images", optional=True, tooltip="The pictures of a preview."),
                io.Video.Input("video", optional=True, tooltip="The video of a preview, with its sound if it has any."),
                io.Audio.Input("audio", optional=True, tooltip="The sound of a preview."),
            ],
            outputs=[Previews.Output(display_name="previews")],
        )

    @classmethod
    def execute(cls, images: Any = None, video: Any = None, audio: Any = None) -> io.NodeOutput:
        if images is None and video is None and audio is None:
            raise ValueError("Preview End: nothing is connected. Connect images, video or audio.")
        return io.NodeOutput(Shown(images, video, audio))


NODES = [GraftPreviewBegin, GraftPreviewEnd]
