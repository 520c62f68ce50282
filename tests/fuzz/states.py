"""Stored and saved training states: a run's folder and a saved state with damage anywhere, signed anew or not."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from graft_nodes.storage.digest import sha256_of_json
from graft_nodes.storage.safetensors import load_safetensors
from graft_nodes.training.averages import snapshots
from graft_nodes.training.state import TrainState, equal
from graft_nodes.training.store import listing, rank_files, saved_states, store
from hypothesis import strategies as st

from ..faults.tried import Run, hash_of
from .damage import CORPUS, damaged_bytes, damaged_json, text_of
from .engine import Target
from .loras import damaged_file

STATE = next(
    path.name.split("__")[1] for path in (CORPUS / "states").iterdir() if path.name.endswith("__state.safetensors")
)
PARTS = f"run/{'f' * 32}/partial"
RECORDS = (f"run/{STATE}/state.json", "saved/state.json", f"{PARTS}/state.json")


class States(Target):
    """See above."""

    name = "states"
    night = 1_000_000
    refusals = (ValueError, FileNotFoundError)

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.whole = {path.name.replace("__", "/"): path.read_bytes() for path in sorted((CORPUS / "states").iterdir())}
        for name in self.whole:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
        self._restore(self.whole)
        self._in_parts(place / PARTS)
        for path in (place / PARTS).iterdir():
            self.whole[path.relative_to(place).as_posix()] = path.read_bytes()
        self.run = Run(place)
        self.like: TrainState = self.run.start

    def _in_parts(self, folder: Path) -> None:
        """The same state as two ranks keep it, each with half of the rows."""
        folder.mkdir(parents=True)
        record = store.read_record(self.place / "run" / STATE)
        tensors, _ = load_safetensors(str(self.place / "run" / STATE / "state.safetensors"))
        rows = [name for name, tensor in tensors.items() if tensor.ndim and len(tensor) > 1]
        files = []
        for rank in (0, 1):
            halves = {name: tensor.chunk(2)[rank] if name in rows else tensor for name, tensor in tensors.items()}
            files.append(dict(zip(("file", "sha256"), rank_files.write(folder, 4, rank, 2, halves, rows), strict=True)))
        body = {key: value for key, value in record.items() if key != "sha256"}
        store.write_record(folder, {**body, "kind": "partial", "tensors": {"parts": files}})

    def _restore(self, names: Any) -> None:
        for name in names:
            (self.place / name).write_bytes(self.whole[name])

    def cases(self) -> st.SearchStrategy[Any]:
        """{file: bytes} of what is changed."""
        return changed(self.whole)

    def attempt(self, case: Any) -> None:
        """What lists goes round what is damaged; what loads refuses it."""
        try:
            for name, body in case.items():
                (self.place / name).write_bytes(body)
            listing.runs(self.place)
            listing.states(self.place, "run")
            found, problems = store.Store(self.place, "run").furthest(self.like, 4)
            assert found is None or found.state.key == found.folder.name or found.partial or not problems
            said = []
            for act in (
                lambda: store.load(self.place / "run" / STATE, self.like),
                lambda: store.load(self.place / PARTS, self.like),
                lambda: listing.describe_state(self.place, "run", "latest"),
                lambda: saved_states.load(self.place, "saved", "model"),
                lambda: saved_states.needs_clip(self.place, "saved"),
                lambda: [snapshots.read(one) for one in snapshots.find_snapshots(self.place / "run")],
            ):
                try:
                    act()
                except self.refusals as error:
                    said.append(error)
            for error in said:
                assert str(self.place) in str(error) or "run" in str(error), f"the error names no file: {error!r}"
            if said:
                raise said[0]
        finally:
            self._restore(case)

    def sound(self) -> None:
        """The files are back, so the states can be read; the model is what it was."""
        one, two = (store.load(self.place / where, self.like)[0] for where in (f"run/{STATE}", PARTS))
        assert equal(one, two)
        assert saved_states.load(self.place, "saved", "model").step == 4
        assert hash_of(self.run.denoiser.module) == self.run.base


@st.composite
def changed(draw: st.DrawFn, whole: dict[str, bytes]) -> dict[str, bytes]:
    """One or two damaged files of the folder; in half of the cases state.json is signed anew, so that
    its hashes fit.
    """
    out: dict[str, bytes] = {}
    for name in draw(
        st.lists(st.sampled_from([*whole, *RECORDS, *RECORDS, *RECORDS]), min_size=1, max_size=2, unique=True)
    ):
        body = whole[name]
        if name.endswith(".safetensors"):
            out[name] = draw(damaged_file([body]))
        elif draw(st.booleans()):
            out[name] = draw(damaged_bytes([body], 4, 1))
        else:
            out[name] = text_of(draw(damaged_json([body], 3, 1)), draw(st.sampled_from(("", "", "step", "kind"))))
    if draw(st.booleans()):
        for name in RECORDS:
            out[name] = signed(out.get(name, whole[name]), {**whole, **out}, Path(name).parent.as_posix())
    return out


def signed(text: bytes, files: dict[str, bytes], folder: str) -> bytes:
    """A state.json whose hashes fit what lies beside it, as far as its form allows."""
    try:
        record = json.loads(text)
        for name in record["tensors"].get("files", {}):
            record["tensors"]["files"][name] = hashlib.sha256(files[f"{folder}/{name}"]).hexdigest()
        for one in record["tensors"].get("parts", []):
            one["sha256"] = hashlib.sha256(files[f"{folder}/{one['file']}"]).hexdigest()
        if "file" in record["tensors"]:
            record["tensors"]["sha256"] = hashlib.sha256(files[f"{folder}/{record['tensors']['file']}"]).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        pass
    try:
        record = json.loads(text) if not isinstance(record, dict) else record
        record["sha256"] = sha256_of_json({key: value for key, value in record.items() if key != "sha256"})
        return json.dumps(record).encode()
    except (ValueError, TypeError, AttributeError, RecursionError, UnboundLocalError):
        return text
