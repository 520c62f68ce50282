"""Captions that vary: order, dropout, wildcards, weights and lengths, against kohya's and EveryDream2's rules written
anew.
"""

from collections import Counter
from itertools import permutations

import pytest
from graft_nodes.training.data.tags import (
    Caption,
    CaptionRules,
    fill_wildcards,
    has_choices,
    split_tags,
    split_template,
)
from graft_nodes.training.random_draws import generator

TAGS = ("a", "b", "c", "d")


def _draws(caption, count=2000):
    return [caption.draw(generator(0, i, "test")) for i in range(count)]


def test_a_caption_without_rules_is_as_written():
    for text in ("a cat, on a mat", "one  tag", "", "x,,y", "{a|b} {{c}}"):
        caption = Caption((text,))
        assert set(_draws(caption, 5)) == {caption.plain} == {text} and not caption.varies


@pytest.mark.parametrize("keep", [0, 1, 3, 9])
def test_shuffling_keeps_the_front_and_gives_every_order_alike(keep):
    caption = Caption(("a, b,c ,d",), rules=CaptionRules(shuffle=1.0, keep=keep))
    found = Counter(_draws(caption))
    kept, free = TAGS[:keep], TAGS[keep:]
    assert set(found) == {", ".join(kept + order) for order in permutations(free)}
    assert max(found.values()) / min(found.values()) < 2.2
    assert caption.plain == "a, b, c, d" and caption.varies == (keep < 3)


def test_shuffle_is_a_probability():
    found = Counter(_draws(Caption(("a, b",), rules=CaptionRules(shuffle=0.5))))
    assert found["b, a"] / 2000 == pytest.approx(0.25, abs=0.03)


def test_dropout_is_of_each_tag_and_spares_the_kept():
    caption = Caption(tags=TAGS, rules=CaptionRules(dropout=0.3, keep=1))
    found = Counter(tag for text in _draws(caption) for tag in split_tags(text))
    assert found["a"] == 2000
    for tag in "bcd":
        assert found[tag] / 2000 == pytest.approx(0.7, abs=0.03)
    assert set(_draws(Caption(tags=TAGS, rules=CaptionRules(dropout=1.0)), 5)) == {""}
    assert (
        Caption(("a",), rules=CaptionRules(dropout=0.5)).varies
        and not Caption(("a",), rules=CaptionRules(dropout=0.5, keep=1)).varies
    )


def test_shuffled_and_dropped_together():
    found = set(_draws(Caption(tags=("a", "b"), rules=CaptionRules(dropout=0.5, shuffle=1.0))))
    assert found == {"", "a", "b", "a, b", "b, a"}


def test_choices_and_escaped_braces():
    assert {fill_wildcards("a {red|blue} {x|y|z}", generator(0, i, "")) for i in range(200)} == {
        f"a {color} {letter}" for color in ("red", "blue") for letter in "xyz"
    }
    assert fill_wildcards("{{a|b}} {c|d}", None) == "{a|b} c"
    assert {fill_wildcards("{a|{b|c} d}", generator(0, i, "")) for i in range(100)} == {"a", "b d", "c d"}
    assert {fill_wildcards("{a|{b|c}}", generator(0, i, "")) for i in range(100)} == {"a", "b", "c"}
    assert fill_wildcards("{a|{b|{c|d}}} {{e}} {f}}}", None) == "a {e} f}"
    assert fill_wildcards("a {b", None) == "a {b" and fill_wildcards("{a|}b", None) == "ab"
    assert has_choices("{a|b}") and not has_choices("{a}") and not has_choices("a|b")


def test_one_line_of_many_is_drawn():
    caption = Caption(("first line", "second {a|b}"), rules=CaptionRules(wildcards=True))
    assert (
        set(_draws(caption, 200)) == {"first line", "second a", "second b"}
        and caption.plain == "first line"
        and caption.varies
    )
    assert Caption(("first line", "second")).plain == "first line second"


def test_choices_come_before_the_tags_are_cut():
    found = set(_draws(Caption(("{a, b|c}, d",), rules=CaptionRules(wildcards=True, shuffle=1.0)), 300))
    assert found == {*(", ".join(order) for order in permutations("abd")), "c, d", "d, c"}


def test_a_text_is_cut_into_tags_around_its_choices():
    assert split_template("a {red, big|blue} cat, tail,, {b|{c, d|e}, f}") == [
        "a {red, big|blue} cat",
        "tail",
        "{b|{c, d|e}, f}",
    ]
    assert split_template("{{a, b}}, {c, d|e}, :{, f") == ["{{a", "b}}", "{c, d|e}", ":{", "f"]
    assert split_template("{a, b}, c") == split_tags("{a, b}, c")


