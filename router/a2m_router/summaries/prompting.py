"""The `prompt` parameter of recall and timeline (§4.16): a text beside the records, which stay unchanged."""

from collections.abc import Sequence
from typing import Final, Literal, cast

import msgspec

from a2m_router.protocol.wire.errors import invalid_params
from a2m_router.protocol.wire.method_params import Prompt
from a2m_router.protocol.wire.records import Record
from a2m_router.summaries.model import Model, ModelFailed
from a2m_router.summaries.rendering import STYLES, Rendered, Style, prompt_instructions, render
from a2m_router.summaries.summarizing import model_failed

# `none` asks for no text, like `prompt: false`
_METHODS: Final = ("template", "none")


class PromptEntry(msgspec.Struct, omit_defaults=True):
    """The `prompt` object of describe: the styles and methods on offer, and the model, if there is one."""

    styles: list[str]
    methods: list[str]
    model: str | None = None


class Prompting:
    """Writes the texts of prompts.

    Args:
        model: writes the text for method `model`; None if there is no model.
        max_input: the most characters that the model gets.
    """

    def __init__(self, model: Model | None, max_input: int) -> None:
        self._model = model
        self._max_input = max_input
        self._methods = [*_METHODS, "model"] if model is not None else list(_METHODS)

    def describe(self) -> PromptEntry:
        """Return the `prompt` object of describe."""
        return PromptEntry(list(STYLES), self._methods, None if self._model is None else self._model.name)

    def asked(self, prompt: Prompt | bool | None) -> Prompt | None:
        """Return the prompt that the caller requests; None for no text. A request is never replaced by another one.

        Raises:
            A2MError: INVALID_PARAMS for a method, a style or a model that is not offered.
        """
        if prompt is None or prompt is False:
            return None
        if prompt is True:
            return Prompt()
        for name, value, offered in (("method", prompt.method, self._methods), ("style", prompt.style, STYLES)):
            if value not in offered:
                raise invalid_params(
                    f"prompt.{name}", f"{value!r} is not offered; expected one of {', '.join(offered)}"
                )
        if prompt.model is not None and (self._model is None or prompt.model != self._model.name):
            offer = "no model is" if self._model is None else f"{self._model.name!r} is"
            raise invalid_params("prompt.model", f"{prompt.model!r} is not offered; {offer}")
        return None if prompt.method == "none" else prompt

    async def rendered(self, records: Sequence[Record], prompt: Prompt, keep: Literal["first", "last"]) -> Rendered:
        """Return the text, and the ids of the records in it. With method `model`, these are the records it was sent.

        Args:
            keep: the end of `records` with the most valuable records.

        Raises:
            A2MError: INTERNAL_ERROR if the model returned no text, or a text longer than the budget.
        """
        style = cast(Style, prompt.style)  # `asked` has checked it
        if prompt.method != "model" or self._model is None:
            return render(records, style=style, budget=prompt.budget, cite=prompt.cite, keep=keep)
        given = render(records, style=style, budget=self._max_input, cite=prompt.cite, keep=keep)
        if not given.ids:
            return given
        try:
            text = await self._model.write(prompt_instructions(style, prompt.budget), given.text)
            if prompt.budget is not None and len(text) > prompt.budget:
                raise ModelFailed(
                    f"the model {self._model.name!r} wrote {len(text):,} characters where the budget is "
                    f"{prompt.budget:,}, and texts are not truncated; raise the budget, or use method template"
                )
        except ModelFailed as failure:
            raise model_failed(
                "no text was written; without method model this call returns the records", failure
            ) from None
        return Rendered(text, given.ids)
