"""Every normative sentence of the specification, in our own words, and the reason if no check tests it.

There is one entry for each key word in its section (one for a whole parameter list). An id that ends in a letter is a
rule without a key word. The checks name the sentences that they test (`checking.check`); every other sentence has a
reason here.
"""

from typing import Final, NamedTuple


class Sentence(NamedTuple):
    """One requirement. `words` are the key words that it covers; `untested` is why no check tests it."""

    id: str
    words: tuple[str, ...]
    says: str
    untested: str = ""

    @property
    def section(self) -> str:
        return self.id.rpartition("-")[0]


CLIENT: Final = "binds clients, not servers"
CALLER: Final = "binds those who write records"
PERMISSION: Final = "a permission: with or without it a server conforms"
DOCUMENT: Final = "asks for documentation"
UNSEEN: Final = "cannot be observed from outside"
IN_PROCESS: Final = "the in-process binding belongs to one language; this suite speaks over stdio and HTTP"

KEY_WORDS: Final = (
    *("MUST NOT", "MUST", "SHALL NOT", "SHALL", "SHOULD NOT", "SHOULD"),
    *("REQUIRED", "RECOMMENDED", "MAY", "OPTIONAL"),
)


def _sentence(id: str, words: str, says: str, untested: str = "") -> Sentence:
    return Sentence(id, tuple(words.split(", ")) if words else (), says, untested)


_s = _sentence

