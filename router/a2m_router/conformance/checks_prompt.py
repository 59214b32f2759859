"""Rendered text with the records (§4.16)."""

from typing import Any

from a2m_router.conformance.checking import INVALID_PARAMS, Record, Target, an_object, check, expect, ids_of, shown

_STYLES = {"facts", "transcript", "auto"}
_METHODS = {"template", "model", "none"}


@check("4.16-9", needs="prompt", writes=False)
def describe_says_what_text_can_be_had(target: Target) -> None:
    entry = _entry(target)
    for field, known in (("styles", _STYLES), ("methods", _METHODS)):
        listed = entry.get(field)
        expect(
            isinstance(listed, list) and bool(listed) and set(listed) <= known,
            f"memory/describe with prompt declared: expected {field} of {sorted(known)}, got {shown(entry)}",
        )
    expect("template" in entry["methods"], f"memory/describe: expected template, the default, among {entry['methods']}")


@check("4.16-10", needs="prompt", writes=False)
def describe_says_which_model_writes_text(target: Target) -> None:
    entry = _entry(target)
    if "model" in (entry.get("methods") or ()):
        expect(
            isinstance(entry.get("model"), str),
            f"prompt: method model is offered; expected the model's name, got {shown(entry)}",
        )


@check("4.16-a", needs="prompt")
def text_is_there_when_asked_for_and_only_then(target: Target) -> None:
    notes = target.notes(3)
    ids = target.remember(*notes)
    for method, query in (("recall", {"query": notes[0]["content"]}), ("timeline", {})):
        for params in ({}, {"prompt": False}):
            result = target.ask(method, where=target.mine, limit=10, **query, **params)
            expect(
                "prompt" not in result and "prompt_ids" not in result,
                f"memory/{method} with {params}: expected neither prompt nor prompt_ids, got {shown(sorted(result))}",
            )
        for asked in (True, {}, {"style": "facts"}, {"method": "template"}):
            if isinstance(asked, dict) and asked.get("style") not in (None, *(_entry(target).get("styles") or ())):
                continue
            text, kept = _text(target, method, asked, **query)
            expect(ids[0] in kept, f"memory/{method} with prompt {asked}: no {ids[0]!r} in prompt_ids, {kept}")
            for id, note in zip(ids, notes, strict=True):
                expect(
                    (note["content"] in text) == (id in kept),
                    f"memory/{method} with prompt {asked}: expected {note['content']!r} there if and only if its id "
                    f"is in prompt_ids, {kept}, got {shown(text)}",
                )


@check("4.16-b", "4.16-5", "4.16-6", needs="prompt")
def asking_for_text_does_not_change_what_is_found(target: Target) -> None:
    notes = target.notes(5)
    target.remember_apart(*notes)
    for method, query in (("recall", {"query": notes[2]["content"]}), ("recall", {}), ("timeline", {"limit": 3})):
        without = target.records(method, **{"where": target.mine, "limit": 4, **query})
        for asked in (True, {"budget": 40}):
            found = target.records(method, **{"where": target.mine, "limit": 4, **query}, prompt=asked)
            expect(
                ids_of(found) == ids_of(without),
                f"memory/{method} with prompt {asked}: expected {ids_of(without)} as without, got {ids_of(found)}",
            )
            contents = [record.get("content") for record in found]
            expect(
                contents == [record.get("content") for record in without],
                f"memory/{method} with prompt {asked}: expected the records in full, got {shown(contents)}",
            )


@check("4.16-1", needs="prompt")
def the_default_is_a_template(target: Target) -> None:
    target.remember(*target.notes(2))
    default, _ = _text(target, "timeline", True)
    template, _ = _text(target, "timeline", {"method": "template"})
    expect(
        default == template,
        f"prompt: true: expected the text of method template, {shown(template)}, got {shown(default)}",
    )


@check("4.16-3", "4.16-4", needs="prompt")
def what_is_not_offered_is_refused(target: Target) -> None:
    target.remember(target.note())
    for method in ("recall", "timeline"):
        target.refused(INVALID_PARAMS, method, where=target.mine, prompt={"method": f"no-{target.word()}"})
        if "model" not in (_entry(target).get("methods") or ()):
            target.refused(INVALID_PARAMS, method, where=target.mine, prompt={"method": "model"})
        target.refused(
            INVALID_PARAMS, method, where=target.mine, prompt={"method": "model", "model": f"no-{target.word()}"}
        )


@check("4.16-7", needs="prompt")
def a_budget_drops_whole_records(target: Target) -> None:
    notes = target.notes(6)
    ids = target.remember_apart(*notes)
    contents = dict(zip(ids, (note["content"] for note in notes), strict=True))
    whole, _ = _text(target, "timeline", True)
    for budget in (len(whole), len(whole) * 2 // 3, len(whole) // 3, 12):
        for method in ("timeline", "recall"):
            text, kept = _text(target, method, {"budget": budget})
            expect(len(text) <= budget, f"memory/{method} with a budget of {budget}: got {len(text)} characters")
            for id, content in contents.items():
                if id in kept:
                    expect(
                        content in text,
                        f"a budget of {budget}: {content!r} is in prompt_ids and not whole in {shown(text)}",
                    )
                else:
                    word = max(content.split(), key=len)
                    expect(
                        content[:20] not in text and f" {word} " not in text,
                        f"a budget of {budget}: {content!r} is not in prompt_ids, and some of it is in {shown(text)}",
                    )


@check("4.16-8", unless="prompt")
def an_undeclared_prompt_is_ignored(target: Target) -> None:
    ids = target.remember(target.note())
    for method in ("recall", "timeline"):
        for asked in (True, {"method": "model", "budget": 10}):
            result = target.ask(method, where=target.mine, prompt=asked)
            expect(
                ids_of(result.get("records") or ()) == ids,
                f"memory/{method} with prompt {asked}: expected the records alone",
            )
            expect("prompt" not in result, f"memory/{method}: prompt is not declared, and the result has one")


def _entry(target: Target) -> Record:
    return an_object(target.ask("describe").get("prompt"), "memory/describe with prompt declared: prompt")


def _text(target: Target, method: str, asked: Any, **params: Any) -> tuple[str, list[str]]:
    """Return the text and the ids of its records."""
    result = target.ask(method, **{"where": target.mine, "limit": 20, **params}, prompt=asked)
    text, kept = result.get("prompt"), result.get("prompt_ids")
    expect(
        isinstance(text, str), f"memory/{method} with prompt {asked}: expected a string as prompt, got {shown(text)}"
    )
    expect(
        isinstance(kept, list), f"memory/{method} with prompt {asked}: expected a list as prompt_ids, got {shown(kept)}"
    )
    found = ids_of(result.get("records") or ())
    expect(
        set(kept or ()) <= set(found), f"memory/{method}: expected prompt_ids to be of the records {found}, got {kept}"
    )
    return str(text), list(kept or ())
