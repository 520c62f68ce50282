"""The preview prompts of Train Step, one a line."""

import pytest
from graft_nodes.training.run.preview_prompts import LONGEST, MOST, PromptLine, fill_trigger, notes, preview_prompts


def test_each_line_is_a_prompt():
    text = "  a red square \n\n# a blue circle\r\na cat, (best:1.2)  # by night\n   # off\n"
    assert [line.text for line in preview_prompts(text)] == ["a red square", "a cat, (best:1.2)  # by night"]
    assert preview_prompts("") == preview_prompts(" \n#\n") == []


def test_too_many_and_too_long_prompts_are_refused_with_what_to_do():
    lines = [f"prompt {number}" for number in range(MOST)]
    assert preview_prompts("\n".join([*lines, "# one more"])) == [PromptLine(line) for line in lines]
    with pytest.raises(ValueError, match=f"has {MOST + 1} prompts, at most {MOST} are allowed.*put a # in front"):
        preview_prompts("\n".join([*lines, "one more"]))
    assert preview_prompts("x" * LONGEST)
    with pytest.raises(ValueError, match=f"prompt 2 has {LONGEST + 1} characters, at most {LONGEST}"):
        preview_prompts("a\n#\n" + "x" * (LONGEST + 1))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a cat --n low quality, bad", PromptLine("a cat", negative="low quality, bad")),
        ("a cat --d 42 --s 28 --l 7.5 --g 3.5", PromptLine("a cat", None, 42, 28, 7.5, 3.5)),
        ("a cat --N bad --S 5", PromptLine("a cat", "bad", steps=5)),
        ("a cat --w 512 --h 768 --n --f 25", PromptLine("a cat", "", width=512, height=768, unused=("--f 25",))),
        (
            "a cat --ss euler_a --sc karras --fs 3 --cn a b.png",
            PromptLine("a cat", sampler="euler_ancestral", scheduler="karras", unused=("--fs 3", "--cn a b.png")),
        ),
        ("a cat --ss dpmpp_2m", PromptLine("a cat", sampler="dpmpp_2m")),
        ("a cat --ss DPMSolver++", PromptLine("a cat", sampler="dpmpp_2m")),
        ("a well-made --- cat -- by night", PromptLine("a well-made --- cat -- by night")),
        ("--n bad", PromptLine("", "bad")),
    ],
)
def test_flags_of_kohyas_sample_prompts(line, expected):
    assert preview_prompts(line) == [expected]


# Of sd-scripts' `line_to_prompt_dict`, of musubi-tuner's, and of other programs. Both trainers encode nothing from the
# first of them on, whether they know it or not.
OTHERS = (
    *("--cn a b.png", "--ctr 0.25", "--rcfg 1.0", "--fs 3"),
    *("--f 25", "--i first.png", "--ei last.png", "--ci a control.png", "--of no_post", "--cf 8"),
    *("--ar 16:9", "--quality", "--no-upscale", "--W=512", "--w=512 x", "--x2 3"),
)


@pytest.mark.parametrize("flag", OTHERS)
def test_a_flag_that_previews_do_not_follow_is_named_once_and_is_no_part_of_any_prompt(flag):
    (line,) = lines = preview_prompts(f"a cat {flag} --n bad {flag}\t--s 5 {flag}")
    assert line == PromptLine("a cat", "bad", steps=5, unused=(flag,))
    (note,) = notes(lines, "")
    assert note.count(flag) == 1 and "is not used" in note


def test_the_same_flags_of_several_prompts_are_named_once():
    lines = preview_prompts("a cat --f 5 --fs 3\na dog\na hen --f 5 --fs 3 --d 7\na fox --f 6")
    same, other = notes(lines, "")
    assert same.startswith("preview prompts 1, 3: --f 5, --fs 3 are not used")
    assert other.startswith("preview prompt 4: --f 6 is not used")


def test_the_trigger_of_a_negative_prompt():
    lines = preview_prompts("a cat --n [trigger], bad")
    assert fill_trigger(lines, "zorp") == [PromptLine("a cat", "zorp, bad")]
    assert "prompt 1: [trigger] is not a word" in notes(lines, "")[0] and notes(lines, "zorp") == []


def test_guidance_alone_works_against_the_empty_prompt():
    (line,) = preview_prompts("a cat --l 7")
    assert line.negative is None and line.needed_negative == ""
    assert [read.needed_negative for read in preview_prompts("a cat --l 1\na cat\na cat --n bad")] == [
        None,
        None,
        "bad",
    ]


@pytest.mark.parametrize(
    "flags", ["--s 0", "--s many", "--d -1", "--d 1.5", "--l", "--g nan", f"--d {2**63}", "--w 8", "--h 20000"]
)
def test_wrong_values_of_flags_are_refused(flags):
    with pytest.raises(ValueError, match=rf"more preview prompts: prompt 2: {flags[:3]} is .*, expected a .*number"):
        preview_prompts(f"a cat\na dog {flags}")


def test_what_is_not_followed_is_said():
    lines = preview_prompts("a [trigger]\na cat --f 25\na [trigger] and [name]")
    assert [line.text for line in fill_trigger(lines, "zorp")] == ["a zorp", "a cat", "a zorp and zorp"]
    assert fill_trigger(lines, "") == lines
    size, word = notes(lines, "")
    assert "prompt 2: --f 25 is not used" in size and "prompts 1, 3: [trigger] is not a word" in word
    assert notes(lines, "zorp") == [size] and notes(lines[:1], "zorp") == []
