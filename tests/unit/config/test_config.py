"""federation.toml: the sample, every error, and properties of units, misspelt keys and cycles."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import assume, given
from hypothesis import strategies as st

from a2m_router.config.loading import ConfigError, check_bind, host_port, load, parse
from a2m_router.config.settings import Serve, Settings, Summarizer, Tier
from a2m_router.config.toml_table import duration, size
from a2m_router.daemon.tokens import fresh_token
from tests.support.paths import ROOT

BASE = Path("/home/of/the/file")
DIGEST = "ab" * 32
ONE_TIER = '[tiers.all]\nkind = "semantic"\ncommand = ["a2m-store", "all.db"]\n'
SHARED_TIER = '[tiers.pools]\nkind = "semantic"\ncommand = ["a2m-store", "pools.db"]\nshared = true\n'


def settings(text: str, **environ: str) -> Settings:
    return parse(text, base=BASE, environ=environ)


def mistakes(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        settings(text, **environ)
    return str(raised.value).split("\n")


def tier(name: str, *lines: str, kind: str = "semantic", server: str = 'command = ["a2m-store"]') -> str:
    return "\n".join([f"[tiers.{name}]", f'kind = "{kind}"', server, *lines, ""])


def mount(name: str, *lines: str) -> str:
    return tier(name, "mount = true", *lines, server='url = "http://127.0.0.1:9000/"')


def principal(*lines: str) -> str:
    return "\n".join(["[[serve.principals]]", *lines, ONE_TIER])


def summarizer(*lines: str, server: str = 'url = "http://127.0.0.1:11434/v1"\nmodel = "small"') -> str:
    return "\n".join(["[summarizer]", server, *lines, ONE_TIER])


def test_the_sample_says_what_it_is_meant_to_say() -> None:
    path = ROOT / "federation.toml"
    sample = load(path, {})
    assert (sample.name, sample.path, sample.state) == ("home", path, path.parent / "memories/router.db")
    assert sample.serve == Serve(http=None, origins=(), principals=())
    assert (sample.serve.max_requests, sample.serve.max_connections, sample.serve.idle_timeout) == (256, 1024, 30)
    assert (sample.serve.max_held, sample.serve.max_header) == (256 * 1024 * 1024, 32 * 1024)
    assert sample.events.retained == 1024
    assert sample.summarizer is None
    assert (sample.recall.fusion, sample.recall.k, sample.recall.candidates) == ("rrf", 60, 3)
    assert (sample.recall.limit, sample.recall.max_limit) == (8, 1000)
    assert sample.recall.rankings == ("tier", "lexical", "vector")
    assert (sample.policy.background, sample.policy.forgotten_for) == (True, 30 * 86_400)
    assert (sample.limits.max_records_per_call, sample.limits.max_content_length) == (1000, 1_000_000)
    assert sample.limits.max_message == 64 * 1024 * 1024
    working, episodic, semantic, procedural = sample.tiers
    assert working == Tier(
        name="working",
        kind="working",
        command=("a2m-store", "memories/working.db", "--kind", "working", "--name", "working"),
        cwd=path.parent,
        capacity=24,
        per_session=True,
        spill_to="episodic",
        half_life=300,
        required=True,
    )
    assert (episodic.capacity, episodic.spill_to, episodic.half_life) == (100_000, "semantic", 86_400)
    assert (episodic.promote_to, episodic.promote_after) == ("semantic", 3)
    assert (semantic.shared, semantic.capacity, semantic.half_life) == (False, None, None)
    assert (procedural.kind, procedural.shared, procedural.weight, procedural.timeout) == ("procedural", True, 1, 5)
    assert sample.working == working
    assert sample.managed == sample.tiers


def test_the_sample_stays_good_when_its_examples_are_switched_on() -> None:
    text = (ROOT / "federation.toml").read_text()
    for example in (
        *('http = "127', "origins", "hosts", "[[serve", "owner =", "token_env", "write", "admin", "limit ", "max_"),
        "idle_timeout",
        *(
            "forgotten_for",
            "retained",
            "[summarizer",
            'url = "http://127.0.0.1:11434',
            "model =",
            "timeout  ",
            "distil",
        ),
    ):
        assert f"# {example}" in text
        text = text.replace(f"# {example}", example)
    start = text.index("# [tiers.handbook]")
    text = text[:start] + text[start:].replace("# ", "", 1).replace("\n# ", "\n")
    got = settings(text, ALICE_TOKEN="s3cret", HANDBOOK_TOKEN="opens", SUMMARIZER_TOKEN="pays")
    assert got.serve.http == "127.0.0.1:8778"
    assert got.serve.origins == ("https://app.example",)
    assert [(one.owner, one.token_sha256) for one in got.serve.principals] == [("alice", sha256(b"s3cret").hexdigest())]
    assert got.summarizer == Summarizer(url="http://127.0.0.1:11434/v1", model="qwen3:8b", token="pays")
    assert [one.name for one in got.tiers if one.distil] == ["working"]
    handbook = got.tier("handbook")
    assert (handbook.url, handbook.command, handbook.mount) == ("http://127.0.0.1:9000/", None, True)
    assert (handbook.weight, handbook.timeout, handbook.remote_tier) == (0.5, 2, "manuals")
    assert handbook.headers == {"Authorization": "Bearer opens"}
    assert handbook.shared
    assert handbook not in got.managed


def test_what_is_left_out_has_its_default() -> None:
    sparse = settings(ONE_TIER)
    full = settings(
        'name = "federation"\nstate = "memories/router.db"\n'
        '[serve]\nmax_requests = 256\nmax_connections = 1024\nmax_held = "256MiB"\nmax_header = "32KiB"\n'
        'idle_timeout = "30s"\n[events]\nretained = 1024\n'
        '[recall]\nfusion = "rrf"\nk = 60\nrankings = ["tier", "lexical", "vector"]\ncandidates = 3\n'
        'limit = 8\nmax_limit = 1000\n[policy]\npass = "background"\nforgotten_for = "30d"\n'
        '[limits]\nmax_records_per_call = 1000\nmax_content_length = 1_000_000\nmax_message = "64MiB"\n'
        + ONE_TIER
        + 'cwd = "."\nenv = {}\ncapacity = 0\nper_session = false\noverflow = "spill"\ndistil = false\n'
        'required = false\nshared = false\nmay_publish = false\nmount = false\nweight = 1\ntimeout = "5s"\n'
    )
    assert sparse == full
    assert sparse.state == BASE / "memories/router.db"
    assert sparse.path is None


def test_a_summarizer_with_address_and_model_has_the_other_defaults() -> None:
    sparse = settings(summarizer())
    assert sparse.summarizer == Summarizer(
        url="http://127.0.0.1:11434/v1", model="small", token="", timeout=60, max_input=100_000
    )
    assert sparse == settings(summarizer('timeout = "60s"', "max_input = 100_000"))
    assert sparse.token_variables == frozenset()


def test_paths_are_relative_to_the_file_unless_absolute() -> None:
    got = settings('state = "/var/router.db"\n' + tier("a", 'cwd = "sub"') + tier("b", 'cwd = "/srv"'))
    assert got.state == Path("/var/router.db")
    assert [one.cwd for one in got.tiers] == [BASE / "sub", Path("/srv")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (tier("a") + tier("b", kind="working"), "b"),
        (mount("m") + tier("a") + tier("b"), "a"),
        (tier("w", "mount = true", kind="working") + tier("a"), "a"),
        (mount("m"), None),
    ],
)
def test_a_write_without_a_tier_goes_to_the_working_or_first_managed_one(text: str, name: str | None) -> None:
    working = settings(text).working
    assert (working and working.name) == name


def test_an_unknown_tier_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        settings(ONE_TIER).tier("other")


def test_a_child_inherits_no_token_but_what_its_own_table_gives_it() -> None:
    environ = {"PATH": "/bin", "ALICE": "1", "H1": "2", "H2": "3", "LANG": "C", "WRITER": "4"}
    got = settings(
        '[[serve.principals]]\nowner = "alice"\ntoken_env = "ALICE"\n'
        '[summarizer]\nurl = "http://far.example/v1"\nmodel = "m"\ntoken_env = "WRITER"\n'
        + tier("far", 'headers = { X-A = "${H1}:${H2}", X-B = "$H1" }', server='url = "https://far.example/a2m"')
        + tier("near", 'env = { LANG = "de", H2 = "own" }'),
        **environ,
    )
    assert got.tier("far").headers == {"X-A": "2:3", "X-B": "$H1"}
    assert got.summarizer is not None
    assert got.summarizer.token == "4"
    assert got.child_environment(got.tier("near"), environ) == {"PATH": "/bin", "LANG": "de", "H2": "own"}


def test_a_tiers_environment_names_the_tokens_that_it_alone_gets() -> None:
    """Only a tier's environment gets the tokens that its settings name."""
    environ = {"PATH": "/bin", "T": "s3cret"}
    got = settings(tier("one", 'env = { T = "${T}", URL = "x:${T}@y" }') + tier("two"), **environ)
    assert got.child_environment(got.tier("one"), environ) == {"PATH": "/bin", "T": "s3cret", "URL": "x:s3cret@y"}
    assert got.child_environment(got.tier("two"), environ) == {"PATH": "/bin"}
    with pytest.raises(ConfigError, match=r"^tiers\.one\.env\.T: the environment variable NONE is not set$"):
        settings(tier("one", 'env = { T = "${NONE}" }'))
    with pytest.raises(ConfigError, match=r"^tiers\.one\.env\.T: expected "):
        settings(tier("one", 'env = { T = "${" }'))


