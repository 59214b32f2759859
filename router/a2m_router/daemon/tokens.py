"""`a2m-router token OWNER`: a new token for a client that calls over HTTP, and the lines that federation.toml needs.

The command prints the token and stores it nowhere. The file holds its SHA-256, from which it cannot be recovered.
"""

import secrets
from hashlib import sha256
from json import dumps
from typing import Final

# random bytes in a token, which is then 43 characters long
_RANDOM_BYTES: Final = 32


def fresh_token() -> str:
    """Return a new token that cannot be guessed, of letters, digits, "-" and "_"."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def checked_owner(text: str) -> str:
    """Return the owner unchanged. Raises ValueError, with a sentence, for an owner that the file cannot name."""
    if not text.strip():
        raise ValueError("expected the name of an owner, got an empty one")
    if "\0" in text:
        raise ValueError("the name of an owner must not contain a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the name of an owner must be valid UTF-8") from None
    return text


def principal(owner: str, token: str) -> str:
    """Return the lines for federation.toml that let a caller with `token` act as `owner`."""
    digest = sha256(token.encode()).hexdigest()
    return f'[[serve.principals]]\nowner = {_toml_string(owner)}\ntoken_sha256 = "{digest}"\n'


def handing_out(owner: str, token: str) -> str:
    """Return the whole output of the command."""
    return (
        f"the token, shown only this once: {token}\n"
        "\n"
        "add this to federation.toml, then restart the router (or send SIGHUP if it runs as a service):\n"
        "\n"
        f"{principal(owner, token)}"
        "\n"
        "put the token into the environment variable A2M_TOKEN. The command a2m reads it from there; for curl, add\n"
        '  -H "Authorization: Bearer $A2M_TOKEN"\n'
    )


def _toml_string(text: str) -> str:
    """Return `text` as a basic string of TOML in ASCII, which survives every terminal and redirection.

    A JSON string is a valid one, except for characters beyond U+FFFF: JSON writes those as two escapes.
    """
    quoted = (dumps(character)[1:-1] if ord(character) < 2**16 else f"\\U{ord(character):08x}" for character in text)
    return f'"{"".join(quoted)}"'
