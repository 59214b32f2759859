"""The answer in a model's text: marked reasoning is removed, in every notation, and nothing else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.summaries.reasoning import without_reasoning

TAGS = ("think", "thinking", "reasoning", "thought", "THINK", "Think", "seed:think")
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"

# texts without a mark; reasoning need not be well-formed, so they contain all parts of quotes and code
plain = st.text(st.one_of(st.sampled_from("`\"'“”~\n #-x"), st.characters(codec="utf-8", exclude_characters="<>[]|")))
prose = st.text(st.characters(codec="utf-8", exclude_characters="<>[]|`~\"'“”‘’«»„"))
attributes = st.sampled_from(["", " ", ' time="3s"', " a\n b='c'"])


def opening(tag: str, beside: str = "") -> str:
    return f"<{tag}{beside}>"


def closing(tag: str) -> str:
    return f"</{tag}>"


@given(st.text())
def test_a_text_without_marks_comes_back_as_it_is(text: str) -> None:
    assert without_reasoning(text) == text.strip()


@given(
    st.lists(st.one_of(plain, st.sampled_from(["<b>", "</b>", "<", ">", "[", "]", "|", "<|", "|>", "think", "a<b "])))
)
def test_what_only_looks_like_a_mark_comes_back_as_it_is(parts: list[str]) -> None:
    text = "".join(parts)
    if not re.search(r"(?i)<[^<>]*(think|thought|reasoning)", text):
        assert without_reasoning(text) == text.strip()


@given(st.sampled_from(TAGS), attributes, plain, plain)
def test_a_block_at_the_start_goes(tag: str, beside: str, reasoning: str, answer: str) -> None:
    assert without_reasoning(f"\n{opening(tag, beside)}{reasoning}{closing(tag)}{answer}") == answer.strip()


@given(st.sampled_from(TAGS), plain)
def test_of_a_block_that_nothing_closes_nothing_is_left(tag: str, reasoning: str) -> None:
    assert without_reasoning(opening(tag) + reasoning) == ""


@given(st.sampled_from(TAGS), prose, plain)
def test_what_stands_before_a_tag_that_only_closes_goes(tag: str, reasoning: str, answer: str) -> None:
    assert without_reasoning(f"{reasoning}{closing(tag)}{answer}") == answer.strip()
    assert without_reasoning(f"{reasoning}\n{closing(tag)}\n\n{answer}") == answer.strip()


@given(st.lists(st.tuples(prose, prose), min_size=1))
def test_several_blocks_go_and_what_is_between_them_stays(parts: list[tuple[str, str]]) -> None:
    text = "".join(f"<think>{reasoning}</think>{answer}" for reasoning, answer in parts)
    assert without_reasoning(text) == "".join(answer for _, answer in parts).strip()


def nested(depth: int) -> str:
    return f"<think>a{nested(depth - 1)}b</think>" if depth else ""


@given(st.integers(1, 9), prose)
def test_nested_blocks_go_whole(depth: int, answer: str) -> None:
    assert without_reasoning(nested(depth) + answer) == answer.strip()


@given(plain, plain, st.sampled_from(["", "<|end|>", "<|return|>", "<|return|>\n"]))
def test_of_channels_only_the_final_one_is_the_answer(reasoning: str, answer: str, end: str) -> None:
    for before in (
        f"{ANALYSIS}{reasoning}{NEXT}",
        f"<|start|>assistant{ANALYSIS}{reasoning}{NEXT}",
        f"{ANALYSIS}{reasoning}<|end|>{ANALYSIS}{reasoning}{NEXT}",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|><|start|>assistant",
        "",
    ):
        assert without_reasoning(f"{before}{FINAL}{answer}{end}") == answer.strip()


@given(prose, prose)
def test_a_lone_header_of_the_final_channel_ends_the_reasoning(reasoning: str, answer: str) -> None:
    assert without_reasoning(f"{reasoning}{FINAL}{answer}") == answer.strip()
    assert without_reasoning(f"{reasoning}{NEXT}{FINAL}{answer}") == answer.strip()


@given(plain)
def test_without_a_final_channel_nothing_is_left(reasoning: str) -> None:
    assert without_reasoning(f"{ANALYSIS}{reasoning}") == ""
    assert without_reasoning(f"{ANALYSIS}{reasoning}<|end|>") == ""


@pytest.mark.parametrize(
    "mark", ["<think>", "</think>", "<Thinking a='b'>", "[THINK]", "[/THINK]", FINAL, NEXT + FINAL]
)
@pytest.mark.parametrize(
    "around",
    [
        "Write {} first.",
        "Write {}, then {}.",
        "It ends with {}",
        "{} comes first.",
        "So:\n\n```\n{0}\nHm.\n{0}\n```\n\nThat is all.",
        "~~~\n{}\n~~~",
    ],
)
@pytest.mark.parametrize("quoted", ["`{}`", '"{}"', "“{}”", "`x {} y`", '"{}."'])
def test_a_mark_that_is_quoted_or_in_code_is_part_of_the_answer(mark: str, around: str, quoted: str) -> None:
    text = around.format(quoted.format(mark), quoted.format(mark))
    assert without_reasoning(text) == text
    # reasoning before it makes no difference
    assert without_reasoning(f"<think>Hm.</think>{text}") == text


@pytest.mark.parametrize("mark", ["<think>", "</think>", "<think>\nHm.\n</think>", FINAL])
@pytest.mark.parametrize("fence", ["```", "~~~", "  ```"])
def test_a_mark_in_a_block_of_code_is_part_of_the_answer(mark: str, fence: str) -> None:
    text = f"So:\n{fence}\n{mark}\n{fence}\nThat is all."
    assert without_reasoning(text) == text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # a sentence about tags
        ("It wraps them in <think>…</think> tags.", "It wraps them in <think>…</think> tags."),
        ("It begins with <think> then.", "It begins with <think> then."),
        # blocks inside the text
        ("One.\n<think>Hm.</think>\nTwo.", "One.\n\nTwo."),
        ("One.\n  <think>Hm.", "One."),
        ("One. <think>\nHm.\n</think>\nTwo.", "Two."),
        ("<think>a</think>One.<think>b</think> Two.", "One. Two."),
        # reasoning about tags, or with wrong quotes
        ("<think>They ask of `</think>` here.</think>It closes.", "It closes."),
        ("<think>No <think> here.</think>It opens.", "It opens."),
        ("<think>Is it `<think>`?</think>`</think>` closes it.", "`</think>` closes it."),
        ("<think>`</think>`", "`"),
        ("<think>```\n</think>\n```\na\n```", "```\na\n```"),
        ('I say "yes".</think>"Yes."', '"Yes."'),
        ('I say "yes"</think>"Yes" it is.', '"Yes" it is.'),
        # empty tags
        ("<think/>One.", "One."),
        ("<think></think>\n\nOne.", "One."),
        ("</think>One.", "One."),
        ("[THINK]Hm.[/THINK]One.", "One."),
        # two notations at once
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}<think>Hm.</think>One.", "One."),
        (f"{FINAL}It ends with `<|end|>`.<|return|>", "It ends with `<|end|>`."),
        ("One.<|return|>", "One."),
    ],
)
def test_what_a_mark_is_depends_on_where_it_stands(text: str, answer: str) -> None:
    assert without_reasoning(text) == answer