def test_words_are_replaced_and_left_out_inside_tags():
    replacements = (("princess luna", "luna"), ("artist:", "by="), (":", "="), (" ", "_"))
    rules = CaptionRules(separator=" ", left_out=("high res",), replacements=replacements)
    caption = Caption(tags=("princess luna", "high res", "artist:some one", "oc:x"), rules=rules)
    assert caption.plain == "luna by=some_one oc=x"  # LunNova's own example of a configuration
    assert Caption(("princess luna, high res",), rules=rules).plain == "luna"


def test_a_tag_of_which_nothing_is_left_is_left_out():
    rules = CaptionRules(separator="|", replacements=(("bad", ""),))
    assert Caption(tags=("a", "bad", "b"), rules=rules).plain == "a|b"
    assert Caption(("a, bad, b",), rules=rules).plain == "a|b"


def _pick(weights, total=0.0, order=()):
    """Probability of every order when tags are picked one after another in proportion to
    their weights (EveryDream2).
    """
    left = {i: w for i, w in enumerate(weights) if i not in order}
    if not left:
        return {order: 1.0}
    out = {}
    for i, w in left.items():
        for rest, p in _pick(weights, total, (*order, i)).items():
            out[rest] = out.get(rest, 0.0) + p * w / sum(left.values())
    return out


@pytest.mark.parametrize("weights", [(1.0, 3.0, 0.5), (1.0, 1.0, 4.0)])
def test_weights_bring_tags_to_the_front(weights):
    caption = Caption(tags=("a", "b", "c"), weights=weights, rules=CaptionRules(shuffle=1.0))
    found = Counter(_draws(caption, 6000))
    for order, share in _pick(weights).items():
        assert found[", ".join("abc"[i] for i in order)] / 6000 == pytest.approx(share, abs=0.02)


def test_a_length_takes_whole_tags_until_one_exceeds_it():
    caption = Caption(tags=("abc", "def", "g"), rules=CaptionRules(max_length=8))
    assert caption.plain == "abc, def"
    assert Caption(tags=("abc", "defgh", "i"), rules=CaptionRules(max_length=8)).plain == "abc"
    assert all(
        len(text) <= 8
        for text in _draws(Caption(tags=("abc", "def", "g"), rules=CaptionRules(max_length=8, shuffle=1.0)), 50)
    )


def test_the_same_generator_gives_the_same_words():
    caption = Caption(tags=tuple("abcdefgh"), rules=CaptionRules(shuffle=0.7, dropout=0.2))
    assert _draws(caption, 50) == _draws(caption, 50) and len(set(_draws(caption, 50))) > 40


def test_what_stands_before_a_separator_and_after_a_second_one_stays():
    """kohya's keep_tokens_separator: fixed, flexible and suffix part."""
    rules = CaptionRules(shuffle=1.0, keep_separator="|||")
    found = Counter(_draws(Caption(("one, two ||| a, b ||| end",), rules=rules), 400))
    assert set(found) == {"one, two, a, b, end", "one, two, b, a, end"} and min(found.values()) > 120
    assert (
        Caption(("one ||| a, b",), rules=rules).plain == "one, a, b"
        and Caption(("one ||| a",), rules=rules).varies is False
    )
    dropping = Caption(("one ||| a, b",), rules=CaptionRules(dropout=1.0, keep_separator="|||"))
    assert set(_draws(dropping, 5)) == {"one"}
    without = Caption(("a, b, c",), rules=CaptionRules(shuffle=1.0, keep=1, keep_separator="|||"))
    assert set(_draws(without, 60)) == {"a, b, c", "a, c, b"}


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a photo of zorp", "a photo of zorp"),
        ("zorp", "zorp"),
        ("zorp, red", "zorp, red"),
        ("(zorp:1.2) x_zorp", "(zorp:1.2) x_zorp"),
        ("zorpish and x_zorp", "zorp zorpish and x_zorp"),
        ("xzorp zorp's", "xzorp zorp's"),
        ("a photo", "zorp a photo"),
        ("a photo of [name]", "a photo of zorp"),
        ("[trigger] and [name]", "zorp and zorp"),
    ],
)
def test_a_trigger_word_that_is_there_is_not_put_in_front_again(caption, expected):
    """AI-Toolkit's rule, but for words that only hold it."""
    assert Caption((caption,), rules=CaptionRules(trigger="zorp")).plain == expected


def test_a_trigger_word_without_spaces_around():
    rules = CaptionRules(trigger="\u5c0f\u660e")
    assert (
        Caption(("\u4e00\u5f20\u5c0f\u660e\u7684\u7167\u7247",), rules=rules).plain
        == "\u4e00\u5f20\u5c0f\u660e\u7684\u7167\u7247"
    )


