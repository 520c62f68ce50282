"""A model's condition objects: what a model is asked for, how long the answer is kept, and whether it takes control
pictures at all. The models here stand for ComfyUI's: they note what they are asked.
"""

import pytest
import torch
from graft_nodes.host.conditions import Conditions, can_concat
from graft_nodes.training.data.batches import add_extras
from graft_nodes.training.data.dataset import Conditioning

CPU = torch.device("cpu")
MEGABYTES = 2**20


class Made:
    """One condition, as comfy.conds.CONDRegular."""

    def __init__(self, cond):
        self.cond = cond
        self.processed = []

    def process_cond(self, **given):
        self.processed.append(given)
        return self

    def can_concat(self, other):
        return self.cond.shape == other.cond.shape


class Model:
    """Makes a condition of the caption and one of each entry in `takes`."""

    def __init__(self, *takes, module=None):
        self.takes = takes
        self.diffusion_model = module or torch.nn.Identity()
        self.asked = []

    def extra_conds(self, **params):
        self.asked.append(params)
        made = {"c_crossattn": Made(params["cross_attn"])}
        made.update({name: Made(params[name]) for name in self.takes if name in params})
        return made


def latents(height=2, width=3):
    return torch.ones(5, 4, height, width)


def caption(size=3, device="cpu", **extras):
    return Conditioning(torch.ones(1, 2, size, device=device), extras)


def test_what_a_model_is_asked():
    model = Model()
    given = caption(pooled_output=torch.ones(1, 6), width=512)
    (made,) = Conditions(model, CPU).get(given, latents(4, 6)).values()
    (asked,) = model.asked
    assert (asked["width"], asked["height"]) == (512, 32)  # 8 pixels each latent; an image's own size comes first
    assert asked["prompt_type"] == "positive" and asked["guidance"] == 1.0
    assert asked["noise"].shape == asked["latent_image"].shape == asked["latent_shapes"][0] == (1, 4, 4, 6)
    assert not asked["noise"].any() and asked["device"] == CPU
    assert torch.equal(asked["cross_attn"], given.context) and asked["cross_attn"].dtype == torch.float32
    assert torch.equal(asked["pooled_output"], given.extras["pooled_output"])
    assert made.processed == [{"batch_size": 1, "device": CPU, "area": None}]
    Conditions(model, CPU).get(caption(), latents(4, 6))
    assert (model.asked[1]["width"], model.asked[1]["height"]) == (48, 32)


def test_a_model_may_change_what_it_gets():
    class Careless(Model):
        def extra_conds(self, **params):
            for value in (params["cross_attn"], params["pooled_output"], *params["pair"], *params["by_name"].values()):
                value.zero_()
            return super().extra_conds(**params)

    one, two = torch.ones(2), torch.ones(2)
    given = caption(pooled_output=torch.ones(1, 6), pair=(one, two), by_name={"a": torch.ones(2)})
    Conditions(Careless(), CPU).get(given, latents())
    for tensor in (given.context, given.extras["pooled_output"], one, two, given.extras["by_name"]["a"]):
        assert tensor.all()


def test_conditions_are_made_once_for_each_caption_and_size():
    model, first, second = Model(), caption(), caption()
    conditions = Conditions(model, CPU)
    for _ in range(2):
        made = [conditions.get(first, latents()), conditions.get(second, latents()), conditions.get(first, latents(4))]
    assert len(model.asked) == 3 and len({id(one) for one in made}) == 3
    assert conditions.get(first, latents()[:1]) is made[0]


def test_64_are_kept_and_the_one_that_was_not_asked_for_longest_goes_first():
    model, captions = Model(), [caption() for _ in range(65)]
    conditions = Conditions(model, CPU)
    for one in captions[:64]:
        conditions.get(one, latents())
    conditions.get(captions[0], latents())
    assert len(model.asked) == 64
    conditions.get(captions[64], latents())
    conditions.get(captions[0], latents())
    assert len(model.asked) == 65
    conditions.get(captions[1], latents())
    assert len(model.asked) == 66


