"""The parameters of every method (§4), as msgspec Structs. Parameters that are not named here are ignored (§2)."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from a2m_router.protocol.wire.records import ConditionalDraft, Draft

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]

# A query is ranked word by word while others wait: it may be as long as a situation that an agent hands over.
Query = Annotated[str, Meta(max_length=16_384)]


class Params(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What all parameter objects are: by name, unknown names ignored."""


class Describe(Params):
    """§4.1"""

    protocol: str | None = None
    owner: str | None = None


# What a router calls a federation, or one of its starts.
_Mark = Annotated[str, Meta(min_length=1, max_length=64)]


class Enrol(Describe):
    """What a2m-store takes beyond §4.1, from a caller on its own pipes: the federation that it belongs to from now on,
    and the start of the router that tells it so. It keeps both before it answers."""

    federation: _Mark | None = None
    epoch: _Mark | None = None


class Remember(Params):
    """§4.2; `owner` and `session` are for records that carry none."""

    records: list[Draft]
    owner: str | None = None
    session: str | None = None


class ConditionalRemember(Params):
    """§4.2, for a server that heeds `if_revision`; every other one ignores it."""

    records: list[ConditionalDraft]
    owner: str | None = None
    session: str | None = None


class Prompt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How recalled records are wanted as text, too (§4.16)."""

    method: str = "template"
    style: str = "auto"
    model: str | None = None
    budget: Count | None = None
    cite: bool = False


class Read(Params):
    """What recall and timeline share."""

    tier: str | None = None
    limit: Count | None = None
    where: dict[str, Raw] | None = None
    owner: str | None = None
    key_prefix: str | None = None
    embeddings: bool = False


class Recall(Read):
    """§4.3"""

    query: Query | None = None
    min_score: float | None = None
    embedding: list[float] | None = None


class Timeline(Read):
    """§4.4"""


class Pages(Timeline):
    """§4.4, with an extension of ours: `after` and `page` walk all there is, page by page, in the order of writing."""

    after: str | None = None
    page: Count | None = None

    @property
    def walks(self) -> bool:
        """Whether it is asked for a page, rather than for a timeline."""
        return self.page is not None or self.after is not None


class PromptedRecall(Recall):
    """§4.3 with §4.16, for a server that renders; no other knows the parameter. True is a Prompt of defaults."""

    prompt: Prompt | bool | None = None


class PromptedPages(Pages):
    """§4.4 with §4.16"""

    prompt: Prompt | bool | None = None


class Selector(Params):
    """What names records: all that is given must hold."""

    ids: list[str] | None = None
    query: Query | None = None
    tier: str | None = None
    where: dict[str, Raw] | None = None
    owner: str | None = None
    key_prefix: str | None = None


class Forget(Selector):
    """§4.5"""


class Summarize(Selector):
    """§4.15; `into` is the tier that the summary goes to, `key` its address."""

    limit: Count | None = None
    into: str | None = None
    key: str | None = None


class Promote(Params):
    """§4.6"""

    ids: list[str]
    tier: str
    salience: float | None = None
    owner: str | None = None


class Consolidate(Params):
    """§4.7"""

    owner: str | None = None


class Reinforce(Params):
    """§4.8"""

    ids: list[str]
    amount: float = 1.0
    owner: str | None = None


class Fetch(Params):
    """§4.9"""

    key: str
    owner: str | None = None
    embeddings: bool = False


class SessionList(Params):
    """§4.10"""

    owner: str | None = None


class SessionClose(Params):
    """§4.11"""

    session: str
    owner: str | None = None


class Events(Params):
    """§4.12"""

    cursor: str | None = None
    limit: Count | None = None
    kinds: list[str] | None = None
    owner: str | None = None


class Subscribe(Params):
    """§4.13"""

    kinds: list[str] | None = None
    owner: str | None = None


class Unsubscribe(Params):
    """§4.14"""


class Backup(Params):
    """`store/backup`, an extension of ours, which `describe` announces under `store`. `path` begins a backup there;
    `backup` asks how one is getting on, or with `cancel` calls it off; without either it says what would be backed up.
    """

    path: str | None = None
    backup: str | None = None
    cancel: bool = False
