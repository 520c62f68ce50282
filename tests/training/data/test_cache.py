"""What is kept on disk comes back bit for bit, damage is found, a crash leaves nothing half written, the size stays
bounded.
"""

import errno
import hashlib
import json
import ntpath
import os
import time
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import pytest
import torch
from graft_nodes.tests.storage.vanishing import remove_after_listing
from graft_nodes.training.data import cache as cache_module
from graft_nodes.training.data import packs
from graft_nodes.training.data.cache import QUANTIZED, Cache, key_of

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([1, 2], dtype=torch.int64),
    "c": torch.ones(3, dtype=torch.bfloat16),
}


def _equal(found, expected):
    return found.keys() == expected.keys() and all(
        found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in expected.items()
    )


def test_what_is_written_comes_back(tmp_path):
    key = key_of("x", 1, [2.5])
    assert Cache(tmp_path).read("texts", key) is None and not Cache(tmp_path).holds("texts", key)
    assert Cache(tmp_path).write("texts", key, TENSORS, {"deep": [1, None, "ü"]})
    cache = Cache(tmp_path)
    tensors, values = cache.read("texts", key)
    assert _equal(tensors, TENSORS) and values == {"deep": [1, None, "ü"]} and cache.holds("texts", key)
    assert cache.read("latents", key) is None
    assert cache.read_counts == {"texts": 1} and cache.write_counts == {} and not cache.notes


def test_keys_follow_every_part():
    assert len({key_of("a"), key_of("b"), key_of("a", 1), key_of("a", "1"), key_of("a", 1, 2)}) == 5
    assert key_of("a", (1, 2)) == key_of("a", [1, 2])


def test_every_damage_is_found_and_said(tmp_path):
    Cache(tmp_path).write("texts", key_of(1), TENSORS, [1])
    path = next(tmp_path.rglob("*.safetensors"))
    whole = path.read_bytes()
    step = max(1, len(whole) // 40)
    for place in range(0, len(whole), step):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            cache = Cache(tmp_path)
            found = cache.read("texts", key_of(1))
            assert found is None or (_equal(found[0], TENSORS) and found[1] == [1]), place  # a bit of padding may turn
            assert found is not None or "made again" in cache.notes[0]
    assert Cache(tmp_path).write("texts", key_of(1), TENSORS, [1]) and path.read_bytes() == whole


@pytest.mark.parametrize(
    ("module", "name"), [("os", "fsync"), ("os", "replace"), ("builtins", "open"), ("os", "mkdir")]
)
def test_a_full_disk_is_said_once(tmp_path, monkeypatch, module, name):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"{module}.{name}", full)
    cache = Cache(tmp_path)
    assert not cache.write("texts", key_of(1), TENSORS) and not cache.write("texts", key_of(2), TENSORS)
    assert not cache.write_together("texts", {key_of(3): (TENSORS, None)})
    assert [note for note in cache.notes if "No space left" in note] == cache.notes and len(cache.notes) == 1
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("*.safetensors"))
    assert Cache(tmp_path).read("texts", key_of(1)) is None


def test_the_longest_unused_go_first_and_never_what_is_in_use(tmp_path):
    one = {"a": torch.zeros(1000)}
    for i in range(6):
        Cache(tmp_path).write("latents", key_of(i), one)
    paths = {i: next(tmp_path.rglob(f"{key_of(i)}.safetensors")) for i in range(6)}
    for i, path in paths.items():
        os.utime(path, (1000 + i, 1000 + i))
    size = paths[0].stat().st_size
    cache = Cache(tmp_path, 3.5 * size / 2**30)
    cache.read("latents", key_of(0))
    assert cache.trim() == 3 * size
    assert {i for i in paths if paths[i].exists()} == {0, 4, 5}
    assert any("GB of at most" in line for line in cache.report())
    small = Cache(tmp_path, size / 2 / 2**30)
    for i in (0, 4, 5):
        small.read("latents", key_of(i))
    assert small.trim() == 3 * size and "larger than its limit" in "\n".join(small.report())


def test_what_cannot_be_removed_stays_and_counts(tmp_path, monkeypatch):
    """In a cache that may only be read, and where another process has a file open on Windows."""
    Cache(tmp_path).write_together("latents", {key_of(1): (TENSORS, None)})
    old = tmp_path / "latents" / "aa.partial"
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))

    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    cache = Cache(tmp_path, limit_gb=0.0)
    assert cache.trim() == size and _equal(cache.read("latents", key_of(1))[0], TENSORS)


