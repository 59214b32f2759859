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
    _s(
        "2-a",
        "",
        "a server implements all of core, declares exactly its other capabilities, and uses the specified error codes",
    ),
    _s("2-1", "MUST NOT", "a server declares only capabilities that it implements completely"),
    _s("2-2", "MUST", "a method of a capability that is not declared answers -32003"),
    _s("2-3", "MUST NOT", "and never -32601"),
    _s("2-4", "MUST", "describe is called before anything else", CLIENT),
    _s("2-5", "MUST NOT", "no method of an undeclared capability is called", CLIENT),
    _s("2-6", "MUST", "unknown record fields are tolerated", CLIENT),
    _s("2-7", "MUST NOT", "a request with unknown parameters is not rejected"),
    _s("2-8", "MUST", "unknown parameters are ignored"),
    # --- 2.1 Read-only servers
    _s("2.1-1", "MAY", "a server may reject all writes", PERMISSION),
    _s("2.1-2", "MUST", "a read-only server answers READ_ONLY to remember and to forget"),
    _s("2.1-3", "MUST", "describe, recall and timeline work on a read-only server as on any other"),
    _s("2.1-4", "MUST", "READ_ONLY is tolerated from either method", CLIENT),
    _s("2.1-5", "MUST", "writes are rejected consistently"),
    _s("2.1-6", "MUST NOT", "a server does not accept some writes and answer READ_ONLY to others"),
    # --- 3.1 Record
    _s("3.1-a", "", "a record has id, content and created_at, and each field has its type"),
    _s("3.1-b", "", "content, role and group come back as they were written"),
    _s("3.1-1", "MUST", "metadata comes back with the same structure"),
    _s("3.1-2", "MUST NOT", "metadata that cannot be stored is not dropped silently"),
    _s("3.1-3", "MUST", "a write whose metadata cannot be stored fails with INVALID_PARAMS"),
    # --- 3.2 Identifiers
    _s("3.2-1", "MUST NOT", "a client does not interpret ids", CLIENT),
    _s("3.2-2", "MAY", "a client may choose the id"),
    _s("3.2-3", "MUST", "a write with a chosen id can be repeated"),
    _s("3.2-4", "MUST NOT", "the repetition does not create a second record"),
    _s("3.2-5", "MUST", "the repetition returns the existing id"),
    _s("3.2-6", "MUST", "without a chosen id, the server assigns one that is unique in the store"),
    # --- 3.3 Timestamps
    _s("3.3-a", "", "timestamps are RFC 3339 strings in UTC, with Z and milliseconds, never numbers"),
    # --- 3.4 Groups
    _s("3.4-1", "MUST", "the records of a group are kept or discarded together"),
    _s("3.4-2", "SHOULD", "the chunks of a document share a group", CALLER),
    _s("3.4-3", "MUST NOT", "with tiers, a group moves only as a whole"),
    _s("3.4-4", "MAY", "a server that never evicts may ignore groups", PERMISSION),
    # --- 3.5 Sessions
    _s("3.5-1", "MUST", "remember accepts session, and records return it"),
    _s("3.5-2", "SHOULD", "the capacity of a per_session tier applies to each session separately"),
    _s("3.5-3", "MUST", "timeline supports where"),
    _s("3.5-4", "MAY", "a record may have no session"),
    _s("3.5-5", "MUST NOT", "records without a session do not belong to a named session"),
    # --- 3.6 Keys
    _s("3.6-1", "MUST", "a write to an occupied key replaces the record: same id, new content, revision one higher"),
    _s("3.6-2", "MUST", "a key is unique per owner, so two owners may have the same"),
    _s("3.6-3", "MUST", "recall, timeline and forget accept key_prefix: that key and all keys below it"),
    _s("3.6-a", "", "replaced content can no longer be recalled"),
    # --- 3.7 Embeddings
    _s("3.7-1", "MUST", "a vector is stored exactly as given"),
    _s("3.7-2", "MUST NOT", "the server does not generate a vector for a record that has one"),
    _s("3.7-3", "MUST NOT", "the server does not replace a given vector"),
    _s("3.7-4", "MUST", "describe has an embeddings object with dimensions and metric"),
    _s("3.7-5", "SHOULD", "describe lists the metrics that the storage supports"),
    _s("3.7-6", "SHOULD", "a server of several stores reports only the metrics that all of them support", UNSEEN),
    _s("3.7-7", "SHOULD", "a caller with its own vectors reads the metric first", CLIENT),
    _s("3.7-8", "MUST", "a vector of another width is rejected with EMBEDDING_MISMATCH"),
    _s("3.7-9", "MAY", "vectors may be generated for records without one", PERMISSION),
    _s("3.7-a", "", "vectors come back if and only if embeddings is true"),
    _s("3.7-b", "", "a vector can be a query, and finds near records"),
    # --- 3.8 External records
    _s("3.8-1", "MAY", "a record may refer to external content by uri and media_type"),
    _s("3.8-a", "", "a record with a uri and no content is valid, and can be found by its key or metadata"),
    _s("3.8.1-a", "", "a record may be found by its vector alone, with empty content"),
    _s("3.8.1-1", "MUST", "uri and media_type come back unchanged"),
    _s("3.8.1-2", "MUST NOT", "the uri is never fetched"),
    # --- 4 Methods
    _s("4-1", "MAY", "an endpoint may serve other protocols' methods too", PERMISSION),
    _s("4-2", "MUST", "parameters are accepted by name"),
    _s("4-3", "MAY", "parameters may be accepted by position", PERMISSION),
    # --- 4.1 describe
    _s("4.1-a", "", "while the major version is 0 the protocol is exactly a2m/0.1"),
    _s("4.1-b", "", "the result has protocol, name, capabilities and methods"),
    _s("4.1-1", "MUST", "describe comes first", CLIENT),
    _s("4.1-2", "MAY", "limits may be declared, as integers"),
    _s("4.1-3", "SHOULD", "declared limits are respected", CLIENT),
    _s("4.1-4", "MUST", "declared limits are enforced, with INVALID_PARAMS or QUOTA_EXCEEDED"),
    _s("4.1-5", "MAY", "an unsupported version may be rejected with PROTOCOL_NOT_SUPPORTED"),
    _s("4.1-6", "MUST NOT", "the server does not claim another version than its own"),
    # --- 4.2 remember
    _s("4.2-a", "", "ids has one id for each record, in order"),
    _s("4.2-1", "MAY", "an entry may carry id, role, metadata, group, tier, salience, owner"),
    _s("4.2-2", "MUST", "fields of capabilities that are not declared are ignored"),
    _s("4.2-3", "MUST", "tier without the capability tiers fails with CAPABILITY_NOT_SUPPORTED"),
    _s("4.2-4", "SHOULD", "a batch is written as a whole or not at all"),
    _s("4.2-5", "MUST", "a server that may write a batch in part documents it", DOCUMENT),
    _s("4.2-6", "MUST NOT", "ids is never partial"),
    # --- 4.3 recall
    _s("4.3-a", "", "records come back by relevance to the query"),
    _s("4.3-b", "", "no more than limit come back"),
    _s("4.3-c", "", "tier restricts the search, where tiers is declared"),
    _s("4.3-1", "MUST", "an absent or empty query is not an error, and the answer has some order"),
    _s("4.3-2", "RECOMMENDED", "recency is a good order then", "any order the server finds useful is right"),
    _s("4.3-3", "MUST", "limit 0 means no limit only if max_recall_limit is not declared"),
    _s("4.3-4", "SHOULD NOT", "a client does not rely on unlimited answers", CLIENT),
    # --- 4.4 timeline
    _s("4.4-1", "MUST", "with sessions, where is supported on timeline"),
    _s("4.4-2", "SHOULD", "without sessions, where is supported on timeline, too"),
    _s("4.4-3", "MUST", "records are in ascending order of created_at"),
    _s("4.4-4", "MUST", "limit takes the newest, still ascending"),
    _s("4.4-5", "MUST NOT", "timeline does not rank, and recall does not sort by time"),
    # --- 4.5 forget
    _s("4.5-a", "", "forgotten counts the removed records, which can no longer be read"),
    _s("4.5-1", "MUST", "without any selector forget is INVALID_PARAMS"),
    _s("4.5-2", "MUST", "an empty request deletes nothing"),
    # --- 4.6 promote
    _s("4.6-a", "", "promoted counts the records that moved"),
    _s("4.6-1", "REQUIRED", "ids is required"),
    _s("4.6-2", "REQUIRED", "tier is required"),
    _s("4.6-3", "OPTIONAL", "salience may be given; it is added to the record's when it moves"),
    _s("4.6-4", "MUST", "an unknown tier is UNKNOWN_TIER"),
    _s("4.6-5", "MUST NOT", "ids that are unknown, or already in the tier, are not an error and not counted"),
    # --- 4.7 consolidate
    _s("4.7-a", "", "the result counts the moved, promoted, dropped and summarized records, and those in each tier"),
    _s("4.7-1", "MAY", "consolidation may delete", PERMISSION),
    _s("4.7-2", "MUST NOT", "a client does not assume that a record still exists after it", CLIENT),
    _s("4.7-3", "REQUIRED", "a tier in describe has its name"),
    _s("4.7-4", "REQUIRED", "a tier in describe has its count"),
    _s("4.7-5", "SHOULD", "a kind is one of the four"),
    _s("4.7-6", "MAY", "tiers may be named anything", PERMISSION),
    # --- 4.8 reinforce
    _s("4.8-a", "", "reinforced counts the records whose salience rose"),
    _s("4.8-1", "REQUIRED", "ids is required"),
    _s("4.8-2", "OPTIONAL", "amount may be given"),
    # --- 4.9 fetch
    _s("4.9-a", "", "record is the one at the key, or null, which is not an error"),
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
    _s("4.11-4", "SHOULD", "the conversation's records leave the working tier at once"),
    _s("4.11-5", "MUST NOT", "closing does not destroy the conversation"),
    _s("4.11-6", "MUST NOT", "a session that does not exist is not an error"),
    # --- 4.12 events
    _s("4.12-a", "", "a poll without a cursor begins now, and every reply has events and a cursor"),
    _s("4.12-b", "", "a write is one event for each record, with the fields that apply to it"),
    _s(
        "4.12-c",
        "",
        "a forget, a promotion, a consolidation and the end of a session are one event each, for any number of records",
    ),
    _s("4.12-d", "", "kinds and limit select events, and more is true if there are others"),
    _s("4.12-1", "MUST", "successive polls return every retained event once, in order, without gaps"),
    _s("4.12-2", "MAY", "the log may be bounded", PERMISSION),
    _s("4.12-3", "MUST", "a cursor older than the log returns reset and continues with the oldest retained event"),
    _s("4.12-4", "SHOULD", "after reset, a client reads its state again", CLIENT),
    _s("4.12-5", "MAY", "an unknown cursor may be INVALID_PARAMS"),
    _s("4.12-6", "MUST", "with scopes, an event reaches only callers that could recall its record"),
    # --- 4.13 subscribe
    _s("4.13-a", "", "each event comes as one memory/event notification, without an id, under the same rules"),
    _s("4.13-b", "", "unsubscribing ends it"),
    _s("4.13-c", "", "pushed events can be polled, too"),
    _s("4.13-1", "MUST", "describe has an events object with push"),
    _s("4.13-2", "MUST NOT", "push is not true if the transport cannot push"),
    _s("4.13-3", "MUST", "if the transport cannot push, subscribe is CAPABILITY_NOT_SUPPORTED"),
    _s("4.13-4", "OPTIONAL, OPTIONAL", "kinds and owner may be given"),
    _s("4.13-5", "MUST NOT", "nothing is pushed without a subscription"),
    # --- 4.14 unsubscribe
    _s("4.14-1", "MUST NOT", "unsubscribing without a subscription is not an error"),
    # --- 4.15 summarize
    _s("4.15-a", "", "a summary is ordinary records, returned and counted, and can be recalled and forgotten"),
    _s("4.15-b", "", "into selects the tier of the summary; with key, it replaces the record there"),
    _s("4.15-1", "REQUIRED", "a selector is required"),
    _s("4.15-2", "MUST", "without one it is INVALID_PARAMS"),
    _s("4.15-3", "MUST NOT", "an empty request summarizes nothing"),
    _s("4.15-4", "MUST NOT", "the sources are not deleted"),
    _s("4.15-5", "MAY", "consolidation, in contrast, may delete", PERMISSION),
    _s("4.15-6", "MAY", "the server may decline, which is not an error"),
    _s("4.15-7", "MUST NOT", "a server that cannot summarize, or not yet, does not declare it"),
    _s("4.15-8", "MUST", "describe has a summarize object with model"),
    _s("4.15-9", "MUST", "a read-only server answers READ_ONLY"),
    _s("4.15-10", "SHOULD", "a server that would take too long reads less", UNSEEN),
    # --- 4.16 prompt
    _s("4.16-a", "", "prompt and prompt_ids are present if and only if they were requested"),
    _s("4.16-b", "", "the records are still returned in full"),
    _s("4.16-1", "MUST", "the default is template"),
    _s("4.16-2", "MUST NOT", "prompt: true calls no model", "whether a model was called " + UNSEEN),
    _s("4.16-3", "MUST", "a method or model that is not offered is INVALID_PARAMS"),
    _s("4.16-4", "MUST NOT", "the server does not use another one instead"),
    _s("4.16-5", "MUST", "the records and their order are the same with and without prompt"),
    _s("4.16-6", "MUST NOT", "a request for text does not change which records are recalled"),
    _s("4.16-7", "MUST", "a budget drops whole records"),
    _s("4.16-8", "MUST", "a server without the capability ignores the parameter"),
    _s("4.16-9", "MUST", "describe has a prompt object with styles and methods"),
    _s("4.16-10", "SHOULD", "the prompt object names the model of method model"),
    # --- 5 Ranking
    _s("5.2-1", "MAY", "where may be richer", PERMISSION),
    _s(
        "5.2-2",
        "MUST",
        "where tests equality on fields, then on metadata; all conditions must hold; an array matches any of its items",
    ),
    _s("5.3-1", "MUST NOT", "scores are not compared between servers or calls", CLIENT),
    _s("5.3-2", "SHOULD", "scores are in [0, 1]"),
    _s("5.3-3", "MUST", "scores descend within an answer"),
    _s("5.3-4", "SHOULD", "a client uses min_score only after calibrating it", CLIENT),
    # --- 6 Identity and scoping
    _s("6-a", "", "with scopes, an agent cannot see, fetch or delete another owner's records"),
    _s("6-1", "MAY", "a local server may trust the owner that a client names"),
    _s("6-2", "MUST NOT", "a server on the network does not trust it"),
    _s("6-3", "MUST", "on the network, the scope is the authenticated caller's"),
    _s("6-4", "MUST", "on the network, another owner in a call is ignored, or SCOPE_DENIED"),
    _s("6-5", "MUST NOT", "over a network without authentication, scopes is not declared"),
    _s("6-6", "MUST", "a server documents which of these rules it follows", DOCUMENT),
    _s("6.1-a", "", "guidance: a missing or wrong credential is 401, before any JSON-RPC"),
    _s("6.1-1", "MUST", "refers to the rule about origins", "refers to §8.3.1, where it is tested"),
    # --- 7 Errors
    _s("7-a", "", "errors are JSON-RPC error objects with an integer code and a message"),
    _s(
        "7-b",
        "",
        "invalid JSON is -32700, an invalid request -32600, an unknown method -32601, wrong parameters -32602",
    ),
    _s("7-1", "MUST NOT", "messages are not parsed", CLIENT),
    _s("7-2", "MAY", "data may have details", PERMISSION),
    # --- 8 Transports
    _s("8-a", "", "every request is answered once, as JSON-RPC 2.0, with its own id"),
    _s("8-1", "MUST", "an array is rejected with -32600"),
    _s("8-2", "MUST NOT", "the server sends no requests"),
    _s("8.1-1", "SHOULD", "in process, messages go through JSON, too", IN_PROCESS),
    _s("8.1-2", "SHOULD", "in process, notifications go to a callback", IN_PROCESS),
    _s("8.2-a", "", "one JSON value per line, in UTF-8"),
    _s("8.2-1", "MUST NOT", "a message contains no unescaped newline"),
    _s("8.2-2", "MUST NOT", "nothing but JSON-RPC is on stdout"),
    _s("8.2-3", "MUST", "logs go to stderr"),
    _s("8.2-4", "MUST", "notifications between a request and its response are tolerated", CLIENT),
    _s("8.2-5", "MUST", "the end of stdin ends the server cleanly"),
    _s("8.2-6", "SHOULD", "the server exits at the end of stdin"),
    _s("8.2-7", "SHOULD", "other byte streams use the same framing", "concerns bindings that are not defined here"),
    _s("8.3-1", "MUST", "an array is rejected with -32600"),
    _s("8.3-2", "MUST", "a request gets status 200 and the response as application/json"),
    _s("8.3-3", "MUST", "a notification gets status 202 and no body"),
    _s("8.3-4", "MUST NOT", "protocol errors have status 200, not HTTP's error statuses"),
    _s("8.3-5", "SHOULD", "GET on the endpoint is 405"),
    _s("8.3-6", "MUST", "callers are authenticated before scopes is declared"),
    _s("8.3-7", "MUST NOT", "push is not true over HTTP"),
    _s("8.3-8", "MUST", "subscribe is CAPABILITY_NOT_SUPPORTED over HTTP"),
    _s("8.3.1-a", "", "a request without Origin is unaffected"),
    _s("8.3.1-1", "MUST", "the server checks Origin"),
    _s("8.3.1-2", "MUST", "an origin that is not permitted is 403"),
    _s("8.3.1-3", "SHOULD", "a local server listens on loopback", "which addresses are bound " + UNSEEN),
    _s("8.3.1-4", "SHOULD", "a local server permits no origin by default"),
    _s("8.3.2-1", "SHOULD", "the version header is sent", CLIENT),
    _s("8.3.2-2", "MUST", "an unsupported version gets status 400 and -32007"),
    _s("8.3.2-3", "MUST NOT", "an absent version header is not an error"),
    _s("8.3.3-1", "SHOULD", "the description is at /.well-known/a2m-server.json"),
    _s("8.3.3-2", "MAY", "it may be stale", PERMISSION),
    # --- 9 Versioning
    _s("9-1", "MAY", "before 1.0 a minor version may break", "concerns future versions"),
    _s("9-2", "SHOULD", "extensions come as capabilities", "concerns future versions"),
)

# How often each key word occurs in each section of the specification; a test compares it, to find missing sentences.
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
