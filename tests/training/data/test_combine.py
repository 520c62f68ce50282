"""Several datasets as one: each image keeps its dataset's settings, batches never mix resolutions or batch sizes, every
image comes as often as its repeats say, and what is trained on is not measured.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from graft_nodes.training.data import combine, folder_report, kohya_metadata
from graft_nodes.training.data.batches import draw_items, make_batches
from graft_nodes.training.data.conditionings import Conditionings
from graft_nodes.training.data.dataset import Conditioning, Dataset, DatasetImage, WorsePicture
from graft_nodes.training.data.epoch_order import batch_sizes, batches_per_epoch, select_images
from graft_nodes.training.data.tags import Caption, CaptionRules


def _image(name, size=(2, 2), **given):
    return DatasetImage(name, "a", torch.full((1, *size), 1.0), sha256=given.pop("sha256", name), **given)


def _dataset(prefix, count=4, size=(2, 2), batch_size=0, held_out=(), **given):
    images = tuple(
        _image(f"{prefix}{i}", size, batch_size=batch_size, repeats=given.get("repeats", 1)) for i in range(count)
    )
    given.pop("repeats", None)
    texts = {"a": Conditioning(torch.ones(1, 1, 1)), "": Conditioning(torch.zeros(1, 1, 1))}
    fields = {"resolution": 512, "folder": prefix, "batch_size": batch_size, "encoders": ("v", "c 0"), **given}
    return Dataset(images, texts, f"digest of {prefix}", tuple(held_out), **fields)


def _shown(dataset, batch_size, batches):
    return [select_images(dataset, batch_size, 3, number) for number in range(batches)]


def test_one_dataset_is_itself():
    dataset = _dataset("x")
    assert combine.combine([dataset]) is dataset


def test_batches_never_mix_resolutions_or_batch_sizes_and_every_image_comes_as_often_as_it_should():
    parts = [
        _dataset("low", 7, batch_size=3, repeats=2),
        _dataset("high", 5, batch_size=1, resolution=1024),
        _dataset("same", 4),
        _dataset("also", 3),
        _dataset("other", 2, resolution=768),
    ]
    whole = combine.combine(parts)
    sizes = {"low": 3, "high": 1, "same": 2, "also": 2, "other": 2}
    # by hand: 14 / 3, 5 / 1, the two plain ones together 7 / 2, 2 / 2
    assert batches_per_epoch(whole, 2) == 5 + 5 + 4 + 1
    assert batch_sizes(whole, 2) == [1, 2, 3]
    for epoch in range(3):
        batches = [select_images(whole, 2, 3, 15 * epoch + number)[0] for number in range(15)]
        seen = Counter(image.name for batch in batches for image in batch)
        assert all(count == (2 if name.startswith("low") else 1) for name, count in seen.items()) and len(seen) == 21
        mixed = 0
        for batch in batches:
            folders = {image.name.split("/")[0] for image in batch}
            assert len(batch) <= min(sizes[folder] for folder in folders)
            assert len(folders) == 1 or folders == {"same", "also"}
            mixed += len(folders) == 2
        assert mixed  # equal settings share batches
    assert sum(len(batch) == 3 for batch, _ in _shown(whole, 2, 15)) == 4


def test_an_own_batch_size_goes_without_another_dataset_too():
    dataset = _dataset("x", 8, batch_size=4)
    assert batches_per_epoch(dataset, 1) == 2 and all(len(own) == 4 for own, _ in _shown(dataset, 1, 6))


@pytest.mark.parametrize(("batch_size", "expected"), [(1, {4: 1, 1: 0}), (8, {4: 1, 8: 2})])
def test_each_batch_has_its_share_of_regularization(batch_size, expected):
    regularization = _dataset("regular", 5)
    first = _dataset("x", 12, batch_size=4, regularization=regularization, regularization_share=0.25)
    whole = combine.combine([first, _dataset("y", 12)])
    seen = Counter()
    for own, regular in _shown(whole, batch_size, 3000):
        size = 4 if own[0].name.startswith("x") else batch_size
        assert len(regular) == expected[size] and len(own) <= size - expected[size]
        seen.update(image.name for image in regular)
    counts = [seen[f"regular{i}"] for i in range(5)]
    assert min(counts) > 0.8 * max(counts)  # none is passed over


def test_whole_batches_are_regularization_where_none_has_room_for_an_image():
    regularization = _dataset("regular", 5)
    first = _dataset("x", 12, regularization=regularization, regularization_share=0.25)
    whole = combine.combine([first, _dataset("y", 12, resolution=1024)])
    found = _shown(whole, 1, 400)
    assert sum(not own for own, _ in found) == 100 and batches_per_epoch(whole, 1) == 32
    with pytest.raises(ValueError, match="The regularization dataset has a batch size of its own"):
        _dataset("x", regularization=_dataset("regular", batch_size=2), regularization_share=0.5)


def test_each_keeps_its_flips_and_caption_dropout():
    mirrored = [replace(image, flipped_latent=-image.latent) for image in _dataset("x").images]
    first = replace(_dataset("x", caption_dropout=1.0), images=tuple(mirrored), flip=1.0)
    second = replace(_dataset("y", caption_dropout=0.0), images=tuple(mirrored), flip=0.0)
    own = replace(_dataset("z", caption_dropout=0.0), images=(replace(mirrored[0], dropout=1.0, flip=1.0),))
    for order in ([first, second, own], [second, own, first]):
        whole = combine.combine(order)
        for number in range(20):
            for item in draw_items(whole, 2, 0.0, 0, number, number, "part 0"):
                folder = item.image.name.split("/")[0]
                assert item.flipped == (folder != "y") and (item.caption == "") == (folder != "y")
        assert len(make_batches(whole, 2, 0.0, 0, 0, 0, "part 0")) == 1


def test_captions_that_vary_are_encoded_once_by_the_text_encoder_that_all_share():
    asked = []

    def encode(texts):
        asked.extend(texts)
        return {text: Conditioning(torch.full((1, 1, 1), float(len(text)))) for text in texts}

    def part(prefix, caption):
        template = Caption((caption,), rules=CaptionRules(shuffle=1.0))
        image = DatasetImage(prefix, caption, torch.zeros(1, 2, 2), caption_template=template)
        return Dataset((image,), Conditionings(encode, [caption, ""], "c"), prefix, encoders=("v", "c"))

    whole = combine.combine([part("x", "a, b"), part("y", "c, d")])
    assert set(whole.conditionings) == {"a, b", "c, d", ""} and len(whole.conditionings) == 3
    del asked[:]
    assert whole.conditionings["c, d"].context.item() == 4 and not asked
    assert whole.conditionings.prepare(["b, a", "d, c", "a, b"]) == 2 and sorted(asked) == ["b, a", "d, c"]
    assert whole.conditionings.prepare(["b, a", "c, d"]) == 0 and len(asked) == 2


def test_regularization_images_are_not_measured():
    others = replace(_dataset("r"), images=(_image("p", sha256="h1"), _image("q", sha256="q1")))
    held_out = [_image("h", sha256="h1"), _image("g", sha256="g1")]
    first = _dataset("x", held_out=held_out, regularization=others, regularization_share=0.5)
    assert [image.name for image in combine.combine([first]).held_out] == ["g"]
    assert [image.name for image in combine.combine([first, _dataset("y")]).held_out] == ["x/g"]
    folder = replace(_dataset("v"), images=tuple(held_out))
    assert [image.name for image in combine.hold_out(first, folder).held_out] == ["v/g"]


def test_what_another_trains_on_is_not_measured():
    first = _dataset("x", held_out=[_image("h", sha256="y1"), _image("g", sha256="new")])
    second = _dataset("y", held_out=[_image("k"), _image("l")])
    whole = combine.combine([first, second])
    assert [image.name for image in whole.held_out] == ["y/k", "x/g", "y/l"]  # in turn, without x/h
    assert combine.count_unmeasured([first, second], whole) == 1 and combine.repeated_names([first, second]) == []
    (line,) = folder_report.note_unmeasured([first, second], whole)
    assert line.startswith("1 held-out images are not measured")
    again = replace(second, images=first.images)
    assert combine.repeated_names([first, again]) == ["x0", "x1", "x2", "x3"]


@pytest.mark.parametrize(
    ("trained", "held_out"), [("ab", "bc"), ("ab", "ca"), ("ab", "cb"), ("a", "ca"), ("ab", "b"), ("ab", "cd")]
)
def test_no_picture_of_a_trained_pair_is_measured(trained, held_out):
    def image(contents):
        worse = [WorsePicture(torch.zeros(1, 2, 2), sha256=content) for content in contents[1:]]
        return _image(contents, sha256=contents[0], worse=worse[0] if worse else None)

    first = replace(_dataset("x"), images=(image(trained),))
    second = _dataset("y", held_out=[image(held_out), _image("other")])
    expected = ["y/other"] if set(trained) & set(held_out) else [f"y/{held_out}", "y/other"]
    assert [image.name for image in combine.combine([first, second]).held_out] == expected


def test_a_validation_dataset_replaces_what_is_held_out():
    dataset = _dataset("x", held_out=[_image("h")])
    validation = _dataset("v", 3)
    whole = combine.hold_out(dataset, validation)
    assert [image.name for image in whole.held_out] == ["v/v0", "v/v1", "v/v2"] and whole.images == dataset.images
    assert whole.digest not in (dataset.digest, validation.digest)
    partly = replace(validation, images=(*dataset.images[:1], *validation.images))
    assert len(combine.hold_out(dataset, partly).held_out) == 3
    with pytest.raises(ValueError, match="every image of validation folder 'v' is trained on too"):
        combine.hold_out(dataset, replace(validation, images=dataset.images))


def test_the_digest_is_that_of_all_parts_their_order_and_their_resolutions():
    x, y = _dataset("x"), _dataset("y")
    digests = [
        combine.combine(parts).digest
        for parts in ([x, y], [y, x], [x, replace(y, resolution=1024)], [x, replace(y, digest="other")], [x, y, y])
    ]
    assert len(set(digests)) == len(digests) and combine.combine([x, y]).digest == digests[0]
    assert combine.combine([x, replace(y, folder="elsewhere", workers=3)]).digest == digests[0]


def test_chains_nest():
    x, y, z = _dataset("x", batch_size=3), _dataset("y", resolution=768), _dataset("z")
    whole = combine.combine([combine.combine([x, y]), z])
    assert {(image.name[0], image.resolution, image.batch_size) for image in whole.images} == {
        ("x", 512, 3),
        ("y", 768, 0),
        ("z", 512, 0),
    }
    assert [image.name for image in whole.images][:5] == ["x/x0", "x/x1", "x/x2", "x/x3", "y/y0"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"encoders": ("v", "d 0")}, "different text encoders; connect the same CLIP to each"),
        ({"encoders": ("w", "c 0")}, "different VAEs; connect the same VAE to each"),
        ({"clip_skip": 2, "encoders": ("v", "c 2")}, "CLIP skip differs; set it to the same number in each[.]$"),
        ({"weighted_captions": True}, "weighted captions is on in one and off in another"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(other, message):
    with pytest.raises(ValueError, match=f"^Dataset: datasets cannot be trained together: .*{message}"):
        combine.combine([_dataset("x"), _dataset("y", **other)])


def test_two_regularization_datasets_are_refused():
    x, y = (_dataset(name, regularization=_dataset("r"), regularization_share=0.5) for name in "xy")
    with pytest.raises(ValueError, match="several have a regularization dataset; connect it to one of them"):
        combine.combine([x, y])
    assert combine.combine([_dataset("z"), y]).regularization is y.regularization
    assert combine.combine([_dataset("z"), y]).regularization_share == 0.5


def test_kohyas_words_add_up():
    def part(name, count, buckets, dropout, **given):
        plain = {
            "dirs": {name: {"n_repeats": 2, "img_count": count}, "both": {"n_repeats": 1, "img_count": 1}},
            "tags": {name: {"cat": count}, "both": {"cat": 1}},
            "buckets": buckets,
            "ar_error": 0.5,
            "settings": {"ss_resolution": name},
        }
        return _dataset(name, count, kohya_metadata=plain, caption_dropout=dropout, **given)

    parts = [part("x", 3, [((64, 64), 3)], 0.0, batch_size=4), part("y", 1, [((64, 64), 1), ((64, 32), 2)], 0.4)]
    said = kohya_metadata.training_metadata(combine.combine(parts), 4, 2, 10, 0.0)
    assert '"both": {"n_repeats": 1, "img_count": 2}' in said["ss_dataset_dirs"]
    assert '"both": {"cat": 2}' in said["ss_tag_frequency"] and said["ss_resolution"] == "x"
    assert '{"resolution": [64, 64], "count": 4}' in said["ss_bucket_info"]
    assert said["ss_caption_dropout_rate"] == "0.1" and said["ss_num_train_images"] == "4"  # 3 x 0 and 1 x 0.4
    assert said["ss_batch_size_per_device"] == "4" and said["ss_total_batch_size"] == "8"
    own = kohya_metadata.training_metadata(_dataset("x", 8, batch_size=4), 1, 2, 10, 0.0)
    assert (own["ss_batch_size_per_device"], own["ss_total_batch_size"]) == ("4", "8")
    assert own["ss_num_batches_per_epoch"] == "2"
    assert "ss_total_batch_size" not in kohya_metadata.training_metadata(_dataset("x"), 1, 2, 10, 0.0)
