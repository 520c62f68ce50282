"""A pack with mistakes that a type checker finds: `# mypy:` names the error of its line."""

from __future__ import annotations

import comfy.model_management
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import ComfyExtension, Input, io, ui


class Wrong(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "Wrong",
            inputs=[
                io.Int.Input("count", defualt=1),  # mypy: call-arg
                io.Float.Input("amount", min="0"),  # mypy: arg-type
                io.Combo.Input("mode", options="add"),  # mypy: arg-type
                io.Picture.Input("picture"),  # mypy: attr-defined
            ],
            outputs=[io.Image.Input("picture")],  # mypy: list-item
            hidden=["UNIQUE_ID"],  # mypy: list-item
        )

    @classmethod
    def validate_inputs(cls, count: int) -> None:  # mypy: override
        return None

    @classmethod
    def execute(cls, video: Input.Video, latent: io.Latent.Type) -> io.NodeOutput:
        cls.hidden.unique.upper()  # mypy: attr-defined
        video.get_size()  # mypy: attr-defined
        samples: str = latent["samples"]  # mypy: assignment
        folder: int = folder_paths.get_output_directory()  # mypy: assignment
        path = folder_paths.get_full_path("loras", samples)
        path.upper()  # mypy: union-attr
        comfy.utils.ProgressBar(total=10, node=folder)  # mypy: call-arg
        return io.NodeOutput(torch.zeros(1), ui=ui.PreviewText(1))  # mypy: arg-type


class Extension(ComfyExtension):
    async def get_node_list(self) -> list[io.ComfyNode]:  # mypy: override
        return []


comfy.model_management.interrupt_currant_processing()  # mypy: attr-defined
