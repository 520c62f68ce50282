"""Save UNet for diffusers: a MODEL's diffusion model, whole, as a folder that diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from comfy_api.latest import io

from .. import host
from ..patches.lora_files.key_formats.key_format import DTYPES
from .schema import GraftNode, advanced_input, file_size_input, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Model


class GraftSaveDiffusers(GraftNode):
    """Writes config.json and the weights of a UNet under diffusers' names."""

    checked_together = (("prefix",),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSaveDiffusers",
            display_name="Save UNet for diffusers",
            category="Graft/training",
            description=(
                "Saves a model's UNet as a folder that diffusers loads with UNet2DConditionModel.from_pretrained: full"
                " weights, their average, or a model with its LoRAs merged. For SD 1.x, SD 2.x and SDXL."
            ),
            **search_aliases("diffusers", "save unet", "save model", "export", "from_pretrained", "EMAModel"),
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="From EMA Merge for the average, or from Train Step. Patches and LoRAs are merged."
                ),
                advanced_input(
                    io.Combo,
                    "dtype",
                    display_name="data type",
                    options=list(DTYPES),
                    default="float32",
                    tooltip=(
                        "The data type of the saved weights. float32 keeps them exactly; bf16 and fp16 halve the files."
                    ),
                ),
                io.String.Input(
                    "prefix",
                    display_name="filename prefix",
                    default="diffusers/graft",
                    tooltip="Name of the folder under the output folder; a number is added.",
                ),
                file_size_input(
                    "Splits the weights into several files with an index if one would be larger than this, as"
                    " diffusers' max_shard_size does. 0 writes one file."
                ),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def check_settings(cls, prefix: str) -> None:
        """Raises ValueError for a prefix that leaves the output folder."""
        host.folders.check_prefix(prefix)

    @classmethod
    def execute(
        cls, model: Model, dtype: str = "float32", prefix: str = "diffusers/graft", max_shard_gb: float = 0.0
    ) -> io.NodeOutput:
        from ..host import diffusers_unet

        folder = Path(host.folders.output_file(prefix, "unet")[0])
        counted = diffusers_unet.save(model, folder, DTYPES[dtype], int(max_shard_gb * 1e9))
        text = f"{counted:,} parameters as {dtype} in {folder}"
        return io.NodeOutput(str(folder), ui={"text": [text]})


NODES = [GraftSaveDiffusers]
