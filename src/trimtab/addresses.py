"""Addresses that may carry credentials: the one place that decides what of them is shown, logged or stored."""

import re
from urllib.parse import unquote_plus

HIDDEN = "***"
# A user name is part of the address of a database (the password comes from its own configuration). On the web the text
# before @ is a token as often as a name, so that all of it is left out.
_SCHEMES_WITH_USERS = frozenset({"postgresql", "postgres", "mysql", "mssql", "oracle"})
# Whole words of a parameter's name, and ends of names in which words are joined.
_SECRET_WORDS = frozenset({"token", "pass", "passwd", "pwd", "secret", "key", "auth", "sig", "signature", "session"})
_SECRET_ENDS = ("token", "password", "passwd", "secret", "apikey", "accesskey", "credential", "credentials")
_PUBLIC_NAMES = frozenset({"sslkey"})  # the name of a file

# An address ends at white space, or where the next one begins.
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9.\-]*(?:\+\w+)?)://(?P<rest>(?:(?!\w+://)\S)*)")
_PARAMETER = re.compile(r"(?P<before>[?&#;])(?P<name>[^?&#;=\s]+)=(?P<value>[^?&#;\s]*)")


def redact(text: str) -> str:
    """Leave credentials out of every address in a text.

    The text before `@` is removed (the address of a database keeps its user name), and the values of parameters such
    as `token` or `password` become `***`. A text without addresses, or an address without credentials, stays as it is.
    """
    return _ADDRESS.sub(_redacted, text)


def has_credentials(address: str) -> bool:
    """Whether an address has a part that must not be written down."""
    return redact(address) != address


def _redacted(found: "re.Match[str]") -> str:
    scheme, rest = found["scheme"], _PARAMETER.sub(_hidden_value, found["rest"])
    authority, slash, path = _split(rest)
    user, at, host = authority.rpartition("@")
    if not at:
        return f"{scheme}://{rest}"
    name = re.split(":|%3a", user, maxsplit=1, flags=re.IGNORECASE)[0]
    keeps_name = scheme.partition("+")[0].lower() in _SCHEMES_WITH_USERS and name
    return f"{scheme}://{name}@{host}{slash}{path}" if keeps_name else f"{scheme}://{host}{slash}{path}"


def _split(rest: str) -> tuple[str, str, str]:
    """User, host and port; the sign that ends them; what follows.

    They end at the first / ? or #. A password may have one of these signs that was not escaped: then an @ follows, and
    what stands before the sign is no host with a port. Too much is hidden where that is not clear.
    """
    end = re.search(r"[/?#]", rest)
    if end is None:
        return rest, "", ""
    authority, following = rest[: end.start()], rest[end.end() :]
    if "@" in following and re.search(r":(?!\d*$)", re.sub(r"^\[[^\]]*\]", "", authority)):
        last = rest.rindex("@")
        tail = re.search(r"[/?#]|$", rest[last:])
        assert tail is not None
        cut = last + tail.start()
        return rest[:cut], rest[cut : cut + 1], rest[cut + 1 :]
    return authority, end.group(), following


def _hidden_value(found: "re.Match[str]") -> str:
    name = unquote_plus(found["name"])
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    joined = re.sub(r"[\W_]", "", words)
    is_secret = bool(_SECRET_WORDS & set(re.split(r"[\W_]+", words))) or joined.endswith(_SECRET_ENDS)
    is_secret = is_secret and joined not in _PUBLIC_NAMES
    return f"{found['before']}{found['name']}={HIDDEN if is_secret and found['value'] else found['value']}"
