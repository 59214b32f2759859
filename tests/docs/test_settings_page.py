"""The page about federation.toml has every setting."""

import re
from typing import Any

import pytest

from a2m_router.config import settings
from tests.support.paths import ROOT

KEYS = re.findall(r"^\| (?:`\[\w+\]` )?`(\w+)` \|", (ROOT / "docs/federation-toml.md").read_text(), re.MULTILINE)
# fields that the file lacks, or has under another name
ELSEWHERE = {
    settings.Settings: {*("path", "serve", "recall", "policy", "limits", "events"), "summarizer", "tiers"}
    | {"token_variables"},
    settings.Serve: {"principals"},
    settings.Policy: {"background"},  # `pass`
    settings.Summarizer: {"token"},  # `token_env`
    settings.Tier: {"name"},
}


@pytest.mark.parametrize(
    "table",
    [
        *(settings.Settings, settings.Serve, settings.Principal, settings.Recall, settings.Policy),
        *(settings.Limits, settings.Events, settings.Summarizer, settings.Tier),
    ],
)
def test_every_setting_has_a_row(table: Any) -> None:
    assert set(table.__struct_fields__) - ELSEWHERE.get(table, set()) - set(KEYS) == set()
