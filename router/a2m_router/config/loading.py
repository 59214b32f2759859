"""Reads federation.toml into frozen settings. All rules about what the file may contain are here.

One reading finds every mistake; each is one sentence that begins with its place in the file. Values that may be tokens
(headers, principals, the environment) appear in no sentence and in no repr.
"""

import os
import re
import ssl
import tomllib
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from a2m_router.config.settings import (
    PRIVATE,
    Events,
    Kind,
    Limits,
    Overflow,
    Policy,
    Principal,
    Ranking,
    Recall,
    Serve,
    Settings,
    Summarizer,
    Tier,
)
from a2m_router.config.toml_table import Table, place, quoted, suggestion
from a2m_router.process.paths import expanded
from a2m_router.protocol.server.http_addressing import is_loopback

_LEAST_HEADER = 2**10  # bytes; browsers and most proxies send more than a smaller limit would accept
_MOST_RETAINED = 1_000_000  # events; they are held in memory
_DEFAULT_STATE = "memories/router.db"
_LONGEST_TOKEN = 2**16  # bytes read from a token's file; a device such as /dev/zero would never end
_NOT_FOR_A_MOUNT = (
    "capacity",
    "per_session",
    "overflow",
    "spill_to",
    "promote_to",
    "promote_after",
    "half_life",
    "may_publish",
    "distil",
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN_HEADERS = {  # the router sets these itself: A2M or HTTP framing prescribes their values
    *("accept", "accept-encoding", "content-encoding", "content-length", "content-type", "a2m-protocol-version"),
    *("connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
}
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token, RFC 9110 §5.6.2
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_BEARER = re.compile(r"[\x21-\x7e]+")  # a token that an HTTP header can carry
_LIKE_A_NAME = re.compile(r"_?[A-Z][A-Z0-9]{0,15}(_[A-Z0-9]{1,16})*")  # looks like a variable's name, not like a token
_HOST_NAME = re.compile(r"[^\s:/?#@\[\]*]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s]+")
_BIND = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ConfigError(ValueError):
    """The mistakes in the file: one sentence a line, each naming its place."""


def load(path: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a file.

    Raises:
        ConfigError: the file cannot be read or contains mistakes; the error lists all of them.
    """
    try:
        path = expanded(str(path)).absolute()
    except ValueError as problem:
        raise ConfigError(str(problem)) from None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a file, this is a folder") from None
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        line = problem.object.count(b"\n", 0, problem.start) + 1
        raise ConfigError(f"{path}: line {line} is not valid UTF-8") from None
    return msgspec.structs.replace(parse(text, base=path.parent, environ=environ), path=path)


def parse(text: str, *, base: Path, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a text; its relative paths start at `base`.

    Raises:
        ConfigError: the text contains mistakes; the error lists all of them.
    """
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ConfigError("not valid TOML: nested too deeply") from None
    except ValueError as problem:  # tomllib's own error, or that of int() for a number of thousands of digits
        raise ConfigError(f"not valid TOML: {problem}") from None
    mistakes: list[str] = []
    settings = _settings(Table(content, mistakes), _Surroundings(base.absolute(), environ, set()))
    mistakes += _mistaken_moves(settings.tiers)
    mistakes += mistaken_rights(settings.serve.principals, settings.tiers)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return settings


def host_port(http: str) -> tuple[str, int]:
    """Split an address such as "127.0.0.1:8778" or "[::1]:8778" into host (without brackets) and port.

    Raises:
        ConfigError: the text is not such an address.
    """
    found = _BIND.fullmatch(http)
    if found is None or int(found[2]) > 65535:
        wanted = 'expected host:port with a port from 0 to 65535, such as "127.0.0.1:8778" or "[::1]:8778"'
        raise ConfigError(f"{wanted}, got {quoted(http)}")
    host = found[1]
    if host.startswith("["):
        host = host[1:-1]
        try:
            ip_address(host)
        except ValueError:
            raise ConfigError(f"{quoted(host)} is no IPv6 address") from None
    return host, int(found[2])


def check_bind(http: str, serve: Serve) -> None:
    """Raise ConfigError if other machines could use the address without a token. The sentence names no place."""
    host, _ = host_port(http)
    if not serve.principals and not is_loopback(host):
        raise ConfigError(
            f"{quoted(http)} can be reached from other machines, and no token is required; "
            "add [[serve.principals]], or listen on 127.0.0.1"
        )


class _Surroundings(NamedTuple):
    """The folder and environment that the file refers to, and the token variables found while reading."""

    base: Path
    environ: Mapping[str, str]
    token_variables: set[str]

    def token(self, variable: str, table: Table, key: str) -> str:
        """Return the variable's value. Unset or empty is a mistake: anyone could send an empty token."""
        self.token_variables.add(variable)
        value = self.environ.get(variable, "")
        if not value:
            state = "is empty" if variable in self.environ else "is not set"
            table.note(key, f"the environment variable {_shown(variable)} {state}")
        return value

    def bearer(self, table: Table) -> str:
        """Return the value of the variable that `token_env` names; note a mistake if no header can carry it."""
        variable = table.text("token_env", None)
        token = "" if variable is None else self.token(variable, table, "token_env")
        if variable is not None and token and not _BEARER.fullmatch(token):
            table.note(
                "token_env",
                f"a token must be printable ASCII without spaces and line ends; the one in the environment variable "
                f"{_shown(variable)} is not",
            )
            return ""
        return token


def _shown(variable: str) -> str:
    """Return a variable's name for a sentence, unless it may be the token itself, put in the wrong place."""
    return variable if _LIKE_A_NAME.fullmatch(variable) else "it names (not repeated here, it may be a token)"


def _settings(file: Table, around: _Surroundings) -> Settings:
    name = file.text("name", "federation")
    # without symbolic links: the lock on the state must hold under every name of the file
    state = Path(os.path.realpath(file.path("state", around.base / _DEFAULT_STATE, around.base)))
    at_serve = file.table("serve")
    serve = _serve(at_serve, around)
    recall = _recall(file.table("recall"))
    policy = _policy(file.table("policy"))
    limits = _limits(file.table("limits"))
    events = _events(file.table("events"))
    at_summarizer = file.optional_table("summarizer")
    summarizer = None if at_summarizer is None else _summarizer(at_summarizer, around)
    named = file.table("tiers").named_tables()
    if not named:
        file.note("tiers", "there is no tier; write at least one, such as [tiers.working]")
    tiers = tuple(_tier(name, table, around) for name, table in named)
    file.refuse_the_rest()
    _refuse_a_second_working_tier(tiers, named)
    if serve.max_held < limits.max_message:
        at_serve.note(
            "max_held",
            f"{serve.max_held} bytes are fewer than limits.max_message, which is {limits.max_message}, so a message of "
            "that size could never be read; raise max_held or lower limits.max_message",
        )
    return Settings(
        name=name,
        state=state,
        serve=serve,
        recall=recall,
        policy=policy,
        limits=limits,
        events=events,
        summarizer=summarizer,
        tiers=tiers,
        token_variables=frozenset(around.token_variables),
    )


def _serve(table: Table, around: _Surroundings) -> Serve:
    origins = []
    for position, origin in enumerate(table.texts("origins", ())):
        if not _ORIGIN.fullmatch(origin):
            expected = 'expected scheme://host or scheme://host:port, as in "https://app.example"'
            table.note("origins", f"{expected}, got {quoted(origin)}", item=position)
        origins.append(origin.lower())
    hosts = []
    for position, name in enumerate(table.texts("hosts", ())):
        if not _HOST_NAME.fullmatch(name):
            table.note(
                "hosts", f'expected a name without a port, as in "a2m.example", got {quoted(name)}', item=position
            )
        hosts.append(name.lower().removeprefix("[").removesuffix("]"))
    default = Serve()
    serve = Serve(
        http=table.text("http", None),
        origins=tuple(origins),
        hosts=tuple(hosts),
        principals=_principals(table.tables("principals"), around),
        timeout=table.duration("timeout", default.timeout, example="60s"),
        max_requests=table.integer("max_requests", default.max_requests, least=1),
        max_connections=table.integer("max_connections", default.max_connections, least=1),
        max_held=table.size("max_held", default.max_held),
        max_header=table.size("max_header", default.max_header, least=_LEAST_HEADER),
        idle_timeout=table.duration("idle_timeout", default.idle_timeout, example="30s"),
    )
    table.refuse_the_rest()
    if serve.http is not None:
        try:
            check_bind(serve.http, serve)
        except ConfigError as problem:
            table.note("http", str(problem))
    return serve


def _principals(tables: Sequence[Table], around: _Surroundings) -> tuple[Principal, ...]:
    principals = []
    seen: set[str] = set()
    for table in tables:
        owner = table.text("owner", None)
        if not table.has("owner"):
            table.note_here("owner is missing")
        digest = _token_digest(table, around)
        write = table.texts("write", None)
        admin = table.flag("admin", False)
        table.refuse_the_rest()
        if digest in seen:
            table.note_here("another principal has the same token; each principal needs its own")
        if digest:
            seen.add(digest)
        principals.append(Principal(owner=owner or "", token_sha256=digest, write=write, admin=admin))
    return tuple(principals)


_TOKENS = ("token_sha256", "token_env", "token_file")


def _token_digest(table: Table, around: _Surroundings) -> str:
    """Return the digest of a principal's token; empty after a mistake."""
    digest = table.text("token_sha256", "").lower()
    file = table.path("token_file", None, around.base)
    token = around.bearer(table)
    given = [key for key in _TOKENS if table.has(key)]
    if len(given) != 1:
        table.note_here(f"expected one of token_sha256, token_env and token_file, got {_listed(given) or 'none'}")
    if file is not None:
        token = _token_in(file, table)
    if digest and not _SHA256.fullmatch(digest):
        table.note("token_sha256", "expected the token's SHA-256, which is 64 hexadecimal digits")
        return ""
    return digest or (sha256(token.encode()).hexdigest() if token else "")


def _token_in(path: Path, table: Table) -> str:
    """Return the token from a file, which may hold only the token and a line end; empty after a mistake."""
    try:
        with path.open("rb") as file:
            held = file.read(_LONGEST_TOKEN)
    except OSError as problem:
        table.note("token_file", f"{quoted(str(path))} cannot be read: {problem.strerror}")
        return ""
    token = held.removeprefix(BOM_UTF8).rstrip(b"\r\n").decode("latin-1")
    if not token:
        table.note("token_file", f"{quoted(str(path))} is empty")
    elif not _BEARER.fullmatch(token):
        table.note(
            "token_file",
            f"{quoted(str(path))}: expected one line with the token, which is printable ASCII without spaces",
        )
        return ""
    return token


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def mistaken_rights(principals: Sequence[Principal], tiers: Sequence[Tier]) -> Iterator[str]:
    """Yield a sentence for each mistake in the `write` lists of principals."""
    by_name = {tier.name: tier for tier in tiers}
    shared = [tier.name for tier in tiers if tier.shared and not tier.mount]
    for number, principal in enumerate(principals):
        for position, name in enumerate(principal.write or ()):
            at = f"serve.principals[{number}].write[{position}]"
            if name in (principal.write or ())[:position]:
                yield f"{at}: {quoted(name)} is listed twice; leave one out"
            elif name == PRIVATE:
                continue
            elif name not in by_name:
                yield f"{at}: no tier is called {quoted(name)}" + suggestion(name, [PRIVATE, *shared], "expected")
            elif by_name[name].mount:
                yield f"{at}: {quoted(name)} is a mount, and mounts are read-only"
            elif name not in shared:
                yield (
                    f"{at}: {quoted(name)} is not shared; write {quoted(PRIVATE)} for the principal's own records in "
                    "all tiers that are not shared"
                )


def _recall(table: Table) -> Recall:
    default = Recall()
    recall = Recall(
        fusion=table.choice("fusion", ("rrf",), default.fusion),
        k=table.integer("k", default.k, least=0),
        rankings=table.choices("rankings", get_args(Ranking), default.rankings),
        candidates=table.integer("candidates", default.candidates, least=1),
        limit=table.integer("limit", default.limit, least=1),
        max_limit=table.integer("max_limit", default.max_limit, least=1),
    )
    table.refuse_the_rest()
    if recall.limit > recall.max_limit:
        table.note("limit", f"{recall.limit} is more than max_limit, which is {recall.max_limit}")
    return recall


def _policy(table: Table) -> Policy:
    when: Literal["background", "explicit"] = table.choice("pass", ("background", "explicit"), "background")
    policy = Policy(
        background=when == "background",
        forgotten_for=table.duration("forgotten_for", Policy().forgotten_for, example="30d"),
    )
    table.refuse_the_rest()
    return policy


def _limits(table: Table) -> Limits:
    default = Limits()
    limits = Limits(
        max_records_per_call=table.integer("max_records_per_call", default.max_records_per_call, least=1),
        max_content_length=table.integer("max_content_length", default.max_content_length, least=1),
        max_message=table.size("max_message", default.max_message),
    )
    table.refuse_the_rest()
    return limits


def _events(table: Table) -> Events:
    events = Events(retained=table.integer("retained", Events().retained, least=1, most=_MOST_RETAINED))
    table.refuse_the_rest()
    return events


def _summarizer(table: Table, around: _Surroundings) -> Summarizer:
    url, model = table.text("url", ""), table.text("model", "")
    for key in ("url", "model"):
        if not table.has(key):
            table.note_here(f"{key} is missing")
    summarizer = Summarizer(
        url=url,
        model=model,
        token=around.bearer(table),
        timeout=table.duration("timeout", 60.0, example="60s"),
        max_input=table.integer("max_input", 100_000, least=1),
    )
    table.refuse_the_rest()
    if url:
        _check_endpoint(url, table)
    return summarizer


def _check_endpoint(url: str, table: Table) -> None:
    """Note a mistake unless the text is a base address without secrets: logs and `describe` show it."""
    if not _is_http_url(url) or "?" in url or "#" in url:  # not repeated: it may hold a password
        table.note("url", 'expected a base address such as "http://127.0.0.1:11434/v1"')
    elif "@" in urlsplit(url).netloc:
        table.note(
            "url", "must not hold a user or a password; put a token into an environment variable; token_env names it"
        )
    elif url.rstrip("/").endswith("/chat/completions"):
        table.note("url", "expected the base address; leave out /chat/completions, which is appended")


def _tier(name: str, table: Table, around: _Surroundings) -> Tier:
    if not name or "/" in name or not name.isprintable():  # a mount's records are shown as <tier>/<id>
        table.note_here('a tier\'s name must not be empty, nor contain "/" or control characters')
    if name == PRIVATE:
        table.note_here(
            f"{quoted(PRIVATE)} is reserved: in a principal's `write` it stands for its own records; "
            "choose another name"
        )
    if not table.has("kind"):
        table.note_here(f"kind is missing; expected one of {', '.join(map(quoted, get_args(Kind)))}")
    mount = table.flag("mount", False)
    shared = table.flag("shared", mount)
    tier = Tier(
        name=name,
        kind=table.choice("kind", get_args(Kind), "semantic"),
        command=table.texts("command", None),
        env=_environment(table, around),
        cwd=table.path("cwd", around.base, around.base),
        url=table.text("url", None),
        headers=_headers(table, around),
        ca_file=_ca_file(table, around),
        http2=table.flag("http2", False),
        remote_tier=table.text("remote_tier", None),
        capacity=table.integer("capacity", None, least=0) or None,
        per_session=table.flag("per_session", False),
        spill_to=table.text("spill_to", None),
        distil=table.flag("distil", False),
        overflow=table.choice("overflow", get_args(Overflow), "spill"),
        promote_to=table.text("promote_to", None),
        promote_after=table.integer("promote_after", None, least=1),
        half_life=table.duration("half_life", None, example="5m"),
        required=table.flag("required", False),
        shared=shared or mount,
        may_publish=table.flag("may_publish", False),
        mount=mount,
        weight=table.number("weight", 1.0),
        timeout=table.duration("timeout", 5.0, example="2s"),
        max_calls=table.integer("max_calls", 256, least=1),
    )
    table.refuse_the_rest()
    _check_server(tier, table)
    if tier.weight == 0:
        table.note("weight", "expected more than 0; a small weight, such as 0.01, ranks the tier's records last")
    if mount:
        for key in filter(table.has, _NOT_FOR_A_MOUNT):
            table.note(key, "does not apply to a mount, which is read-only; leave it out")
        if not shared:
            table.note("shared", "a mount is always shared; leave this out")
    else:
        if tier.capacity and not table.has("spill_to") and tier.overflow != "drop":
            table.note("capacity", 'needs a target for spills; add spill_to, or overflow = "drop" to lose the weakest')
        if table.has("spill_to") and tier.overflow == "drop":
            table.note("overflow", '"drop" deletes the records that spill_to would keep; leave one of the two out')
        if tier.distil and tier.overflow == "drop":
            table.note("distil", 'overflow = "drop" deletes the records that distil rewrites; leave one of the two out')
        elif tier.distil and not table.has("spill_to"):
            table.note("distil", "rewrites the records that spill, and needs a target for them; add spill_to")
        if table.has("promote_after") and not table.has("promote_to"):
            table.note("promote_after", "needs a target for promotions; add promote_to")
    return tier


def _check_server(tier: Tier, table: Table) -> None:
    if table.has("command") == table.has("url"):
        table.note_here(f"expected one of command and url, got {_neither_or_both(table, 'url')}")
        return
    for owner, keys in (("command", ("env", "cwd")), ("url", ("headers", "ca_file", "http2"))):
        for key in filter(table.has, keys):
            if not table.has(owner):
                table.note(key, f"is only for a tier with a {owner}")
    if tier.command is not None and not any(tier.command[:1]):
        table.note("command", "must begin with the program to run")
    if tier.url is not None:
        _check_url(tier.url, table)
    for name in filter(lambda name: not name or "=" in name, tier.env):
        table.table("env").note(name, 'a variable\'s name must not be empty, nor contain "="')


def _check_url(url: str, table: Table) -> None:
    if not _is_http_url(url) or "#" in url:  # not repeated: it may hold a password
        table.note("url", 'expected an address such as "http://127.0.0.1:9000/"')
    elif "@" in urlsplit(url).netloc:
        table.note(
            "url",
            "must not hold a user or a password; put the server's token into an environment variable, and use it in a "
            'header: headers = { Authorization = "Bearer ${HANDBOOK_TOKEN}" }',
        )
    elif urlsplit(url).scheme == "http":
        for key in filter(table.has, ("ca_file", "http2")):
            table.note(key, "is only for a url that begins with https://")


def _ca_file(table: Table, around: _Surroundings) -> Path | None:
    path = table.path("ca_file", None, around.base)
    if path is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    why = "contains no certificate; expected PEM, where each begins with -----BEGIN CERTIFICATE-----"
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:  # a subclass of OSError whose text only names a place inside OpenSSL
        table.note("ca_file", f"{quoted(str(path))}: {why}")
    except OSError as problem:
        table.note("ca_file", f"{quoted(str(path))} cannot be read: {problem.strerror}")
    else:
        if context.cert_store_stats()["x509"] == 0:  # a file that holds only revocation lists
            table.note("ca_file", f"{quoted(str(path))}: {why}")
    return path


def _environment(table: Table, around: _Surroundings) -> dict[str, str]:
    at = table.table("env")
    return {name: _filled(written, name, at, around) for name, written in at.strings().items()}


def _filled(written: str, name: str, at: Table, around: _Surroundings) -> str:
    """Return a value with its environment variables filled in. They are tokens: other programs do not inherit them."""
    for variable in _VARIABLE.findall(written):
        around.token(variable, at, name)
    if "${" in _VARIABLE.sub("", written):
        at.note(name, "expected a variable's name and } after ${, such as ${HANDBOOK_TOKEN}")
    return _VARIABLE.sub(lambda found: around.environ.get(found[1], ""), written)


def _headers(table: Table, around: _Surroundings) -> dict[str, str]:
    at = table.table("headers")
    headers: dict[str, str] = {}
    for name, written in at.strings().items():
        value = _filled(written, name, at, around).strip(" \t")
        if not _HEADER_NAME.fullmatch(name):
            at.note(name, "is not a valid name for an HTTP header")
        elif name.lower() in _OWN_HEADERS:
            at.note(name, "the router sets this header itself; leave it out")
        elif name.lower() in map(str.lower, headers):
            at.note(name, "this header is given twice; header names ignore upper and lower case")
        if not _HEADER_VALUE.fullmatch(value):
            at.note(name, "its value, with the environment's variables filled in, must be printable ASCII")
        headers[name] = value
    return headers


def _is_http_url(url: str) -> bool:
    if not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # raises for a name that no resolver accepts
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid brackets, port or host
        return False


def _neither_or_both(table: Table, one: str) -> str:
    return "both" if table.has(one) else "neither"


def _refuse_a_second_working_tier(tiers: Sequence[Tier], named: Sequence[tuple[str, Table]]) -> None:
    working = [(tier, table) for tier, (_, table) in zip(tiers, named, strict=True) if tier.kind == "working"]
    for _, table in working[1:]:
        table.note("kind", f"{quoted(working[0][0].name)} is already the working tier; there can be one")


class _Move(NamedTuple):
    """A spill or promotion in the file, from one tier to another."""

    source: Tier
    key: str  # spill_to or promote_to
    target: Tier

    @property
    def place(self) -> str:
        return place("tiers", self.source.name, self.key)


def _mistaken_moves(tiers: Sequence[Tier]) -> Iterator[str]:
    by_name = {tier.name: tier for tier in tiers}
    moves = []
    for source in (tier for tier in tiers if not tier.mount):
        for key, target in (("spill_to", source.spill_to), ("promote_to", source.promote_to)):
            if target in by_name:
                moves.append(_Move(source, key, by_name[target]))
            elif target is not None:
                hint = suggestion(target, by_name, "the tiers are")
                yield f"{place('tiers', source.name, key)}: no tier is called {quoted(target)}{hint}"
    for move in moves:
        yield from _mistakes_of(move)
    yield from _circles(moves, [tier.name for tier in tiers])


def _mistakes_of(move: _Move) -> Iterator[str]:
    source, key, target = move
    if target.mount:
        yield f"{move.place}: {quoted(target.name)} is a mount, and mounts are read-only"
    elif target.shared and not source.shared and not source.may_publish:
        yield (
            f"{move.place}: {quoted(target.name)} is shared and {quoted(source.name)} is private, so this would "
            f"publish its records; to allow that, set may_publish = true in "
            f"[{place('tiers', source.name)}]"
        )
    if key == "spill_to" and target.kind == "procedural":
        yield f"{move.place}: {quoted(target.name)} is a procedural tier, and nothing may spill into one"


def _circles(moves: Sequence[_Move], order: Sequence[str]) -> Iterator[str]:
    """Yield one sentence for each circle of moves. The move that closes it is left out of the search for the next."""
    arrows = {(move.source.name, move.target.name): move for move in reversed(moves)}
    while circle := _circle(arrows):
        first = circle.index(min(circle, key=order.index))
        circle = circle[first:] + circle[:first]
        closing = arrows.pop((circle[-1], circle[0]))
        yield f"{closing.place}: spills and promotions run in a circle: {' -> '.join([*circle, circle[0]])}"


def _circle(arrows: Mapping[tuple[str, str], _Move]) -> list[str]:
    """Return the names along one circle of the arrows, each once; empty if there is none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for source, target in sorted(arrows):
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as found:
        circle: list[str] = found.args[1]
        return circle[1:]
    return []
