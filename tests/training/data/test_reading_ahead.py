"""A dataset that does not fit into memory is read ahead by a thread: the same batches, errors at the batch that needs
what is wrong, and nothing is encoded there.
"""

import shutil
import threading
from dataclasses import replace

import pytest
import torch
from graft_nodes.tests.training.data.making_pictures import write_picture
from graft_nodes.training.data import conditionings, encoding, pictures, sample_store
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings, SampleSettings
from graft_nodes.training.data.reading_ahead import NeedsEncodingError, check_may_encode, read_ahead
from graft_nodes.training.data.sample_store import SampleStore
from graft_nodes.training.data.samples import Sample, make_dataset
from graft_nodes.training.data.stored_latent import StoredLatent
from graft_nodes.training.run.batch_loader import BatchLoader, BatchSchedule

STEPS = 15


@pytest.fixture
def folder(tmp_path):
    for number in range(8):
        path = write_picture(tmp_path / "data" / f"{number}.png", seed=number)
        path.with_suffix(".txt").write_text(f"picture {number}", encoding="utf-8")
    return tmp_path / "data"


@pytest.fixture
def read(folder, tmp_path, monkeypatch):
    """Reads the folder into a dataset that keeps that many bytes in memory; `read.encoded` has the thread of each
    picture and caption that was encoded.
    """

    def encode_pixels(pixels):
        read.encoded.append(threading.current_thread())
        return pixels[:, ::8, ::8].movedim(-1, 1).contiguous()

    def encode_captions(texts):
        read.encoded.append(threading.current_thread())
        return {text: Conditioning(torch.full((1, 4, 16), float(sum(text.encode())))) for text in texts}

    def read(kept, cached=True, filters=""):
        monkeypatch.setattr(encoding, "KEPT_BYTES", kept)
        monkeypatch.setattr(conditionings, "KEPT_BYTES", kept)
        settings = FolderSettings(resolution=64, bucket_step=16, validation=0.0, filters=Filters.parse(filters))
        read.listing = read_folder(folder, settings)
        cache = Cache(tmp_path / "cache") if cached else None
        return encoding.encode(read.listing, encode_pixels, encode_captions, ("vae", "clip"), cache)[0]

    read.encoded = []
    return read


def _taken(dataset, workers):
    """What the steps get, as plain values."""
    loader = BatchLoader(BatchSchedule(dataset, 3, 2, 0.2, 5), workers, until=STEPS)
    rows = []
    for step in range(STEPS):
        for part in range(2):
            for batch in loader.take(step, part):
                contexts = [one.context.tolist() for one in batch.conditionings]
                rows.append((step, part, batch.captions, batch.latents.tolist(), contexts))
    loader.close()
    return rows


def test_only_what_is_not_in_memory_is_read_ahead(read, folder):
    assert read(0).workers == 1 and read(0).workers == 1  # encoded, and opened again
    assert read(2**30).workers == 0 and read(0, cached=False).workers == 0
    assert read(0, filters="workers: 3").workers == 3
    other = read(0)
    inside = read(2**30)
    assert inside.loader_threads == 0
    assert replace(inside, regularization=other, regularization_share=0.5).loader_threads == 1


def test_captions_alone_are_read_ahead_too(read, monkeypatch):
    read(2**30)
    latents_fit = read(2 * 8 * 3 * 8 * 8 * 4)
    assert latents_fit.workers == 0
    monkeypatch.setattr(encoding, "KEPT_BYTES", 2**30)
    few = conditionings.Conditionings(
        lambda texts: {}, ["picture 1"], "clip", Cache(read.listing.folder.parent / "cache")
    )
    assert not few.leaves_on_disk
    monkeypatch.setattr(conditionings, "KEPT_BYTES", 0)
    none = conditionings.Conditionings(
        lambda texts: {}, ["picture 1"], "clip", Cache(read.listing.folder.parent / "cache")
    )
    assert none.leaves_on_disk


def test_pictures_of_vae_training_are_read_ahead(read, monkeypatch):
    read(2**30)
    assert pictures.read_pictures(read.listing).workers == 0
    whole = pictures.read_pictures(read.listing)
    monkeypatch.setattr(encoding, "KEPT_BYTES", 0)
    part = pictures.read_pictures(read.listing)
    assert part.workers == 1
    assert _taken(part, 1) == _taken(whole, 0)


def test_samples_are_read_ahead(tmp_path, monkeypatch):
    def made():
        conditioning = Conditioning(torch.ones(1, 2, 4))
        samples = [Sample(torch.full((4, 2, 2), float(n)), conditioning, str(n)) for n in range(3)]
        return make_dataset(samples, SampleSettings(validation=0.0), store=SampleStore(Cache(tmp_path)))

    assert made().workers == 0
    monkeypatch.setattr(sample_store, "KEPT_BYTES", 0)
    assert made().workers == 1


def test_batches_are_the_same_and_a_thread_reads_them(read, monkeypatch):
    whole, part = read(2**30), read(0)
    readers = set()
    reading = Cache.read
    monkeypatch.setattr(Cache, "read", lambda *args: readers.add(threading.current_thread().name) or reading(*args))
    assert _taken(part, part.workers) == _taken(whole, 0)
    assert readers and all(name.startswith("graft-loader") for name in readers)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("graft-loader")]


def test_what_is_gone_is_encoded_by_the_thread_that_trains(read, tmp_path):
    whole, part = read(2**30), read(0)
    expected = _taken(whole, 0)
    shutil.rmtree(tmp_path / "cache")
    read.encoded.clear()
    assert _taken(part, 2) == expected
    assert read.encoded and set(read.encoded) == {threading.main_thread()}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_up_at_the_batch_that_needs_what_is_wrong(workers):
    def load(number):
        if number == gone:
            raise ValueError(f"picture {number} is gone")
        return torch.full((1, 2, 2), float(number))

    images = tuple(DatasetImage(str(n), "", StoredLatent((1, 2, 2), lambda n=n: load(n))) for n in range(9))
    dataset = Dataset(images, {"": Conditioning(torch.zeros(1, 1, 1))}, "digest")
    schedule = BatchSchedule(dataset, 1, 1, 0.0, 4)
    shown = [int(schedule.pictures_of(step, 0)[0].image.name) for step in range(9)]
    gone = shown[5]
    loader = BatchLoader(schedule, workers, until=9)
    for step in range(9):
        if step == 5:
            with pytest.raises(ValueError, match=f"picture {gone} is gone"):
                loader.take(step, 0)
        else:
            assert loader.take(step, 0)[0].latents.unique().tolist() == [shown[step]]
    loader.close()


def test_a_thread_may_encode_before_and_after_it_reads_ahead():
    check_may_encode()
    with pytest.raises(NeedsEncodingError), read_ahead():
        check_may_encode()
    check_may_encode()