SENTENCES: Final[tuple[Sentence, ...]] = (
    # --- before the first section
    _s(
        "0-1",
        "MUST, MUST NOT, REQUIRED, SHALL, SHALL NOT, SHOULD, SHOULD NOT, RECOMMENDED, MAY, OPTIONAL",
        "how the key words are to be read",
        "names the key words and demands nothing",
    ),
    # --- 2 Conformance
    _s("2-a", "", "a server has all of core, says truly what else it has, and gives the error codes where they belong"),
    _s("2-1", "MUST NOT", "no capability is declared that is not there in full"),
    _s("2-2", "MUST", "a method of a capability that is not declared answers -32003"),
    _s("2-3", "MUST NOT", "and never -32601"),
    _s("2-4", "MUST", "describe is called before anything else", CLIENT),
    _s("2-5", "MUST NOT", "no method of an undeclared capability is called", CLIENT),
    _s("2-6", "MUST", "unknown record fields are tolerated", CLIENT),
    _s("2-7", "MUST NOT", "a request is not refused for parameters that are unknown"),
    _s("2-8", "MUST", "unknown parameters are ignored"),
    # --- 2.1 Read-only servers
    _s("2.1-1", "MAY", "a server may take no writes", PERMISSION),
    _s("2.1-2", "MUST", "a read-only server answers READ_ONLY to remember and to forget"),
    _s("2.1-3", "MUST", "describe, recall and timeline work on it as on any other"),
    _s("2.1-4", "MUST", "READ_ONLY is tolerated from either method", CLIENT),
    _s("2.1-5", "MUST", "writes are refused consistently"),
    _s("2.1-6", "MUST NOT", "it is not so that some writes are taken and others are READ_ONLY"),
    # --- 3.1 Record
    _s("3.1-a", "", "a record has id, content and created_at, and each field has its type"),
    _s("3.1-b", "", "content, role and group come back as they were written"),
    _s("3.1-1", "MUST", "metadata comes back with the same structure"),
    _s("3.1-2", "MUST NOT", "metadata that cannot be kept is not dropped silently"),
    _s("3.1-3", "MUST", "a write whose metadata cannot be kept fails with INVALID_PARAMS"),
    # --- 3.2 Identifiers
    _s("3.2-1", "MUST NOT", "ids are not taken apart", CLIENT),
    _s("3.2-2", "MAY", "a client may choose the id"),
    _s("3.2-3", "MUST", "a write with a chosen id can be repeated"),
    _s("3.2-4", "MUST NOT", "the repetition makes no second record"),
    _s("3.2-5", "MUST", "the repetition returns the id that is there"),
    _s("3.2-6", "MUST", "without a chosen id the server assigns one that nothing else in the store has"),
    # --- 3.3 Timestamps
    _s("3.3-a", "", "timestamps are RFC 3339 strings in UTC, with Z and milliseconds, never numbers"),
    # --- 3.4 Groups
    _s("3.4-1", "MUST", "the records of a group are kept or discarded together"),
    _s("3.4-2", "SHOULD", "the chunks of a document share a group", CALLER),
    _s("3.4-3", "MUST NOT", "with tiers, no part of a group moves without the rest"),
    _s("3.4-4", "MAY", "a server that never evicts may ignore groups", PERMISSION),
    # --- 3.5 Sessions
    _s("3.5-1", "MUST", "session is taken on remember and comes back on records"),
    _s("3.5-2", "SHOULD", "the capacity of a per_session tier is each session's own"),
    _s("3.5-3", "MUST", "timeline supports where"),
    _s("3.5-4", "MAY", "a record may be without a session"),
    _s("3.5-5", "MUST NOT", "records without a session belong to no named one"),
    # --- 3.6 Keys
    _s("3.6-1", "MUST", "a write to an occupied key replaces: same id, new content, revision one higher"),
    _s("3.6-2", "MUST", "a key is unique per owner, so two owners may have the same"),
    _s("3.6-3", "MUST", "recall, timeline and forget take key_prefix, which means that key and all beneath it"),
    _s("3.6-a", "", "what was replaced is no longer there to be recalled"),
    # --- 3.7 Embeddings
    _s("3.7-1", "MUST", "a vector is stored exactly as given"),
    _s("3.7-2", "MUST NOT", "none is generated for a record that has one"),
    _s("3.7-3", "MUST NOT", "one that was given is not replaced"),
    _s("3.7-4", "MUST", "describe has an embeddings object with dimensions and metric"),
    _s("3.7-5", "SHOULD", "describe lists the metrics the storage could be configured for"),
    _s("3.7-6", "SHOULD", "several stores together report only the metrics all of them can do", UNSEEN),
    _s("3.7-7", "SHOULD", "a caller with vectors of its own reads the metric first", CLIENT),
    _s("3.7-8", "MUST", "a vector of another width is refused with EMBEDDING_MISMATCH"),
    _s("3.7-9", "MAY", "vectors may be generated for records without one", PERMISSION),
    _s("3.7-a", "", "vectors come back where embeddings is true, and only there"),
    _s("3.7-b", "", "a vector is a query too, and finds what is near it"),
    # --- 3.8 External records
    _s("3.8-1", "MAY", "a record may point at something by uri and media_type"),
    _s("3.8-a", "", "a record with a uri and no content is legal, and found by its key or metadata"),
    _s("3.8.1-a", "", "a record may be found by its vector alone, with empty content"),
    _s("3.8.1-1", "MUST", "uri and media_type come back unchanged"),
    _s("3.8.1-2", "MUST NOT", "the uri is never fetched"),
    # --- 4 Methods
    _s("4-1", "MAY", "an endpoint may serve other protocols' methods too", PERMISSION),
    _s("4-2", "MUST", "parameters are taken by name"),
    _s("4-3", "MAY", "and perhaps by position", PERMISSION),
    # --- 4.1 describe
    _s("4.1-a", "", "while the major version is 0 the protocol is exactly a2m/0.1"),
    _s("4.1-b", "", "the result has protocol, name, capabilities and methods"),
    _s("4.1-1", "MUST", "describe comes first", CLIENT),
    _s("4.1-2", "MAY", "limits may be declared, as integers"),
    _s("4.1-3", "SHOULD", "declared limits are respected", CLIENT),
    _s("4.1-4", "MUST", "declared limits are enforced, with INVALID_PARAMS or QUOTA_EXCEEDED"),
    _s("4.1-5", "MAY", "a version that cannot be served may be refused with PROTOCOL_NOT_SUPPORTED"),
    _s("4.1-6", "MUST NOT", "no other version is pretended to"),
    # --- 4.2 remember
    _s("4.2-a", "", "ids has one id for each record, in order"),
    _s("4.2-1", "MAY", "an entry may carry id, role, metadata, group, tier, salience, owner"),
    _s("4.2-2", "MUST", "fields of capabilities that are not declared are ignored"),
    _s("4.2-3", "MUST", "but tier without tiers fails with CAPABILITY_NOT_SUPPORTED"),
    _s("4.2-4", "SHOULD", "a batch is written as a whole or not at all"),
    _s("4.2-5", "MUST", "where that is not so, it is documented", DOCUMENT),
    _s("4.2-6", "MUST NOT", "ids is never partial"),
    # --- 4.3 recall
    _s("4.3-a", "", "records come back by relevance to the query"),
    _s("4.3-b", "", "no more than limit come back"),
    _s("4.3-c", "", "tier restricts the search, where tiers is declared"),
    _s("4.3-1", "MUST", "an absent or empty query ranks somehow and is no error"),
    _s("4.3-2", "RECOMMENDED", "recency is a good order then", "any order the server finds useful is right"),
    _s("4.3-3", "MUST", "limit 0 is no limit only where no max_recall_limit is declared"),
    _s("4.3-4", "SHOULD NOT", "nobody relies on unbounded answers", CLIENT),
    # --- 4.4 timeline
    _s("4.4-1", "MUST", "with sessions, where is supported on timeline"),
    _s("4.4-2", "SHOULD", "and without sessions, too"),
    _s("4.4-3", "MUST", "records are in ascending order of created_at"),
    _s("4.4-4", "MUST", "limit takes the newest, still ascending"),
    _s("4.4-5", "MUST NOT", "timeline is not a ranking in disguise, nor recall a timeline"),
    # --- 4.5 forget
    _s("4.5-a", "", "forgotten counts what was removed, and what was removed is gone"),
    _s("4.5-1", "MUST", "without any selector forget is INVALID_PARAMS"),
    _s("4.5-2", "MUST", "an empty request deletes nothing"),
    # --- 4.6 promote
    _s("4.6-a", "", "promoted counts the records that moved"),
    _s("4.6-1", "REQUIRED", "ids is required"),
    _s("4.6-2", "REQUIRED", "tier is required"),
    _s("4.6-3", "OPTIONAL", "salience may say how much is added on arrival"),
    _s("4.6-4", "MUST", "an unknown tier is UNKNOWN_TIER"),
    _s("4.6-5", "MUST NOT", "ids that are unknown or there already are no error and not counted"),
    # --- 4.7 consolidate
    _s("4.7-a", "", "the result counts what was moved, promoted, dropped, summarized, and what each tier holds"),
    _s("4.7-1", "MAY", "consolidation may delete", PERMISSION),
    _s("4.7-2", "MUST NOT", "nothing is assumed to have survived it", CLIENT),
    _s("4.7-3", "REQUIRED", "a tier in describe has its name"),
    _s("4.7-4", "REQUIRED", "a tier in describe has its count"),
    _s("4.7-5", "SHOULD", "a kind is one of the four"),
    _s("4.7-6", "MAY", "tiers may be named anything", PERMISSION),
    # --- 4.8 reinforce
    _s("4.8-a", "", "reinforced counts the records whose salience rose"),
    _s("4.8-1", "REQUIRED", "ids is required"),
    _s("4.8-2", "OPTIONAL", "amount may be given"),
    # --- 4.9 fetch
    _s("4.9-a", "", "record is what is at the key, or null, which is no error"),
    _s("4.9-1", "REQUIRED", "key is required"),
    _s("4.9-2", "OPTIONAL, OPTIONAL", "owner and embeddings may be given"),
    _s("4.9-3", "MUST", "a missing or empty key is INVALID_PARAMS"),
    # --- 4.10 session/list
    _s("4.10-1", "OPTIONAL", "owner may be given"),
    _s("4.10-2", "REQUIRED, REQUIRED", "an entry has its session and how many records it has"),
    # --- 4.11 session/close
    _s("4.11-a", "", "the result is consolidate's with closed and flushed"),
    _s("4.11-b", "", "procedural memory is untouched"),
    _s("4.11-1", "REQUIRED", "session is required"),
    _s("4.11-2", "OPTIONAL", "owner may be given"),
    _s("4.11-3", "MUST", "a missing or empty session is INVALID_PARAMS"),
    _s("4.11-4", "SHOULD", "what was said leaves the working tier at once"),
    _s("4.11-5", "MUST NOT", "closing does not destroy the conversation"),
    _s("4.11-6", "MUST NOT", "a session that does not exist is no error"),
    # --- 4.12 events
    _s("4.12-a", "", "a poll without a cursor begins now, and every reply has events and a cursor"),
    _s("4.12-b", "", "a write is one event for each record, with what applies to it"),
    _s("4.12-c", "", "a forget, a promotion, a consolidation, the end of a session is one event, however many records"),
    _s("4.12-d", "", "kinds and limit choose among the events, and more says that there are others"),
    _s("4.12-1", "MUST", "one poll after the other sees every retained event once, in order, without gaps"),
    _s("4.12-2", "MAY", "the log may be bounded", PERMISSION),
    _s("4.12-3", "MUST", "a cursor from before the log answers reset and goes on from the oldest event kept"),
    _s("4.12-4", "SHOULD", "after a reset state is read again", CLIENT),
    _s("4.12-5", "MAY", "a cursor that was never given out may be INVALID_PARAMS"),
    _s("4.12-6", "MUST", "with scopes, an event reaches only who could recall its record"),
    # --- 4.13 subscribe
    _s("4.13-a", "", "each event comes as one memory/event notification, without an id, under the same rules"),
    _s("4.13-b", "", "unsubscribing ends it"),
    _s("4.13-c", "", "what was pushed can be polled as well"),
    _s("4.13-1", "MUST", "describe has an events object with push"),
    _s("4.13-2", "MUST NOT", "push is not true where the transport cannot"),
    _s("4.13-3", "MUST", "subscribe is CAPABILITY_NOT_SUPPORTED there"),
    _s("4.13-4", "OPTIONAL, OPTIONAL", "kinds and owner may be given"),
    _s("4.13-5", "MUST NOT", "nothing is pushed to who has not subscribed"),
    # --- 4.14 unsubscribe
    _s("4.14-1", "MUST NOT", "unsubscribing without a subscription is no error"),
    # --- 4.15 summarize
    _s("4.15-a", "", "a summary is ordinary records, returned and counted, and can be recalled and forgotten"),
    _s("4.15-b", "", "into says where it is written, and key that it replaces what is there"),
    _s("4.15-1", "REQUIRED", "a selector is required"),
    _s("4.15-2", "MUST", "without one it is INVALID_PARAMS"),
    _s("4.15-3", "MUST NOT", "an empty request summarizes nothing"),
    _s("4.15-4", "MUST NOT", "the sources are not deleted"),
    _s("4.15-5", "MAY", "consolidation, in contrast, may delete", PERMISSION),
    _s("4.15-6", "MAY", "the server may decline, which is no error"),
    _s("4.15-7", "MUST NOT", "it is not declared by a server that cannot, or not yet"),
    _s("4.15-8", "MUST", "describe has a summarize object with model"),
    _s("4.15-9", "MUST", "a read-only server answers READ_ONLY"),
    _s("4.15-10", "SHOULD", "a server that would take too long reads less", UNSEEN),
    # --- 4.16 prompt
    _s("4.16-a", "", "prompt and prompt_ids are there when they were asked for and only then"),
    _s("4.16-b", "", "the records are still returned in full"),
    _s("4.16-1", "MUST", "the default is template"),
    _s("4.16-2", "MUST NOT", "prompt: true calls no model", "whether a model was called " + UNSEEN),
    _s("4.16-3", "MUST", "a method or model that is not offered is INVALID_PARAMS"),
    _s("4.16-4", "MUST NOT", "no other is put in its place"),
    _s("4.16-5", "MUST", "the records and their order are the same with and without"),
    _s("4.16-6", "MUST NOT", "asking for text does not change what is recalled"),
    _s("4.16-7", "MUST", "a budget drops whole records"),
    _s("4.16-8", "MUST", "a server without the capability ignores the parameter"),
    _s("4.16-9", "MUST", "describe has a prompt object with styles and methods"),
    _s("4.16-10", "SHOULD", "and with the model that method model would use"),
    # --- 5 Ranking
    _s("5.2-1", "MAY", "where may be richer", PERMISSION),
    _s("5.2-2", "MUST", "where is equality on fields, then on metadata; all must hold; an array means any of"),
    _s("5.3-1", "MUST NOT", "scores are not compared between servers or calls", CLIENT),
    _s("5.3-2", "SHOULD", "scores are in [0, 1]"),
    _s("5.3-3", "MUST", "scores descend within an answer"),
    _s("5.3-4", "SHOULD", "min_score is left alone by who has not calibrated it", CLIENT),
    # --- 6 Identity and scoping
    _s("6-a", "", "with scopes, an agent does not see, fetch or delete what is another's"),
    _s("6-1", "MAY", "a local server may believe the owner a client names"),
    _s("6-2", "MUST NOT", "a server on the network does not believe it"),
    _s("6-3", "MUST", "there the scope is the authenticated caller's"),
    _s("6-4", "MUST", "another owner in a call is ignored there, or SCOPE_DENIED"),
    _s("6-5", "MUST NOT", "without authentication scopes is not declared over a network"),
    _s("6-6", "MUST", "it is documented which of these applies", DOCUMENT),
    _s("6.1-a", "", "guidance: a missing or wrong credential is 401, before any JSON-RPC"),
    _s("6.1-1", "MUST", "speaks of the rule about origins", "points at §8.3.1, where it is tested"),
    # --- 7 Errors
    _s("7-a", "", "errors are JSON-RPC error objects with an integer code and a message"),
    _s("7-b", "", "malformed JSON is -32700, no request -32600, no method -32601, bad parameters -32602"),
    _s("7-1", "MUST NOT", "messages are not parsed", CLIENT),
    _s("7-2", "MAY", "data may say more", PERMISSION),
    # --- 8 Transports
    _s("8-a", "", "every request is answered once, as JSON-RPC 2.0, with its own id"),
    _s("8-1", "MUST", "an array is refused with -32600"),
    _s("8-2", "MUST NOT", "the server sends no requests"),
    _s("8.1-1", "SHOULD", "in process, too, messages go through JSON", IN_PROCESS),
    _s("8.1-2", "SHOULD", "in process, notifications go to a callback", IN_PROCESS),
    _s("8.2-a", "", "one JSON value per line, in UTF-8"),
    _s("8.2-1", "MUST NOT", "a message holds no bare newline"),
    _s("8.2-2", "MUST NOT", "nothing but JSON-RPC is on stdout"),
    _s("8.2-3", "MUST", "logs go to stderr"),
    _s("8.2-4", "MUST", "notifications between a request and its response are tolerated", CLIENT),
    _s("8.2-5", "MUST", "the end of stdin ends the server cleanly"),
    _s("8.2-6", "SHOULD", "it exits then"),
    _s("8.2-7", "SHOULD", "other byte streams are framed the same", "concerns bindings that are not defined here"),
    _s("8.3-1", "MUST", "an array is refused with -32600"),
    _s("8.3-2", "MUST", "a request is answered 200 with the response as application/json"),
    _s("8.3-3", "MUST", "a notification is answered 202 with nothing"),
    _s("8.3-4", "MUST NOT", "protocol errors are 200, and not HTTP's own codes"),
    _s("8.3-5", "SHOULD", "GET on the endpoint is 405"),
    _s("8.3-6", "MUST", "callers are authenticated before scopes is declared"),
    _s("8.3-7", "MUST NOT", "push is not true over HTTP"),
    _s("8.3-8", "MUST", "subscribe is CAPABILITY_NOT_SUPPORTED over HTTP"),
    _s("8.3.1-a", "", "a request without Origin is unaffected"),
    _s("8.3.1-1", "MUST", "Origin is looked at"),
    _s("8.3.1-2", "MUST", "an origin that is not permitted is 403"),
    _s("8.3.1-3", "SHOULD", "a local server listens on loopback", "which addresses are bound " + UNSEEN),
    _s("8.3.1-4", "SHOULD", "a local server permits no origin by default"),
    _s("8.3.2-1", "SHOULD", "the version header is sent", CLIENT),
    _s("8.3.2-2", "MUST", "a version that is not spoken is 400 with -32007"),
    _s("8.3.2-3", "MUST NOT", "an absent version header is no error"),
    _s("8.3.3-1", "SHOULD", "the description is at /.well-known/a2m-server.json"),
    _s("8.3.3-2", "MAY", "it may be stale", PERMISSION),
    # --- 9 Versioning
    _s("9-1", "MAY", "before 1.0 a minor version may break", "concerns future versions"),
    _s("9-2", "SHOULD", "what is new comes as a capability", "concerns future versions"),
)