def test_no_more_than_512_megabytes_are_kept_but_always_one():
    """On a device that has shapes and no numbers. Bytes in lists count, and those that go are counted no longer."""

    def of(megabytes, **extras):
        return caption(megabytes * MEGABYTES // 8, "meta", **extras)

    def asked(*captions):
        before = len(model.asked)
        for one in captions:
            conditions.get(one, latents())
        return len(model.asked) - before

    model = Model("reference_latents")
    conditions = Conditions(model, torch.device("meta"))
    large, other, small = of(300), of(300), of(100)
    assert asked(large, other) == 2
    assert asked(small, other, small) == 1
    assert asked(large) == 1
    assert asked(large, small) == 0
    assert asked(other) == 1
    exact = of(212)
    assert asked(exact, other) == 1
    assert asked(large) == 1
    huge = of(600)
    assert asked(huge, huge) == 1 and asked(small) == 1
    listed = of(1, reference_latents=[torch.ones(300 * MEGABYTES // 4, device="meta")] * 2)
    assert asked(small) == 0 and asked(listed, listed) == 1 and asked(small) == 1


def test_captions_that_are_trained_and_modules_that_run_are_made_anew():
    model = Model()
    conditions = Conditions(model, CPU)
    trained = Conditioning(torch.ones(1, 2, 3, requires_grad=True))
    found = [conditions.get(trained, latents()) for _ in range(2)]
    assert len(model.asked) == 2 and all(one["c_crossattn"].cond.requires_grad for one in found)

    class Connected(Model):
        def extra_conds(self, **params):
            self.diffusion_model(params["cross_attn"])
            return super().extra_conds(**params)

    model, text = Connected(module=torch.nn.Linear(3, 3)), caption()
    conditions = Conditions(model, CPU)
    assert conditions.get(text, latents()) is not conditions.get(text, latents()) and len(model.asked) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("reference_latents", "reference latents"), ("concat_latent_image", "concatenated latents")],
)
def test_control_pictures_that_a_model_does_not_take_are_refused(name, words):
    of_image = {name: [torch.ones(1, 4, 2, 3)], "guidance": 3.5}
    pictures = add_extras(caption(), of_image)
    with pytest.raises(ValueError, match=f"^Model takes no {words}, so the control pictures would do nothing"):
        Conditions(Model("guidance"), CPU).get(pictures, latents())
    conditions = Conditions(Model(name), CPU)
    assert name in conditions.get(pictures, latents())


def test_a_model_is_asked_once_for_each_kind_whether_it_takes_them():
    """It is asked a second time without them; it takes them when something about its conditions is different then."""
    model = Model("reference_latents")
    conditions = Conditions(model, CPU)
    first = add_extras(caption(), {"reference_latents": [torch.ones(1, 4, 2, 3)]})
    second = add_extras(caption(), {"reference_latents": [torch.zeros(1, 4, 2, 3)]})
    conditions.get(first, latents())
    assert len(model.asked) == 2 and "reference_latents" not in model.asked[1]
    conditions.get(second, latents())
    assert len(model.asked) == 3
    with pytest.raises(ValueError, match="takes no concatenated latents"):
        conditions.get(add_extras(caption(), {"concat_latent_image": torch.ones(1, 4, 2, 3)}), latents())
    conditions.get(add_extras(caption(), {"width": 64}), latents())  # no control picture
    conditions.get(caption(reference_latents=[torch.ones(2)]), latents())  # the caption's own
    assert len(model.asked) == 7


@pytest.mark.parametrize(
    ("with_picture", "without", "is_taken"),
    [
        (torch.ones(1, 4), torch.ones(1, 4), False),
        (torch.ones(1, 4), torch.zeros(1, 4), True),
        (torch.ones(1, 4), torch.ones(1, 5), True),
        ([torch.ones(1, 4), 2], [torch.ones(1, 4), 2], False),
        ([torch.ones(1, 4), 2], [torch.ones(1, 4), 3], True),
        ([torch.ones(1, 4)], [torch.ones(1, 4), torch.ones(1, 4)], True),
        ((torch.ones(1, 4),), (torch.zeros(1, 4),), True),
        (1.5, 1.5, False),
        (1.5, 2.5, True),
    ],
)
def test_what_counts_as_a_difference(with_picture, without, is_taken):
    class Answers(Model):
        def extra_conds(self, **params):
            value = without
            if "reference_latents" in params:
                value = with_picture
            return {"same": Made(1), "asked": Made(value)}

    pictures = add_extras(caption(), {"reference_latents": [torch.ones(1, 4, 2, 3)]})
    if is_taken:
        Conditions(Answers(), CPU).get(pictures, latents())
    else:
        with pytest.raises(ValueError, match="Answers takes no reference latents"):
            Conditions(Answers(), CPU).get(pictures, latents())


def test_which_conditions_share_a_batch():
    small, large = {"a": Made(torch.ones(2))}, {"a": Made(torch.ones(3))}
    assert can_concat(large, large) and can_concat(small, {"a": Made(torch.zeros(2))})
    assert not can_concat(small, large) and not can_concat(small, {"b": Made(torch.ones(2))})
    assert not can_concat({**small, "b": Made(torch.ones(2))}, {**small, "b": Made(torch.ones(3))})
    unlike = {"a": Made(None)}  # one that fits nothing but itself is not even asked
    assert can_concat(unlike, unlike)
