"""GraftDataset: a folder of captioned pictures, encoded and in memory."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from comfy_api.latest import io

from .. import host
from .aliases import aliases
from .sockets import Dataset


class GraftDataset(io.ComfyNode):
    """Reads pictures and captions below ComfyUI's input folder and encodes them once."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftDataset",
            display_name="Dataset",
            category="Graft/training",
            description=(
                "Reads a folder of captioned pictures under ComfyUI's input folder, sorts it into aspect buckets, and"
                " encodes pictures and captions once."
            ),
            **aliases("dataset", "training images", "image folder", "captions", "regularisation"),
            inputs=[
                io.String.Input(
                    "folder",
                    default="",
                    tooltip="A folder below ComfyUI's input folder. 10_name folders repeat their pictures 10 times.",
                ),
                io.Vae.Input("vae", tooltip="Encodes the pictures: the VAE of the model to be trained."),
                io.Clip.Input("clip", tooltip="Encodes the captions: the text encoder of the model to be trained."),
                io.Int.Input(
                    "resolution",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="No picture has a larger area than this side squared.",
                ),
                io.Boolean.Input(
                    "buckets",
                    default=True,
                    tooltip="Keep each picture's aspect ratio as well as a bucket can; off: centre-cropped squares.",
                ),
                io.Int.Input(
                    "bucket_step",
                    default=64,
                    min=8,
                    max=512,
                    step=8,
                    tooltip="Sides of the buckets are multiples of this.",
                ),
                io.Combo.Input(
                    "captions",
                    options=["auto", "txt", "folder", "json", "yaml"],
                    default="auto",
                    tooltip=(
                        "txt: a .txt beside the picture. folder: one in a captions folder. json: one JSON a picture"
                        " (tags, score, path). yaml: EveryDream2's. auto: whichever is there."
                    ),
                ),
                io.Int.Input(
                    "repeats", default=1, min=1, max=10000, tooltip="How often every picture counts in a round."
                ),
                io.Float.Input(
                    "flip", default=0.0, min=0.0, max=1.0, step=0.05, tooltip="How often a picture is mirrored."
                ),
                io.Boolean.Input(
                    "shuffle_tags",
                    default=False,
                    tooltip="Say the tags (between commas) in a new order each time a picture is shown.",
                ),
                io.Int.Input(
                    "keep_tags",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="So many tags at the front neither move nor drop out.",
                ),
                io.Float.Input(
                    "tag_dropout", default=0.0, min=0.0, max=1.0, step=0.05, tooltip="How often each tag is left out."
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "How often a picture's caption is left out, on top of the objective's conditioning dropout."
                    ),
                ),
                io.Int.Input(
                    "clip_skip",
                    default=0,
                    min=0,
                    max=24,
                    tooltip=(
                        "Stop at this layer of the text encoder from the end: 2 stops one layer before the last. 0: as"
                        " it is."
                    ),
                ),
                io.Float.Input(
                    "validation",
                    default=0.1,
                    min=0.0,
                    max=0.9,
                    step=0.01,
                    tooltip=(
                        "Share of the pictures held out to measure the loss on; the choice depends on their contents"
                        " alone."
                    ),
                ),
                io.String.Input(
                    "filters",
                    default="",
                    multiline=True,
                    tooltip=(
                        "YAML: which pictures are taken, what becomes of their tags, crops, masks, the cache. See the"
                        " help page."
                    ),
                ),
                Dataset.Input(
                    "regularisation",
                    optional=True,
                    tooltip="A second dataset mixed into every batch, so that what the model knew stays.",
                ),
                io.Float.Input(
                    "regularisation_share",
                    default=0.25,
                    min=0.0,
                    max=0.95,
                    step=0.05,
                    tooltip="Its share of a batch: 0.25 is 2 of 8.",
                ),
            ],
            outputs=[
                Dataset.Output(display_name="GRAFT_DATASET"),
                io.Image.Output(display_name="contact sheet"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, folder="", **_) -> str:
        """Changes when a file of the folder does; a folder that comes in through a link is seen by `execute` alone."""
        digest = hashlib.sha256(str(folder).encode())
        try:
            root = host.folders.input_folder(folder or "")
        except (ValueError, OSError):
            return digest.hexdigest()
        for path in sorted(p for p in Path(root).rglob("*") if p.is_file()):
            found = os.stat(path)
            digest.update(repr((path.relative_to(root).as_posix(), found.st_size, found.st_mtime_ns)).encode())
        return digest.hexdigest()

    @classmethod
    def execute(
        cls,
        folder,
        vae,
        clip,
        resolution=512,
        buckets=True,
        bucket_step=64,
        captions="auto",
        repeats=1,
        flip=0.0,
        shuffle_tags=False,
        keep_tags=0,
        tag_dropout=0.0,
        caption_dropout=0.0,
        clip_skip=0,
        validation=0.1,
        filters="",
        regularisation=None,
        regularisation_share=0.25,
    ) -> io.NodeOutput:
        from ..training.data import encoding, folder_report
        from ..training.data.cache import Cache
        from ..training.data.layouts.folder import read_folder, settings_of

        wrong = [
            f"{name} is empty: this model has none; connect one"
            for name, thing in (("vae", vae), ("clip", clip))
            if thing is None
        ]
        settings = settings_of(
            filters,
            wrong,
            resolution=resolution,
            buckets=buckets,
            bucket_step=bucket_step,
            captions=captions,
            repeats=repeats,
            flip=flip,
            validation=validation,
            shuffle_tags=shuffle_tags,
            keep_tags=keep_tags,
            tag_dropout=tag_dropout,
        )
        prints = host.fingerprint.fingerprint_of(vae, "vae"), host.fingerprint.fingerprint_of(clip, "clip")
        unhashed = prints[0].unhashed + prints[1].unhashed
        # What cannot be hashed cannot be found again either.
        keep = settings.filters.cache and not unhashed
        if keep:
            cache = Cache(Path(host.folders.training_folder()) / "cache", settings.filters.cache_gb)
        else:
            cache = None
        listing = read_folder(Path(host.folders.input_folder(folder)), settings, cache)
        bar = host.events.progress(len(listing.entries))
        dataset, sheet = encoding.encode(
            listing,
            lambda pixels: host.encoding.encode_pictures(vae, pixels),
            lambda texts: (host.events.raise_if_interrupted(), host.encoding.encode_captions(clip, texts, clip_skip))[
                1
            ],
            (prints[0].digest, f"{prints[1].digest} {clip_skip}"),
            cache,
            encoded=lambda done: (bar(done), host.events.raise_if_interrupted()),
            caption_dropout=caption_dropout,
            regularisation=regularisation,
            **({"clip_skip": clip_skip} if clip_skip else {}),
            regularisation_share=regularisation_share if regularisation is not None else 0.0,
            unhashed=unhashed + (() if regularisation is None else regularisation.unhashed),
        )
        lines = [folder_report.report(listing, regularisation, regularisation_share), folder_report.memory(dataset)]
        lines += [f"nothing is kept on disk, these cannot be hashed: {', '.join(unhashed)}"] if unhashed else []
        said = "\n".join(lines + ([] if cache is None else cache.report()))
        data = {**folder_report.editor_data(listing, said), "folder": folder}
        return io.NodeOutput(replace(dataset, report=said), sheet, said, ui={"text": [said], "graft_dataset": [data]})


NODES = [GraftDataset]