# How often each key word stands in each section of the text, which is not here: a sentence that got lost is missed.
COUNTS: Final[dict[str, dict[str, int]]] = {
    "0": dict.fromkeys(KEY_WORDS, 1),
    "2": {"MUST NOT": 4, "MUST": 4},
    "2.1": {"MAY": 1, "MUST": 4, "MUST NOT": 1},
    "3.1": {"MUST": 2, "MUST NOT": 1},
    "3.2": {"MUST NOT": 2, "MAY": 1, "MUST": 3},
    "3.4": {"MUST": 1, "SHOULD": 1, "MUST NOT": 1, "MAY": 1},
    "3.5": {"MUST": 2, "SHOULD": 1, "MAY": 1, "MUST NOT": 1},
    "3.6": {"MUST": 3},
    "3.7": {"MUST": 3, "MUST NOT": 2, "SHOULD": 3, "MAY": 1},
    "3.8": {"MAY": 1},
    "3.8.1": {"MUST": 1, "MUST NOT": 1},
    "4": {"MAY": 2, "MUST": 1},
    "4.1": {"MUST": 2, "MAY": 2, "SHOULD": 1, "MUST NOT": 1},
    "4.2": {"MAY": 1, "MUST": 3, "SHOULD": 1, "MUST NOT": 1},
    "4.3": {"MUST": 2, "RECOMMENDED": 1, "SHOULD NOT": 1},
    "4.4": {"MUST": 3, "SHOULD": 1, "MUST NOT": 1},
    "4.5": {"MUST": 2},
    "4.6": {"REQUIRED": 2, "OPTIONAL": 1, "MUST": 1, "MUST NOT": 1},
    "4.7": {"MAY": 2, "MUST NOT": 1, "REQUIRED": 2, "SHOULD": 1},
    "4.8": {"REQUIRED": 1, "OPTIONAL": 1},
    "4.9": {"REQUIRED": 1, "OPTIONAL": 2, "MUST": 1},
    "4.10": {"OPTIONAL": 1, "REQUIRED": 2},
    "4.11": {"REQUIRED": 1, "OPTIONAL": 1, "MUST": 1, "SHOULD": 1, "MUST NOT": 2},
    "4.12": {"MUST": 3, "MAY": 2, "SHOULD": 1},
    "4.13": {"MUST": 2, "MUST NOT": 2, "OPTIONAL": 2},
    "4.14": {"MUST NOT": 1},
    "4.15": {"REQUIRED": 1, "MUST": 3, "MUST NOT": 3, "MAY": 2, "SHOULD": 1},
    "4.16": {"MUST": 6, "MUST NOT": 3, "SHOULD": 1},
    "5.2": {"MAY": 1, "MUST": 1},
    "5.3": {"MUST NOT": 1, "SHOULD": 2, "MUST": 1},
    "6": {"MAY": 1, "MUST NOT": 2, "MUST": 3},
    "6.1": {"MUST": 1},
    "7": {"MUST NOT": 1, "MAY": 1},
    "8": {"MUST": 1, "MUST NOT": 1},
    "8.1": {"SHOULD": 2},
    "8.2": {"MUST NOT": 2, "MUST": 3, "SHOULD": 2},
    "8.3": {"MUST": 5, "MUST NOT": 2, "SHOULD": 1},
    "8.3.1": {"MUST": 2, "SHOULD": 2},
    "8.3.2": {"SHOULD": 1, "MUST": 1, "MUST NOT": 1},
    "8.3.3": {"SHOULD": 1, "MAY": 1},
    "9": {"MAY": 1, "SHOULD": 1},
}
