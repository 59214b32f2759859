"""Remove a model's reasoning from the text that it wrote. Pure.

Models mark their reasoning in two ways, and endpoints often leave it in the text:

- by tags: `<think>…</think>`, also thinking, thought and reasoning, in any case, with attributes or a prefix, and
  `[THINK]…[/THINK]`;
- by channels: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.

An answer may also mention such marks. The position of a mark decides what it is:

- in code (between backticks, or in a fenced block) or in quotation marks, it is part of the answer;
- an opening tag at the start of a line opens a block. The block is removed, up to the end of the text if nothing closes
  it. Within a line an opening tag opens a block only after earlier reasoning, and only if it is closed; otherwise the
  answer mentions the tag;
- a closing tag without an opening tag ends reasoning that began with the text, unless an opening tag stands before it
  on its line;
- a block ends where as many tags have closed as have opened; if there is no such place, at the first closing tag.
  Within a block every tag counts that does not stand alone between backticks or quotation marks, because reasoning need
  not be well-formed;
- a channel's header counts at the start of the text or of a message, the header of the final channel anywhere. Then
  only the text in the final channel is the answer.

A text without such marks is returned unchanged, without the space around it.
"""

import re
from bisect import bisect_left
from typing import Final

_TAG: Final = re.compile(
    r"<(?i:(?P<closes>/?)(?:[\w-]{1,20}:)?(?:think|thinking|thoughts?|reasoning))(?:\s[^<>]{0,200})?/?>"
    r"|\[(?P<shut>/?)THINK\]"
)
_FENCE: Final = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_INDENT: Final = 3  # spaces; more is code
_NEAR: Final = 300  # characters that are read on each side of a mark
_QUOTES: Final = ("``", '""', "''", "“”", "‘’", "«»", "„“")

_HEADER: Final = re.compile(
    r"(?P<opens>(?:<\|end\|>\s{0,3})?(?:<\|start\|>[^<]{0,200})?)<\|channel\|>\s{0,3}(?P<channel>\w{1,20})[^<]{0,200}"
    r"(?:<\|constrain\|>[^<]{0,40})?<\|message\|>"
)
_MESSAGE_ENDS: Final = re.compile(r"<\|(?:end|return|call|start)\|>")
_LAST: Final = ("<|end|>", "<|return|>")
_FINAL: Final = "final"


def without_reasoning(text: str) -> str:
    """Return the answer, without space around it; empty if the text is all reasoning."""
    return _without_tagged(_of_final_channel(text.strip())).strip()


# --- channels


def _of_final_channel(text: str) -> str:
    """Return the text in the final channel; the whole text if it has no channels."""
    if "<|" not in text:
        return text
    headers = [header for header in _HEADER.finditer(text) if not _is_in_quotes(text, header)]
    if not _is_in_channels(text, headers):
        return text.removesuffix(_LAST[0]).removesuffix(_LAST[1])  # a message without its header
    found = []
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        if header["channel"] == _FINAL:
            end = len(text) if following is None else following.start()
            ends = (each for each in _MESSAGE_ENDS.finditer(text, header.end(), end) if not _is_in_quotes(text, each))
            end = next((each.start() for each in ends), end)
            found.append(text[header.end() : end].strip())
    return "\n\n".join(found)


def _is_in_channels(text: str, headers: list[re.Match[str]]) -> bool:
    code = _Code(text)
    return any(
        (header.start() == 0 or header["opens"] or header["channel"] == _FINAL)
        and not code.fences(0, header.start()) % 2
        and not _is_quoted(text, header)
        for header in headers
    )


# --- tags


def _without_tagged(text: str) -> str:
    tags = list(_TAG.finditer(text))
    if not tags:
        return text
    code = _Code(text)
    ends = _ends(text, tags)
    kept: list[str] = []
    fences = 0  # in what is kept, before `place`
    place = 0
    reasoned = False
    mentioned: int | None = None  # the end of the last opening tag that is part of the answer
    for tag, end in zip(tags, ends, strict=True):
        if tag.start() < place or (fences + code.fences(place, tag.start())) % 2 or _is_quoted(text, tag):
            continue
        if _closes(tag):
            if mentioned is not None and "\n" not in text[mentioned : tag.start()]:
                mentioned = None
                continue
            kept.clear()  # all of it was reasoning
            fences = 0
            place = tag.end()
        elif _begins_line(text, place, tag.start()) or (reasoned and end is not None):
            kept.append(text[place : tag.start()])
            fences += code.fences(place, tag.start())
            place = len(text) if end is None else end
        else:
            mentioned = tag.end()
            continue
        reasoned = True
        mentioned = None
    return "".join([*kept, text[place:]])


def _ends(text: str, tags: list[re.Match[str]]) -> list[int | None]:
    """Return for each tag the end of the block that it would open; None if nothing closes it."""
    ends: list[int | None] = [None] * len(tags)
    quoted = [_is_in_quotes(text, tag) for tag in tags]
    opened: list[int] = []
    for number, tag in enumerate(tags):
        if tag[0].endswith("/>"):
            ends[number] = tag.end()
        elif quoted[number]:
            continue
        elif not _closes(tag):
            opened.append(number)
        elif opened:
            ends[opened.pop()] = tag.end()
    # unbalanced tags: the block ends at the first closing tag, or at one that looks quoted if there is no other
    for trusted in (True, False):
        following: int | None = None
        for number in reversed(range(len(tags))):
            if _closes(tags[number]):
                following = following if trusted and quoted[number] else tags[number].end()
            elif ends[number] is None:
                ends[number] = following
    return ends


def _closes(tag: re.Match[str]) -> bool:
    return bool(tag["closes"] or tag["shut"])


def _begins_line(text: str, since: int, place: int) -> bool:
    """Return whether only an indent stands before `place`, on its line or since the last removed block."""
    line = max(text.rfind("\n", max(since, place - _INDENT - 1), place) + 1, since)
    return place - line <= _INDENT and not text[line:place].strip()


# --- what is quoted


class _Code:
    """The places of the lines in a text that begin or end a block of code."""

    def __init__(self, text: str) -> None:
        self._places = [fence.start() for fence in _FENCE.finditer(text)]

    def fences(self, start: int, end: int) -> int:
        """Return how many such lines are between two places; after an odd number, the text is code."""
        return bisect_left(self._places, end) - bisect_left(self._places, start)


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    """Return whether a mark stands between backticks on its line, or between quotation marks of its own."""
    before, after = _beside(text, mark)
    return (before.count("`") % 2 == 1 and "`" in after) or _is_in_quotes(text, mark)


def _is_in_quotes(text: str, mark: re.Match[str]) -> bool:
    """Return whether a mark stands alone between backticks or quotation marks."""
    before, after = _beside(text, mark)
    around = before[-1:] + after.lstrip(".,;:!?")[:1]
    # between the end of one quotation and the start of the next, a mark is not quoted
    return around in _QUOTES and (around not in ("``", '""') or before.count(around[0]) % 2 == 1)


def _beside(text: str, mark: re.Match[str]) -> tuple[str, str]:
    """Return the text before and after a mark on its line, at most `_NEAR` characters each."""
    before = text[max(mark.start() - _NEAR, 0) : mark.start()].rpartition("\n")[2]
    return before, text[mark.end() : mark.end() + _NEAR].partition("\n")[0]