def test_a_trigger_word_among_tags():
    rules = CaptionRules(trigger="zorp", prefix="photo,", shuffle=1.0)
    assert all(text.count("zorp") == 1 for text in _draws(Caption(("a, zorp, b",), rules=rules), 30))
    assert Caption((), ("a", "zorp"), rules=rules).plain == "photo, a, zorp"
    dropped = CaptionRules(trigger="zorp", dropout=0.5)
    assert all(text.count("zorp") == 1 for text in _draws(Caption(("zorp, a, b",), rules=dropped), 60))


def test_the_trigger_and_what_stands_around():
    rules = CaptionRules(trigger="zorp", prefix="photo of", suffix="{on|under} white", wildcards=True)
    assert Caption(("a [trigger] ring, [trigger]",), rules=rules).plain == "photo of a zorp ring, zorp on white"
    assert Caption(("a ring",), rules=rules).plain == "photo of zorp a ring on white"
    assert (
        Caption(("x",), rules=rules).varies
        and not Caption(("x",), rules=CaptionRules(suffix="{on|under} white")).varies
    )
    assert Caption(("",), rules=CaptionRules(trigger="zorp")).plain == "zorp"
    around = CaptionRules(trigger="zorp", prefix="photo of [trigger],", suffix="in [trigger] style")
    assert Caption(("a ring",), rules=around).plain == "photo of zorp, a ring in zorp style"
    assert Caption((), ("x", "y"), rules=CaptionRules(prefix="p,")).plain == "p, x, y"
    shuffled = Caption(("a, b",), rules=CaptionRules(shuffle=1.0, prefix="first", suffix="last"))
    assert set(_draws(shuffled, 60)) == {"first a, b last", "first b, a last"}
    assert set(_draws(Caption(("x",), rules=rules), 60)) == {"photo of zorp x on white", "photo of zorp x under white"}


def test_without_a_generator_nothing_moves_or_drops_out():
    assert Caption(tags=TAGS, rules=CaptionRules(shuffle=1.0, dropout=1.0)).plain == "a, b, c, d"
    assert Caption(("a, b",), rules=CaptionRules(separator=" ")).plain == "a b"


def test_what_varies_is_told_by_what_can_be_drawn():
    wildcards = CaptionRules(wildcards=True)
    assert Caption(("a", "b"), rules=wildcards).varies and not Caption(("a",), rules=wildcards).varies
    assert Caption(("a, b",), rules=CaptionRules(shuffle=0.1)).varies
    assert not Caption(("a, b",), rules=CaptionRules(max_length=99)).varies


def test_one_line_is_no_draw():
    options = "{a|b|c|d|e|f|g|h}"
    caption = Caption((options,), rules=CaptionRules(wildcards=True))
    assert _draws(caption, 20) == [fill_wildcards(options, generator(0, i, "test")) for i in range(20)]


def test_a_separator_that_does_nothing_is_noticed():
    rules = CaptionRules(keep_separator="|||")
    assert Caption(("a", "b ||| c"), rules=rules).shows_separator is True
    assert Caption(("a",), rules=rules).shows_separator is False
    for works in (CaptionRules(), CaptionRules(keep_separator="|||", shuffle=1.0)):
        assert Caption(("a ||| b",), rules=works).shows_separator is False


def test_a_third_separator_is_text():
    rules = CaptionRules(shuffle=1.0, keep_separator="|||")
    assert Caption(("one ||| a ||| b ||| c",), rules=rules).plain == "one, a, b ||| c"


def test_possible_texts_hold_whatever_a_draw_can_give():
    assert Caption(("a, b",), rules=CaptionRules(shuffle=1.0, trigger="t")).possible_texts == ("t a, b",)
    for more in ({"wildcards": True}, {"max_length": 9}):
        rules = CaptionRules(
            separator="; ", replacements=(("old", "new"),), trigger="t", prefix="p", suffix="s", **more
        )
        expected = ("one {a|b}", "two", "new", "; ", "t", "p", "s")
        assert Caption(("one {a|b}", "two"), rules=rules).possible_texts == expected


def test_choices_lie_in_each_other_up_to_200_deep():
    def nested(depth):
        return "{a|" * depth + "b" + " }" * depth

    assert fill_wildcards(nested(200), None) == "a"
    with pytest.raises(ValueError, match="choices lie in each other more than 200 deep"):
        fill_wildcards(nested(201), None)
    assert fill_wildcards("a __x__", None) == "a __x__"


def test_replacements_make_tags_of_up_to_100_000_characters():
    rules = CaptionRules(replacements=(("x", "y" * 50_000),))
    assert Caption(("xx",), rules=rules).plain == "y" * 100_000
    with pytest.raises(ValueError, match="replacements make a tag of more than 100000 characters"):
        assert Caption(("xxz",), rules=rules).plain
