"""Addresses: redaction of credentials in URLs, before they are shown, logged or stored, and what cannot be a path."""

import re
from urllib.parse import unquote_plus

HIDDEN = "***"
# Database URLs need their user name (the password can come from the database's own configuration). In http URLs the
# text before @ can be a token instead of a name, so all of it is removed.
_SCHEMES_WITH_USERS = frozenset({"postgresql", "postgres", "mysql", "mssql", "oracle"})
# Names of secret query parameters: whole words of a name, and endings of a name with its separators removed.
_SECRET_WORDS = frozenset({"token", "pass", "passwd", "pwd", "secret", "key", "auth", "sig", "signature", "session"})
_SECRET_ENDS = ("token", "password", "passwd", "secret", "apikey", "accesskey", "credential", "credentials")
_PUBLIC_NAMES = frozenset({"sslkey"})  # a file name, not a key

# A URL ends at white space, or where the next one begins. A path made from one has lost a slash.
_NETWORK = "https?|s3a?|gcs|gs|abfss?|wasbs?|adl|hdfs|s?ftp|ssh|hf|dbfs"
_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9.\-]*(?:\+\w+)?)://(?P<rest>(?:(?!\w+://)\S)*)"
    rf"|\b(?P<short>{_NETWORK}):/(?P<tail>[^\s/](?:(?!\w+://)\S)*)",
    re.IGNORECASE,
)
_MAX_NAME_BYTES = 255
_PARAMETER = re.compile(r"(?P<before>[?&#;])(?P<name>[^?&#;=\s]+)=(?P<value>[^?&#;\s]*)")


def redact(text: str) -> str:
    """Remove the credentials from every URL in a text.

    The text before `@` is removed (database URLs keep the user name), and values of query parameters such as `token`
    or `password` become `***`. Everything else is unchanged.
    """
    return _ADDRESS.sub(_redacted, text)


def has_credentials(address: str) -> bool:
    """Whether a URL contains credentials."""
    return redact(address) != address


def path_problem(text: str) -> str:
    """Return why a text cannot be a path of this machine, as the end of "which …"; empty if it can."""
    if re.match(r"[A-Za-z][A-Za-z0-9.+\-]*://", text) or re.match(rf"(?:{_NETWORK}):/", text, re.IGNORECASE):
        return "is an address, not a folder or file of this machine"
    if "\0" in text:
        return "contains a null character"
    longest = max((len(name.encode(errors="replace")) for name in text.split("/")), default=0)
    return f"has a name of {longest} bytes; file systems allow {_MAX_NAME_BYTES}" if longest > _MAX_NAME_BYTES else ""


def _redacted(found: "re.Match[str]") -> str:
    if found["short"] is not None:
        whole = _ADDRESS.sub(_redacted, f"{found['short']}://{found['tail']}")
        return whole.replace("://", ":/", 1)
    scheme, rest = found["scheme"], _PARAMETER.sub(_hidden_value, found["rest"])
    authority, slash, path = _split(rest)
    user, at, host = authority.rpartition("@")
    if not at:
        return f"{scheme}://{rest}"
    name = re.split(":|%3a", user, maxsplit=1, flags=re.IGNORECASE)[0]
    keeps_name = scheme.partition("+")[0].lower() in _SCHEMES_WITH_USERS and name
    return f"{scheme}://{name}@{host}{slash}{path}" if keeps_name else f"{scheme}://{host}{slash}{path}"


def _split(rest: str) -> tuple[str, str, str]:
    """Split the part of a URL after :// into authority (user, host and port), delimiter and the rest.

    The authority ends at the first / ? or #. A password may contain one of these unescaped: then an @ follows, and the
    text before the delimiter is not a host with a port. When in doubt, remove more than necessary.
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


def is_secret_name(name: str) -> bool:
    """Whether a parameter or key with this name usually holds a credential, such as `hub_token` or `api_key`."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    joined = re.sub(r"[\W_]", "", words)
    is_secret = bool(_SECRET_WORDS & set(re.split(r"[\W_]+", words))) or joined.endswith(_SECRET_ENDS)
    return is_secret and joined not in _PUBLIC_NAMES


def _hidden_value(found: "re.Match[str]") -> str:
    is_secret = is_secret_name(unquote_plus(found["name"]))
    return f"{found['before']}{found['name']}={HIDDEN if is_secret and found['value'] else found['value']}"