def test_quantized_weights_below_it_are_neither_counted_nor_removed(tmp_path):
    apart = Cache(tmp_path / QUANTIZED)
    apart.write("weights", key_of(1), TENSORS)
    assert Cache(tmp_path, limit_gb=0.0).trim() == 0 and apart.holds("weights", key_of(1))
    assert Cache(tmp_path / QUANTIZED, limit_gb=0.0).trim() == 0 and not apart.holds("weights", key_of(1))


def test_packs_that_were_read_stay(tmp_path):
    for i in range(3):
        Cache(tmp_path).write_together("latents", {key_of(i): (TENSORS, None)})
    cache = Cache(tmp_path, limit_gb=0.0)
    cache.read("latents", key_of(1))
    cache.trim()
    assert [cache.read("latents", key_of(i)) is not None for i in range(3)] == [False, True, False]


def test_a_packs_path_is_the_systems_own(monkeypatch):
    """With a slash in it Windows' walk through the folder gives another name, and the pack would not be known."""
    monkeypatch.setattr(packs, "os", SimpleNamespace(path=ntpath, sep=ntpath.sep))
    index = packs.PackIndex(PureWindowsPath(r"C:\cache"))
    name, metadata = packs.header({"k": ("digest", "null", {"a": (2,)})})
    index._put("latents", name, 10, metadata[packs.ENTRIES])
    assert index.find("latents", "k").path == rf"C:\cache\latents\{packs.FOLDER}\{name}"