def test_no_token_is_in_a_repr() -> None:
    text = tier("far", 'headers = { A = "${TOKEN}", B = "wr1tten" }', server='url = "http://far.example"')
    text += '[summarizer]\nurl = "http://far.example"\nmodel = "m"\ntoken_env = "WRITER"\n'
    shown = repr(settings(text + tier("near", 'env = { KEY = "g1ven" }'), TOKEN="h1dden", WRITER="p4ys"))
    assert not any(secret in shown for secret in ("h1dden", "wr1tten", "g1ven", "p4ys"))


def test_a_tier_over_https_may_name_whom_it_trusts(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    trustme.CA().cert_pem.write_to_path(tmp_path / "certs/ca.pem")
    lines = ['ca_file = "certs/ca.pem"', "http2 = true"]
    far = parse(tier("far", *lines, server='url = "https://h"'), base=tmp_path, environ={}).tier("far")
    assert (far.ca_file, far.http2) == (tmp_path / "certs/ca.pem", True)
    plain = settings(tier("far", server='url = "https://h"')).tier("far")
    assert (plain.ca_file, plain.http2) == (None, False)


def test_a_file_of_nothing_but_revocations_certifies_nobody(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody")])
    revoked = x509.CertificateRevocationListBuilder(issuer, now, now + timedelta(days=1)).sign(key, hashes.SHA256())
    (tmp_path / "crl.pem").write_bytes(revoked.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigError, match=r"^tiers\.a\.ca_file: .*/crl\.pem\": contains no certificate"):
        parse(tier("a", 'ca_file = "crl.pem"', server='url = "https://h"'), base=tmp_path, environ={})


def test_promotion_into_procedural_and_publishing_on_purpose_are_accepted() -> None:
    settings(tier("a", 'promote_to = "p"', "may_publish = true") + tier("p", "shared = true", kind="procedural"))
    settings(tier("a", 'spill_to = "b"', "shared = true") + tier("b", "shared = true"))
    settings(tier("a", 'spill_to = "b"', "shared = true") + tier("b"))
    settings(tier("a", "capacity = 5", 'overflow = "drop"'))


def test_what_spills_is_distilled_where_the_file_says_so_and_nowhere_else() -> None:
    got = settings(tier("a", 'spill_to = "b"', "distil = true") + tier("b", "distil = false", 'overflow = "drop"'))
    assert [one.distil for one in got.tiers] == [True, False]


def test_bounds_may_be_set_to_their_very_ends() -> None:
    got = settings(
        "[serve]\nmax_requests = 1\nmax_connections = 1\nmax_held = 500\nmax_header = 1024\n"
        "[limits]\nmax_message = 500\n[events]\nretained = 1_000_000\n" + ONE_TIER
    )
    assert (got.serve.max_held, got.serve.max_header, got.events.retained) == (500, 1024, 1_000_000)
    assert settings('[serve]\nmax_header = "1KiB"\n[events]\nretained = 1\n' + ONE_TIER).events.retained == 1


REFUSALS: dict[str, tuple[str, str]] = {
    # The file as a whole
    "syntax": ("name = \n", "not valid TOML: Invalid value (at line 1, column 8)"),
    "a key twice": (f"{ONE_TIER}[tiers.all]\n", "not valid TOML: Cannot declare"),
    "nested too deeply": (f"a = {'[' * 100_000}", "not valid TOML: nested too deeply"),
    "a number of 5000 digits": (f"a = {'9' * 5000}", "not valid TOML: "),
    "nothing": ("", "tiers: there is no tier; write at least one, such as [tiers.working]"),
    "no tiers": ("[tiers]\n", "tiers: there is no tier"),
    "tiers as a list": ("tiers = []\n", "tiers: expected a table, got a list"),
    "a tier that is none": ("[tiers]\nx = 1\n" + ONE_TIER, "tiers.x: expected a table, got a whole number"),
    # Unknown keys, everywhere
    "unknown at the top": ('nmae = "x"\n' + ONE_TIER, 'nmae: unknown key; did you mean "name"?'),
    "unknown table": ('[tier.a]\nkind = "semantic"\n', 'tier: unknown key; did you mean "tiers"?'),
    "unknown in serve": ('[serve]\norigin = ["a"]\n' + ONE_TIER, 'serve.origin: unknown key; did you mean "origins"?'),
    "unknown in a principal": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'tokn_env = "A"'),
        'serve.principals[0].tokn_env: unknown key; did you mean "token_env"?',
    ),
    "unknown in recall": ("[recall]\nlimits = 3\n" + ONE_TIER, 'recall.limits: unknown key; did you mean "limit"?'),
    "unknown in policy": ("[policy]\nzzz = 1\n" + ONE_TIER, 'unknown key; the keys here are "pass", "forgotten_for"'),
    "unknown in limits": (
        "[limits]\nmax_mesage = 3\n" + ONE_TIER,
        'limits.max_mesage: unknown key; did you mean "max_message"?',
    ),
    "unknown in events": ("[events]\nretian = 3\n" + ONE_TIER, 'events.retian: unknown key; did you mean "retained"?'),
    "unknown in the summarizer": (summarizer('key = "x"'), 'summarizer.key: unknown key; the keys here are "url", "mo'),
    "unknown in a tier": (
        tier("a", 'SPILL-TO = "b"'),
        'tiers.a.SPILL-TO: unknown key; did you mean "spill_to"?',
    ),
    "a key that needs quotes": (tier('"my tier"', '"a b" = 1'), 'tiers."my tier"."a b": unknown key'),
    # Types
    "a number for a name": ("name = 5\n" + ONE_TIER, "name: expected a string, got a whole number"),
    "an empty name": ('name = ""\n' + ONE_TIER, "name: must not be empty"),
    "a date for a path": ("state = 2024-01-01\n" + ONE_TIER, "state: expected a string, got a date or time"),
    "NUL in a path": ('state = "a\\u0000"\n' + ONE_TIER, "state: must not contain a NUL character"),
    "a value for a table": ("recall = true\n" + ONE_TIER, "recall: expected a table, got true or false"),
    "a string for a number": (tier("a", 'capacity = "24"'), "tiers.a.capacity: expected a whole number, got a string"),
    "true for a number": (tier("a", "capacity = true"), "tiers.a.capacity: expected a whole number, got true or false"),
    "a fraction for a count": (tier("a", "capacity = 1.5"), "tiers.a.capacity: expected a whole number, got a number"),
    "a string for a flag": (tier("a", 'shared = "yes"'), "tiers.a.shared: expected true or false, got a string"),
    "a string for a list": (
        tier("a", server='command = "a2m-store"'),
        "tiers.a.command: expected a list of strings, got a string",
    ),
    "a list of numbers": (tier("a", server='command = ["a", 1]'), "tiers.a.command[1]: expected a string, got a whole"),
    "a table for a list of tables": (
        '[serve.principals]\nowner = "a"\n' + ONE_TIER,
        "serve.principals: expected a list of tables, written [[serve.principals]], got a table",
    ),
    "a list of no tables": ("[serve]\nprincipals = [1]\n" + ONE_TIER, "serve.principals[0]: expected a table, got a"),
    "a number in env": (tier("a", "env = { A = 1 }"), "tiers.a.env.A: expected a string, got a whole number"),
    "a list for env": (tier("a", "env = []"), "tiers.a.env: expected a table, got a list"),
    # Numbers
    "a negative capacity": (tier("a", "capacity = -1"), "tiers.a.capacity: must be at least 0, got -1"),
    "no candidates": ("[recall]\ncandidates = 0\n" + ONE_TIER, "recall.candidates: must be at least 1, got 0"),
    "a negative k": ("[recall]\nk = -60\n" + ONE_TIER, "recall.k: must be at least 0, got -60"),
    "a limit of zero": ("[recall]\nlimit = 0\n" + ONE_TIER, "recall.limit: must be at least 1, got 0"),
    "a limit beyond the highest": (
        "[recall]\nlimit = 9\nmax_limit = 8\n" + ONE_TIER,
        "recall.limit: 9 is more than max_limit, which is 8",
    ),
    "a negative weight": (tier("a", "weight = -0.5"), "tiers.a.weight: must be a number of at least 0, got -0.5"),
    "a weight that is no number": (
        tier("a", "weight = nan"),
        "tiers.a.weight: must be a number of at least 0, got nan",
    ),
    "a weight of nothing": (tier("a", "weight = 0"), "tiers.a.weight: expected more than 0"),
    "a mount's weight of nothing": (
        tier("a", "mount = true\nweight = 0.0"),
        "tiers.a.weight: expected more than 0",
    ),
    "an infinite weight": (tier("a", "weight = inf"), "tiers.a.weight: must be a number of at least 0, got inf"),
    "a number beyond 64 bits": (
        tier("a", f"capacity = 0x{'f' * 5000}"),
        "tiers.a.capacity: this number does not fit in 64 bits",
    ),
    "promotion after nothing": (
        tier("a", 'promote_to = "b"', "promote_after = 0") + tier("b"),
        "tiers.a.promote_after: must be at least 1, got 0",
    ),
    # Units
    "a number without a unit": (
        tier("a", "half_life = 5"),
        'tiers.a.half_life: 5 has no unit; write for example "5m"',
    ),
    "a string without a unit": (tier("a", 'timeout = "2"'), 'tiers.a.timeout: "2" has no unit; write for example "2s"'),
    "an unknown unit": (tier("a", 'timeout = "2M"'), 'tiers.a.timeout: "2M" has an unknown unit; the units are ms, s,'),
    "no duration": (
        tier("a", 'timeout = "soon"'),
        'tiers.a.timeout: "soon" is not a valid duration; write for example "5m"',
    ),
    "a negative duration": (tier("a", 'timeout = "-2s"'), 'tiers.a.timeout: "-2s" must be longer than zero'),
    "no time at all": ('[policy]\nforgotten_for = "0d"\n' + ONE_TIER, 'policy.forgotten_for: "0d" must be longer than'),
    "an age": (tier("a", f'half_life = "{"9" * 400}d"'), "is longer than 1000 years"),
    "a flag for a duration": (tier("a", "timeout = true"), 'timeout: expected a duration such as "2s", got true or'),
    "a size without a unit": ('[limits]\nmax_message = "64"\n' + ONE_TIER, 'limits.max_message: "64" has no unit;'),
    "a size of an unknown unit": ('[limits]\nmax_message = "64m"\n' + ONE_TIER, '"64m" has an unknown unit; the units'),
    "a size that is none": (
        '[limits]\nmax_message = "big"\n' + ONE_TIER,
        '"big" is not a valid size; write for example "64MiB"',
    ),
    "a size of nothing": ('[limits]\nmax_message = "0.5B"\n' + ONE_TIER, "must be at least one byte"),
    "a size of zero": ("[limits]\nmax_message = 0\n" + ONE_TIER, "limits.max_message: must be at least 1, got 0"),
    "a list for a size": ("[limits]\nmax_message = []\n" + ONE_TIER, 'expected a size such as "64MiB", got a list'),
    # Choices
    "an unknown kind": (tier("a", kind="episodc"), 'tiers.a.kind: "episodc" is not known; did you mean "episodic"?'),
    "a kind like no other": (tier("a", kind="zzz"), '"zzz" is not known; expected "working", "episodic", "semantic",'),
    "a kind of another type": (
        "[tiers.a]\nkind = 1\nurl = 'http://h'\n",
        'kind: expected one of "working", "episodic"',
    ),
    "no kind": ("[tiers.a]\nurl = 'http://h'\n", "tiers.a: kind is missing; expected one of"),
    "an unknown fusion": ('[recall]\nfusion = "rff"\n' + ONE_TIER, 'recall.fusion: "rff" is not known; did you mean'),
    "an unknown pass": ('[policy]\npass = "never"\n' + ONE_TIER, 'policy.pass: "never" is not known; expected "back'),
    "an unknown overflow": (
        tier("a", 'overflow = "dorp"'),
        'tiers.a.overflow: "dorp" is not known; did you mean "drop"',
    ),
    "an unknown ranking": (
        '[recall]\nrankings = ["tier", "vectors"]\n' + ONE_TIER,
        'recall.rankings[1]: "vectors" is not known; did you mean "vector"?',
    ),
    "a ranking twice": (
        '[recall]\nrankings = ["tier", "vector", "tier"]\n' + ONE_TIER,
        'recall.rankings: names "tier" more than once',
    ),
    "no rankings": ("[recall]\nrankings = []\n" + ONE_TIER, 'recall.rankings: must name at least one of "tier", "lex'),
    # A tier's name and server
    "an empty tier name": (tier('""'), 'tiers."": a tier\'s name must not be empty'),
    "a slash in a tier name": (tier('"a/b"'), 'tiers."a/b": a tier\'s name must not be empty, nor contain "/"'),
    "a newline in a tier name": (
        tier('"a\\nb"'),
        'tiers."a\\nb": a tier\'s name must not be empty, nor contain "/" or',
    ),
    "neither command nor url": (tier("a", server=""), "tiers.a: expected one of command and url, got neither"),
    "both command and url": (tier("a", 'url = "http://h"'), "tiers.a: expected one of command and url, got both"),
    "an empty command": (tier("a", server="command = []"), "tiers.a.command: must begin with the program to run"),
    "an unnamed program": (tier("a", server='command = [""]'), "tiers.a.command: must begin with the program to run"),
    "no http": (tier("a", server='url = "ftp://h/"'), 'tiers.a.url: expected an address such as "http://127.0.0.1:90'),
    "no host": (tier("a", server='url = "http:///x"'), "tiers.a.url: expected an address"),
    "no port": (tier("a", server='url = "http://h:99999/"'), "tiers.a.url: expected an address"),
    "a space in a url": (tier("a", server='url = "http://h/a b"'), "tiers.a.url: expected an address"),
    "a name no resolver takes": (tier("a", server='url = "http://a..b/"'), "tiers.a.url: expected an address"),
    "a fragment in a url": (tier("a", server='url = "http://h/#x"'), "tiers.a.url: expected an address"),
    "a user in a url": (
        tier("a", server='url = "http://u@h/"'),
        "tiers.a.url: must not hold a user or a password",
    ),
    "HTTP/2 for a program": (tier("a", "http2 = false"), "tiers.a.http2: is only for a tier with a url"),
    "HTTP/2 without TLS": (
        tier("a", "http2 = true", server='url = "http://h"'),
        "tiers.a.http2: is only for a url that begins with https://",
    ),
    "a number for HTTP/2": (
        tier("a", "http2 = 2", server='url = "https://h"'),
        "tiers.a.http2: expected true or false, got a whole number",
    ),
    "certificates that are not there": (
        tier("a", 'ca_file = "certs/ca.pem"', server='url = "https://h"'),
        'tiers.a.ca_file: "/home/of/the/file/certs/ca.pem" cannot be read: No such file or directory',
    ),
    "a folder of certificates": (
        tier("a", 'ca_file = "/"', server='url = "https://h"'),
        'tiers.a.ca_file: "/" cannot be read: Is a directory',
    ),
    "no certificates": (
        tier("a", f'ca_file = "{Path(__file__).resolve()}"', server='url = "https://h"'),
        "contains no certificate; expected PEM",
    ),
    "headers for a program": (tier("a", 'headers = { A = "b" }'), "tiers.a.headers: is only for a tier with a url"),
    "env for an address": (
        tier("a", 'env = { A = "b" }', server='url = "http://h"'),
        "tiers.a.env: is only for a tier with a command",
    ),
    "cwd for an address": (
        tier("a", 'cwd = "x"', server='url = "http://h"'),
        "tiers.a.cwd: is only for a tier with a command",
    ),
    "a variable without a name": (tier("a", 'env = { "A=B" = "c" }'), 'tiers.a.env."A=B": a variable\'s name must not'),
    "a header that is none": (
        tier("a", 'headers = { "a b" = "c" }', server='url = "http://h"'),
        'tiers.a.headers."a b": is not a valid name for an HTTP header',
    ),
    "a header of the router's own": (
        tier("a", 'headers = { content-TYPE = "a/b" }', server='url = "http://h"'),
        "tiers.a.headers.content-TYPE: the router sets this header itself; leave it out",
    ),
    "a header twice": (
        tier("a", 'headers = { A = "b", a = "b" }', server='url = "http://h"'),
        "tiers.a.headers.a: this header is given twice; header names ignore upper and lower case",
    ),
    "a header of two lines": (
        tier("a", 'headers = { A = "b\\r\\nc" }', server='url = "http://h"'),
        "tiers.a.headers.A: its value, with the environment's variables filled in, must be printable ASCII",
    ),
    "a missing variable in a header": (
        tier("a", 'headers = { A = "Bearer ${TOKEN}" }', server='url = "http://h"'),
        "tiers.a.headers.A: the environment variable TOKEN is not set",
    ),
    "an open brace": (
        tier("a", 'headers = { A = "Bearer ${TOKEN" }', server='url = "http://h"'),
        "tiers.a.headers.A: expected a variable's name and } after ${",
    ),
    # Moves
    "a spill to nowhere": (
        tier("a", 'spill_to = "semantik"') + tier("semantic"),
        'tiers.a.spill_to: no tier is called "semantik"; did you mean "semantic"?',
    ),
    "a promotion to nowhere": (
        tier("a", 'promote_to = "zzz"') + tier("b"),
        'tiers.a.promote_to: no tier is called "zzz"; the tiers are "a", "b"',
    ),
    "a circle of one": (
        tier("a", 'spill_to = "a"'),
        "tiers.a.spill_to: spills and promotions run in a circle: a -> a",
    ),
    "a circle of two": (
        tier("a", 'spill_to = "b"') + tier("b", 'promote_to = "a"'),
        "tiers.b.promote_to: spills and promotions run in a circle: a -> b -> a",
    ),
    "a spill into procedural": (
        tier("a", 'spill_to = "p"') + tier("p", kind="procedural"),
        'tiers.a.spill_to: "p" is a procedural tier, and nothing may spill into one',
    ),
    "a spill that publishes": (
        tier("a", 'spill_to = "b"') + tier("b", "shared = true"),
        'tiers.a.spill_to: "b" is shared and "a" is private, so this would publish its records; to allow that, '
        "set may_publish = true in [tiers.a]",
    ),
    "a promotion that publishes": (
        tier("a", 'promote_to = "b"') + tier("b", "shared = true", "may_publish = true"),
        'tiers.a.promote_to: "b" is shared and "a" is private',
    ),
    "a capacity with nowhere to spill": (tier("a", "capacity = 5"), "tiers.a.capacity: needs a target for spills; add"),
    "a promotion without a target": (
        tier("a", "promote_after = 3"),
        "tiers.a.promote_after: needs a target for promotions; add promote_to",
    ),
    "a spill into a mount": (
        tier("a", 'spill_to = "m"') + mount("m"),
        'tiers.a.spill_to: "m" is a mount, and mounts are read-only',
    ),
    "a promotion into a mount": (
        tier("a", 'promote_to = "m"') + mount("m"),
        'tiers.a.promote_to: "m" is a mount, and mounts are read-only',
    ),
    "two working tiers": (
        tier("a", kind="working") + tier("b") + tier("c", kind="working"),
        'tiers.c.kind: "a" is already the working tier; there can be one',
    ),
    "distilling what goes nowhere": (
        tier("a", "distil = true"),
        "tiers.a.distil: rewrites the records that spill, and needs a target for them; add spill_to",
    ),
    "distilling what is dropped": (
        tier("a", "distil = true", 'overflow = "drop"'),
        'tiers.a.distil: overflow = "drop" deletes the records that distil rewrites; leave one of the two out',
    ),
    # Mounts
    **{
        f"{line} on a mount": (
            mount("m", line),
            f"tiers.m.{line.split()[0]}: does not apply to a mount, which is read-only",
        )
        for line in (
            "capacity = 5",
            "capacity = 0",
            "per_session = true",
            'overflow = "drop"',
            'spill_to = "m"',
            'promote_to = "m"',
            "promote_after = 3",
            'half_life = "1d"',
            "may_publish = true",
            "distil = true",
        )
    },
    "a private mount": (mount("m", "shared = false"), "tiers.m.shared: a mount is always shared; leave this out"),
    # Events
    "no events": ("[events]\nretained = 0\n" + ONE_TIER, "events.retained: must be at least 1, got 0"),
    "too many events": (
        "[events]\nretained = 1_000_001\n" + ONE_TIER,
        "events.retained: must be at most 1000000, got 1000001",
    ),
    # Summaries
    "a summarizer that is none": ('summarizer = "small"\n' + ONE_TIER, "summarizer: expected a table, got a string"),
    "a summarizer without an address": (summarizer(server='model = "small"'), "summarizer: url is missing"),
    "a summarizer without a model": (summarizer(server='url = "http://h/v1"'), "summarizer: model is missing"),
    "a summarizer without a name for its model": (
        summarizer(server='url = "http://h/v1"\nmodel = ""'),
        "summarizer.model: must not be empty",
    ),
    **{
        f"a summarizer at {url}": (
            summarizer(server=f'url = "{url}"\nmodel = "small"'),
            'summarizer.url: expected a base address such as "http://127.0.0.1:11434/v1"',
        )
        for url in ("127.0.0.1:11434", "ftp://h/v1", "http:///v1", "http://h/v1?key=a", "http://h/v1#a", "http://h/ v1")
    },
    **{
        f"a summarizer at {url}": (
            summarizer(server=f'url = "{url}"\nmodel = "small"'),
            "summarizer.url: must not hold a user or a password; put a token into an environment variable; token_env",
        )
        for url in ("http://u:p@h/v1", "http://u@h/v1", "http://@h/v1")
    },
    **{
        f"a summarizer at {url}": (
            summarizer(server=f'url = "{url}"\nmodel = "small"'),
            "summarizer.url: expected the base address; leave out /chat/completions, which is appended",
        )
        for url in ("http://h/v1/chat/completions", "http://h/v1/chat/completions/")
    },
    "a summarizer with a missing token": (
        summarizer('token_env = "NOPE"'),
        "summarizer.token_env: the environment variable NOPE is not set",
    ),
    "a summarizer with no time": (summarizer('timeout = "0s"'), 'summarizer.timeout: "0s" must be longer than zero'),
    "a summarizer with a time without a unit": (
        summarizer("timeout = 60"),
        'summarizer.timeout: 60 has no unit; write for example "60s"',
    ),
    "a summarizer that reads nothing": (summarizer("max_input = 0"), "summarizer.max_input: must be at least 1, got 0"),
    # Serving
    "no requests": ("[serve]\nmax_requests = 0\n" + ONE_TIER, "serve.max_requests: must be at least 1, got 0"),
    "no connections": ("[serve]\nmax_connections = 0\n" + ONE_TIER, "serve.max_connections: must be at least 1, got"),
    "less held than one message": (
        '[serve]\nmax_held = "63MiB"\n' + ONE_TIER,
        "serve.max_held: 66060288 bytes are fewer than limits.max_message, which is 67108864, so a message of that",
    ),
    "a message larger than what is held": (
        '[limits]\nmax_message = "257MiB"\n' + ONE_TIER,
        "serve.max_held: 268435456 bytes are fewer than limits.max_message, which is 269484032",
    ),
    "no size for what is held": ('[serve]\nmax_held = "64"\n' + ONE_TIER, 'serve.max_held: "64" has no unit'),
    "a head of few bytes": ("[serve]\nmax_header = 1023\n" + ONE_TIER, "serve.max_header: must be at least 1024, got"),
    "a small head": (
        '[serve]\nmax_header = "0.9KiB"\n' + ONE_TIER,
        'serve.max_header: "0.9KiB" must be at least 1024 bytes',
    ),
    "no time to be idle": (
        "[serve]\nidle_timeout = 30\n" + ONE_TIER,
        'serve.idle_timeout: 30 has no unit; write for example "30s"',
    ),
    "no port to listen on": ('[serve]\nhttp = "127.0.0.1"\n' + ONE_TIER, "serve.http: expected host:port with a port"),
    "open to all": (
        '[serve]\nhttp = "0.0.0.0:80"\n' + ONE_TIER,
        'serve.http: "0.0.0.0:80" can be reached from other machines, and no token is required; add [[serve',
    ),
    "every origin": (
        '[serve]\norigins = ["*"]\n' + ONE_TIER,
        "serve.origins[0]: expected scheme://host or scheme://hos",
    ),
    "an origin with a path": ('[serve]\norigins = ["https://a/"]\n' + ONE_TIER, "serve.origins[0]: expected scheme://"),
    "a host with a port": (
        '[serve]\nhosts = ["a:80"]\n' + ONE_TIER,
        "serve.hosts[0]: expected a name without a port, as",
    ),
    "every host": (
        '[serve]\nhosts = ["b.example", "*"]\n' + ONE_TIER,
        "serve.hosts[1]: expected a name without a port",
    ),
    "a right to write where there is no tier": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'write = ["private", "pool"]') + SHARED_TIER,
        'serve.principals[0].write[1]: no tier is called "pool"; did you mean "pools"?',
    ),
    "a right to write into what is private": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'write = ["all"]'),
        'serve.principals[0].write[0]: "all" is not shared; write "private" for the principal\'s own records',
    ),
    "a right to write into a mount": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'write = ["book"]') + mount("book"),
        'serve.principals[0].write[0]: "book" is a mount, and mounts are read-only',
    ),
    "a right to write that is given twice": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'write = ["pools", "pools"]') + SHARED_TIER,
        'serve.principals[0].write[1]: "pools" is listed twice; leave one out',
    ),
    "a right to write that is no list": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'write = "private"'),
        "serve.principals[0].write: expected a list of strings, got a string",
    ),
    "an admin in words": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'admin = "yes"'),
        "serve.principals[0].admin: expected true or false, got a string",
    ),
    "a tier with the name of what is private": (
        tier("private"),
        'tiers.private: "private" is reserved: in a principal\'s `write` it stands for its own records; choose',
    ),
    "a principal without an owner": (
        principal(f'token_sha256 = "{DIGEST}"'),
        "serve.principals[0]: owner is missing",
    ),
    "a principal without a token": (
        principal('owner = "a"'),
        "serve.principals[0]: expected one of token_sha256, token_env and token_file, got none",
    ),
    "a principal with two tokens": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"', 'token_env = "PATH"'),
        "serve.principals[0]: expected one of token_sha256, token_env and token_file, got token_sha256 and token_env",
    ),
    "a token in place of its digest": (
        principal('owner = "a"', 'token_sha256 = "s3cret"'),
        "serve.principals[0].token_sha256: expected the token's SHA-256, which is 64 hexadecimal digits",
    ),
    "a missing token": (
        principal('owner = "a"', 'token_env = "NOPE"'),
        "serve.principals[0].token_env: the environment variable NOPE is not set",
    ),
    "one token for two": (
        principal('owner = "a"', f'token_sha256 = "{DIGEST}"').removesuffix(ONE_TIER)
        + principal('owner = "b"', f'token_sha256 = "{DIGEST.upper()}"'),
        "serve.principals[1]: another principal has the same token; each principal needs its own",
    ),
}
ALONGSIDE = {  # errors that rightly come with a second one
    "unknown table",
    "tiers as a list",
    "a principal with two tokens",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_mistake_is_refused_by_its_place(case: str) -> None:
    text, words = REFUSALS[case]
    said = mistakes(text)
    assert any(words in sentence for sentence in said)
    assert case in ALONGSIDE or len(said) == 1, said


def test_all_mistakes_are_told_at_once() -> None:
    said = mistakes(
        'nmae = "x"\n[recall]\nk = "60"\n' + tier("a", 'spill_to = "c"', "capacty = 3") + tier("b", kind="x")
    )
    assert [sentence.split(":")[0] for sentence in said] == [
        "recall.k",
        "tiers.a.capacty",
        "tiers.b.kind",
        "nmae",
        "tiers.a.spill_to",
    ]


def test_every_circle_is_told() -> None:
    said = mistakes("".join(tier(a, f'spill_to = "{b}"') for a, b in ("ab", "ba", "cd", "de", "ec")))
    assert [sentence.split("circle: ")[1] for sentence in said] == ["a -> b -> a", "c -> d -> e -> c"]


@pytest.mark.parametrize(
    "text",
    [
        principal('owner = "a"', 'token_sha256 = "s3cret"'),
        principal('owner = "a"', 'token_env = "TOKEN"', 'token_sha256 = "s3cret"'),
        principal('owner = "a"', 'token_sha256 = ["s3cret"]'),
        principal('owner = "a"', 'token_env = "s3cret"'),
        tier("a", 'headers = { A = "s3cret ${TOKEN}\\n" }', server='url = "http://h"'),
        tier("a", server='url = "http://u:s3cret@h:x/"'),
        tier("a", server='url = "http://u:s3cret@h/"'),
        tier("a", server='url = "http://h/#s3cret"'),
        tier("a", "http2 = true", server='url = "http://h/?key=s3cret"'),
        summarizer(server='url = "http://u:s3cret@h/"'),
        summarizer(server='url = "http://u:s3cret@h:x/"'),
        summarizer(server='url = "http://h/v1?key=s3cret"'),
        summarizer('token_env = "s3cret"'),
        summarizer('token_env = "WITH_A_SPACE"'),
        summarizer('token_env = "WITH_A_LINE_END"'),
        summarizer('token_env = "WITH_AN_UMLAUT"'),
        summarizer('token = "s3cret"'),
        tier("a", 'env = { A = ["s3cret"] }'),
    ],
)
def test_no_token_is_in_a_refusal(text: str) -> None:
    unfit = {"WITH_A_SPACE": "s3cret s3cret", "WITH_A_LINE_END": "s3cret\n", "WITH_AN_UMLAUT": "s3crät s3cret"}
    assert "s3cret" not in "\n".join(mistakes(text, TOKEN="s3cret", **unfit))


NO_HEADER_S: Final = [
    "two words",
    "line\n",
    "carriage\r",
    " s3cret",
    "s3cret ",
    "\t",
    "umläut",
    "\udcff",
    "\x7f",
    "\x00",
]
HOLDERS: Final = {
    "summarizer": summarizer('token_env = "HOLDER"'),
    "serve.principals[0]": principal('owner = "a"', 'token_env = "HOLDER"'),
}


@pytest.mark.parametrize("at", HOLDERS)
@pytest.mark.parametrize("token", NO_HEADER_S)
def test_a_token_that_no_header_can_carry_is_refused_at_its_variable(token: str, at: str) -> None:
    assert mistakes(HOLDERS[at], HOLDER=token) == [
        f"{at}.token_env: a token must be printable ASCII without spaces and line ends; "
        "the one in the environment variable HOLDER is not"
    ]


@pytest.mark.parametrize("at", HOLDERS)
@pytest.mark.parametrize("name", ["HOLDER", "A", "_A2M_TOKEN_1", "ALICE_S_TOKEN_FOR_THE_ROUTER"])
def test_a_variable_that_is_not_set_is_called_by_its_name(name: str, at: str) -> None:
    said = mistakes(HOLDERS[at].replace("HOLDER", name))
    assert said == [f"{at}.token_env: the environment variable {name} is not set"]


@pytest.mark.parametrize("at", HOLDERS)
@pytest.mark.parametrize("token", ["hunter2", "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP", "a" * 32, "sk_live_4eC39H", "Ab-_9"])
def test_what_may_be_a_token_in_place_of_a_variable_s_name_is_not_repeated(token: str, at: str) -> None:
    [said] = mistakes(HOLDERS[at].replace("HOLDER", token))
    assert said.startswith(f"{at}.token_env: the environment variable it names (not repeated here")
    assert token not in said


def test_no_token_that_is_made_is_taken_for_a_variable_s_name() -> None:
    for token in {fresh_token() for _ in range(100)}:
        assert token not in "\n".join(mistakes(principal('owner = "a"', f'token_env = "{token}"')))


def token_file(tmp_path: Path, content: bytes | None) -> Any:
    """Return the token of a principal whose token file has this content, or the errors."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    try:
        text = principal('owner = "a"', 'token_file = "token"')
        return parse(text, base=tmp_path, environ={}).serve.principals[0].token_sha256
    except ConfigError as problem:
        return str(problem).splitlines()


@pytest.mark.parametrize("written", [b"s3cret", b"s3cret\n", b"s3cret\r\n", b"\xef\xbb\xbfs3cret\n"])
def test_a_token_may_be_in_a_file_of_its_own(written: bytes, tmp_path: Path) -> None:
    assert token_file(tmp_path, written) == sha256(b"s3cret").hexdigest()


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"s3cret s3cret", "expected one line with the token"),
        (b"s3cret\ns3cret\n", "expected one line with the token"),
        (b"s3cr\xc3\xa4t", "expected one line with the token"),
        (b"s3cret\0", "expected one line with the token"),
    ],
)
def test_a_file_that_holds_no_token_is_refused_by_its_path(
    written: bytes | None, sentence: str, tmp_path: Path
) -> None:
    [said] = token_file(tmp_path, written)
    assert said.startswith("serve.principals[0].token_file: ")
    assert str(tmp_path / "token") in said
    assert sentence in said
    assert "s3cret" not in said


def test_a_token_s_file_that_has_no_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "token").symlink_to("/dev/zero")
    [said] = token_file(tmp_path, None)
    assert "expected one line with the token" in said


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (principal('owner = "a"', 'token_env = "TOKEN"'), "serve.principals[0]"),
        (summarizer('token_env = "TOKEN"'), "summarizer"),
    ],
)
def test_an_empty_token_is_no_token(text: str, at: str) -> None:
    assert mistakes(text, TOKEN="") == [f"{at}.token_env: the environment variable TOKEN is empty"]


def test_a_file_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes('name = "a"\n# caf\xe9\n'.encode("latin-1"))
    for path, words in (
        (tmp_path / "none.toml", "there is no such file"),
        (tmp_path, "expected a file, this is a folder"),
        (latin / "below.toml", "cannot be read: "),
        (latin, "line 2 is not valid UTF-8"),
    ):
        with pytest.raises(ConfigError) as raised:
            load(path, {})
        assert str(raised.value).startswith(f"{path}: {words}")


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_bytes(b"\xef\xbb\xbf" + ONE_TIER.replace("\n", "\r\n").encode())
    assert load(path, {}).tiers[0].name == "all"


def test_a_relative_file_gives_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.toml").write_text(ONE_TIER)
    monkeypatch.chdir(tmp_path)
    got = load(Path("f.toml"), {})
    assert (got.path, got.state, got.tiers[0].cwd) == (tmp_path / "f.toml", tmp_path / "memories/router.db", tmp_path)


@pytest.mark.parametrize(
    ("http", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("127.9.9.9:65535", ("127.9.9.9", 65535)),
        ("localhost:8778", ("localhost", 8778)),
        ("[::1]:8778", ("::1", 8778)),
    ],
)
def test_a_loopback_bind_needs_no_principals(http: str, address: tuple[str, int]) -> None:
    assert host_port(http) == address
    check_bind(http, Serve())
    assert settings(f'[serve]\nhttp = "{http}"\n{ONE_TIER}').serve.http == http


def test_hosts_are_names_in_lower_case_and_ipv6_without_brackets() -> None:
    assert settings('[serve]\nhosts = ["A2M.example", "[fe80::1]", "10.0.0.1"]\n' + ONE_TIER).serve.hosts == (
        "a2m.example",
        "fe80::1",
        "10.0.0.1",
    )


@pytest.mark.parametrize("http", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "example.org:80", "localhost.evil:80"])
def test_any_other_bind_needs_principals(http: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        check_bind(http, Serve())
    text = principal('owner = "a"', f'token_sha256 = "{DIGEST.upper()}"')
    got = settings(f'[serve]\nhttp = "{http}"\n{text}').serve
    assert got.principals[0].token_sha256 == DIGEST
    check_bind(http, got)


@pytest.mark.parametrize(
    "http", ["", "8778", ":8778", "h:", "h:65536", "h:-1", "h:٣", "::1:80", "[::1]", "[1:2]:80", "h:80/", "http://h:80"]
)
def test_what_is_no_address_cannot_be_listened_on(http: str) -> None:
    with pytest.raises(ConfigError):
        check_bind(http, Serve())


@given(st.integers(1, 10_000), st.sampled_from([("ms", 0.001), ("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)]))
def test_a_duration_is_its_amount_times_its_unit(amount: int, unit: tuple[str, float]) -> None:
    name, seconds = unit
    assert duration(f"{amount}{name}") == pytest.approx(amount * seconds)
    assert duration(f"{amount}.5 {name}") == pytest.approx((amount + 0.5) * seconds)
    assert settings(tier("a", f'half_life = "{amount}{name}"')).tiers[0].half_life == duration(f"{amount}{name}")


@given(st.integers(1, 10_000), st.sampled_from([("B", 1), ("kB", 1000), ("KiB", 1024), ("mib", 2**20), ("GB", 10**9)]))
def test_a_size_is_its_amount_times_its_unit(amount: int, unit: tuple[str, int]) -> None:
    assert size(f"{amount}{unit[0]}") == amount * unit[1]


@given(st.text(max_size=12) | st.from_regex(r"-?[0-9]{0,3}(\.[0-9])? ?[a-z]{0,2}", fullmatch=True))
def test_a_duration_is_understood_or_refused_with_a_sentence(text: str) -> None:
    sentence = ""
    try:
        seconds = duration(text)
    except ValueError as problem:
        sentence = str(problem)
    assert sentence.startswith('"') if sentence else seconds > 0  # the message begins with the value


KEYS = {
    "": ["name", "state", "serve", "recall", "policy", "limits", "events", "summarizer", "tiers"],
    "serve": [
        *("http", "origins", "hosts", "principals", "max_requests", "max_connections", "max_held", "max_header"),
        "idle_timeout",
    ],
    "recall": ["fusion", "rankings", "candidates", "limit", "max_limit"],
    "policy": ["pass", "forgotten_for"],
    "limits": ["max_records_per_call", "max_content_length", "max_message"],
    "events": ["retained"],
    "summarizer": ["url", "model", "token_env", "timeout", "max_input"],
    "tiers.all": [
        *(
            "kind",
            "command",
            "headers",
            "ca_file",
            "http2",
            "capacity",
            "per_session",
            "spill_to",
            "distil",
            "overflow",
        ),
        *("promote_to", "promote_after", "half_life", "required", "shared", "may_publish", "mount", "weight"),
        *("timeout", "remote_tier"),
    ],
}


@given(st.data())
def test_a_slip_of_the_finger_in_a_key_is_answered_with_that_key(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(sorted(KEYS)))
    key = data.draw(st.sampled_from(KEYS[table]))
    at = data.draw(st.integers(0, len(key) - 2))
    letter = data.draw(st.sampled_from("aeinorstz"))
    typo = data.draw(
        st.sampled_from(
            [
                key[:at] + key[at + 1 :],
                key[:at] + letter + key[at:],
                key[:at] + letter + key[at + 1 :],
                key[:at] + key[at + 1] + key[at] + key[at + 2 :],
            ]
        )
    )
    assume(typo not in KEYS[table])
    line = f"{typo} = 1\n"
    there = {"": line + ONE_TIER, "tiers.all": ONE_TIER + line, "summarizer": summarizer(line)}
    text = there.get(table, f"{ONE_TIER}[{table}]\n{line}")
    dotted = f"{table}.{typo}" if table else typo
    assert mistakes(text) == [f'{dotted}: unknown key; did you mean "{key}"?']


@given(st.integers(1, 7).flatmap(lambda n: st.lists(st.tuples(*[st.integers(-1, n - 1)] * 2), min_size=n, max_size=n)))
def test_moves_are_refused_exactly_when_they_run_in_a_circle(moves: list[tuple[int, int]]) -> None:
    lines = [
        [f'{key} = "t{target}"' for key, target in zip(("spill_to", "promote_to"), pair, strict=True) if target >= 0]
        for pair in moves
    ]
    text = "".join(tier(f"t{n}", *lines[n]) for n in range(len(moves)))
    arrows = {(source, target) for source, pair in enumerate(moves) for target in pair if target >= 0}
    reached = set(arrows)
    for _ in moves:
        reached |= {(a, d) for a, b in reached for c, d in arrows if b == c}
    if not any(a == b for a, b in reached):
        assert len(settings(text).tiers) == len(moves)
        return
    for sentence in mistakes(text):
        circle = [int(name.removeprefix("t")) for name in sentence.split("circle: ")[1].split(" -> ")]
        assert circle[0] == circle[-1] == min(circle)
        assert len(set(circle)) == len(circle) - 1
        assert set(pairwise(circle)) <= arrows
