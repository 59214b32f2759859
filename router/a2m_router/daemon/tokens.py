"""`a2m-router token OWNER`: a token for somebody who shall call over HTTP, and what the router must know of it.

The token is printed and kept nowhere; the file holds its SHA-256, by which nobody can find it again.
"""

import secrets
from hashlib import sha256
from json import dumps
from typing import Final

# bytes of chance in a token, which then is 43 characters long
_CHANCE: Final = 32


def fresh_token() -> str:
    """A token that nobody can guess, of letters, digits, "-" and "_"."""
    return secrets.token_urlsafe(_CHANCE)


def checked_owner(text: str) -> str:
    """The owner as it was given; ValueError, as a sentence, if the file could not name it."""
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
    """The lines for federation.toml that let whoever shows `token` act as `owner`."""
    digest = sha256(token.encode()).hexdigest()
    return f'[[serve.principals]]\nowner = {_toml_string(owner)}\ntoken_sha256 = "{digest}"\n'


def handing_out(owner: str, token: str) -> str:
    """All that the command prints."""
    return (
        f"the token, which is shown only this once: {token}\n"
        "\n"
        "add this to federation.toml, and start the router anew (or send SIGHUP to one that runs as a service):\n"
        "\n"
        f"{principal(owner, token)}"
        "\n"
        "put the token into the environment variable A2M_TOKEN: the command a2m uses it; curl takes it as\n"
        '  -H "Authorization: Bearer $A2M_TOKEN"\n'
    )


def _toml_string(text: str) -> str:
    """A basic string of TOML, in ASCII: so it comes out right wherever it is printed or redirected to.

    JSON's strings are such, but for characters beyond U+FFFF, of which JSON makes two.
    """
    quoted = (dumps(character)[1:-1] if ord(character) < 2**16 else f"\\U{ord(character):08x}" for character in text)
    return f'"{"".join(quoted)}"'