def test_a_draft_that_a_clock_which_jumped_calls_abandoned_costs_only_that_file(tmp_path, monkeypatch):
    """Another process trims the cache while this one writes."""
    replace, key = os.replace, key_of(1)

    def trimmed_meanwhile(source, target):
        monkeypatch.undo()
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: 4e9)
            Cache(tmp_path).trim()
        assert not os.path.exists(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", trimmed_meanwhile)
    cache = Cache(tmp_path)
    assert not cache.write("texts", key, TENSORS) and "kept in memory only" in cache.notes[0]
    assert cache.write("texts", key, TENSORS) and _equal(cache.read("texts", key)[0], TENSORS)
    assert not [path for path in tmp_path.rglob("*") if path.suffix != ".safetensors" and path.is_file()]


def test_what_a_crash_left_is_removed(tmp_path):
    cache = Cache(tmp_path)
    cache.write("texts", key_of(1), TENSORS)
    old, new = tmp_path / "texts" / "aa.123.456.partial", tmp_path / "texts" / "bb.123.456"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.trim()
    assert not old.exists() and new.exists()  # another process may be writing the new one now


def test_a_file_with_foreign_metadata_is_made_again(tmp_path):
    from graft_nodes.storage.atomic import write_whole
    from graft_nodes.storage.safetensors import safetensors_bytes

    cache = Cache(tmp_path)
    cache.write("texts", key_of(1), TENSORS)
    write_whole(str(next(tmp_path.rglob("*.safetensors"))), safetensors_bytes(TENSORS, {"values": json.dumps(None)}))
    assert cache.read("texts", key_of(1)) is None


@pytest.mark.parametrize("value", [None, 1, "a", [1, 2], {"a": {"b": [None]}}])
def test_plain_values(tmp_path, value):
    cache = Cache(tmp_path)
    cache.write("texts", key_of(0), {}, value)
    assert cache.read("texts", key_of(0)) == ({}, value)


@pytest.mark.parametrize("removed", ["latents", "latents/*", "latents/*/*"])
def test_what_another_process_removes_while_the_cache_is_listed_is_no_error(tmp_path, monkeypatch, removed):
    for listed in (tmp_path, tmp_path / "latents"):
        assert Cache(tmp_path).write("latents", key_of(1), TENSORS)
        left = tmp_path / "latents" / "crash.partial"
        left.write_bytes(b"half")
        os.utime(left, (1, 1))
        with monkeypatch.context() as patched:
            remove_after_listing(patched, listed, *tmp_path.glob(removed))
            Cache(tmp_path, 0.0).trim()
        assert not list(tmp_path.rglob("*.safetensors"))


def test_a_file_that_goes_while_it_is_read_is_made_again_without_a_word(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    cache.write("texts", key_of(1), TENSORS)
    [path] = tmp_path.rglob("*.safetensors")
    is_file = Path.is_file

    def then_it_goes(asked):
        found = is_file(asked)
        path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", then_it_goes)
    assert cache.read("texts", key_of(1)) is None and not cache.notes


def test_a_pack_that_goes_as_soon_as_it_is_written_is_no_error(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    write = cache_module.write_safetensors

    def then_it_goes(path, *args, **kwargs):
        write(path, *args, **kwargs)
        path.unlink()

    monkeypatch.setattr(cache_module, "write_safetensors", then_it_goes)
    assert cache.write_together("latents", {key_of(1): (TENSORS, None)})
    assert cache.read("latents", key_of(1)) is None and not cache.notes


def test_a_pack_that_goes_while_packs_are_listed_hides_no_other(tmp_path, monkeypatch):
    numbers = range(4)
    for number in numbers:
        _together(tmp_path, number)
    places = {number: Path(Cache(tmp_path)._find_packed("latents", key_of(number)).path) for number in numbers}
    for gone in numbers:
        folder = places[gone].parent
        with monkeypatch.context() as patched:
            remove_after_listing(patched, folder, places[gone])
            cache = Cache(tmp_path)
            assert [cache.shapes("latents", key_of(number)) is None for number in numbers] == [
                number == gone for number in numbers
            ]
        assert not cache.notes
        _together(tmp_path, gone)


def _together(folder, *numbers):
    entries = {key_of(number): ({"latent": torch.full((2, 3), float(number))}, [number]) for number in numbers}
    assert Cache(folder).write_together("latents", entries)


def test_what_is_written_together_comes_back_from_one_file(tmp_path):
    _together(tmp_path, 1, 2, 3)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    for cache in (Cache(tmp_path), Cache(tmp_path)):  # from the header, then from the index
        for number in (1, 2, 3):
            assert cache.holds("latents", key_of(number))
            assert cache.shapes("latents", key_of(number)) == {"latent": (2, 3)}
            tensors, values = cache.read("latents", key_of(number))
            assert _equal(tensors, {"latent": torch.full((2, 3), float(number))}) and values == [number]
        assert cache.shapes("latents", key_of(4)) is None and cache.read("latents", key_of(4)) is None
        assert cache.read_counts == {"latents": 3}
        cache.report()
    assert (tmp_path / "index").is_dir()


def test_the_index_saves_the_headers_and_follows_what_other_processes_do(tmp_path, monkeypatch):
    _together(tmp_path, 1)
    first = Cache(tmp_path)
    first.read("latents", key_of(1))
    first.report()
    _together(tmp_path, 2)  # another process, after the index was written
    seen = []
    header = packs.read_header
    monkeypatch.setattr(packs, "read_header", lambda path: seen.append(path) or header(path))
    again = Cache(tmp_path)
    assert again.shapes("latents", key_of(1)) and again.shapes("latents", key_of(2)) and len(seen) == 1
    again.report()
    assert Cache(tmp_path).shapes("latents", key_of(2)) and len(seen) == 1
    for path in (tmp_path / "latents").rglob("*.safetensors"):
        path.unlink()
    assert Cache(tmp_path).shapes("latents", key_of(1)) is None and again.read("latents", key_of(1)) is None
    assert not again.notes


def test_the_index_has_what_was_written_after_it_was_read(tmp_path, monkeypatch):
    _together(tmp_path, 1)
    cache = Cache(tmp_path)
    cache.read("latents", key_of(1))
    cache.report()
    cache.write_together("latents", {key_of(2): ({"latent": torch.zeros(2, 3)}, None)})
    cache.report()
    monkeypatch.setattr(packs, "read_header", lambda path: pytest.fail(f"the index has not {path}"))
    assert Cache(tmp_path).shapes("latents", key_of(2)) == {"latent": (2, 3)}


def test_every_damage_of_a_pack_is_found_and_said(tmp_path):
    _together(tmp_path, 1, 2)
    Cache(tmp_path).report()
    path = next((tmp_path / "latents").rglob("*.safetensors"))
    index = next((tmp_path / "index").rglob("*.safetensors"), None)
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            cache = Cache(tmp_path)
            for number in (1, 2):
                found = cache.read("latents", key_of(number))
                assert found is None or (
                    _equal(found[0], {"latent": torch.full((2, 3), float(number))}) and found[1] == [number]
                )
                assert found is not None or "made again" in cache.notes[0]
            assert index is None or index.is_file()
            assert bool(cache.notes) != path.is_file(), "a damaged pack never hides what is made again"


def test_a_damaged_index_is_read_again_from_the_packs(tmp_path):
    _together(tmp_path, 1)
    first = Cache(tmp_path)
    first.read("latents", key_of(1))
    first.report()
    [path] = (tmp_path / "index").rglob("*.safetensors")
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        cache = Cache(tmp_path)
        assert _equal(cache.read("latents", key_of(1))[0], {"latent": torch.full((2, 3), 1.0)})


def test_keys_are_those_of_every_version():
    """What is in a cache is found by them."""
    assert key_of("latent", 64, None) == hashlib.sha256(b'[1, "latent", 64, null]').hexdigest()
