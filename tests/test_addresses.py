"""Credentials in URLs are removed, and nothing else is changed."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.addresses import has_credentials, path_problem, redact

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"https://me:{SECRET}@host/a", "https://host/a"),
        (f"https://{SECRET}@host:5000", "https://host:5000"),
        (f"http://me:{SECRET}@[::1]:5000/a", "http://[::1]:5000/a"),
        (f"http://me:a@{SECRET}@host", "http://host"),
        (f"http://me:a/{SECRET}@host/b", "http://host/b"),
        (f"http://me:a?{SECRET}@host/b", "http://host/b"),
        (f"http://me%3A{SECRET}@host", "http://host"),
        (f"http://host?token={SECRET}", "http://host?token=***"),
        (f"http://host/a?b=1&PassWord={SECRET}&c=2#x", "http://host/a?b=1&PassWord=***&c=2#x"),
        (f"http://host/?api%5Fkey={SECRET}", "http://host/?api%5Fkey=***"),
        (f"http://host/#access_token={SECRET}", "http://host/#access_token=***"),
        (f"http://host/?a@b&token={SECRET}", "http://host/?a@b&token=***"),
        (f"postgresql://me:{SECRET}@host/db?sslmode=require", "postgresql://me@host/db?sslmode=require"),
        (f"postgresql+psycopg2://me%3a{SECRET}@host/db", "postgresql+psycopg2://me@host/db"),
        (f"mysql+pymysql://me@host/db?password={SECRET}", "mysql+pymysql://me@host/db?password=***"),
        (f"no http://a:{SECRET}@h/, no 'http://b:{SECRET}@i', end", "no http://h/, no 'http://i', end"),
        (f"the folder s3:/KEY:{SECRET}@bucket does not exist", "the folder s3:/bucket does not exist"),
        (f"https:/me:{SECRET}@host/a", "https:/host/a"),
        (f"['http://a:{SECRET}@h','http://b:{SECRET}@i']", "['http://h','http://i']"),
    ],
)
def test_credentials_are_removed(address, shown):
    assert redact(address) == shown
    assert redact(shown) == shown
    assert has_credentials(address)
    assert SECRET not in redact(address)


@pytest.mark.parametrize(
    "text",
    [
        "https://host:5000/a",
        "http://localhost:5000/a@b",
        "http://[::1]:5000/a@b",
        "sqlite:////a:b@c/mlflow.db",
        "sqlite:///runs/mlflow.db?timeout=3",
        "postgresql://me@host/db?sslmode=require&sslkey=/a/b",
        "https://host?design=1&author=me&keyboard=us&monkey=1",
        "databricks",
        "databricks://profile",
        "models:/name@best",
        "/home/me/https:/a",
        "me@host: no address",
        "a: b",
    ],
)
def test_everything_else_is_unchanged(text):
    assert redact(text) == text
    assert not has_credentials(text)


words = st.text(string.ascii_letters + string.digits, min_size=1, max_size=8)
passwords = st.text(string.ascii_letters + string.digits + "!$%^&*()_+-=[]{}|;:,.<>~`\"\\@?/#'", max_size=12)


@given(
    scheme=st.sampled_from(["http", "https", "HTTP", "postgresql", "mysql+pymysql", "s3"]),
    user=words,
    before=passwords,
    after=passwords,
    tail=st.sampled_from(["", "/", "/a/b?c=1", ":5000/x"]),
    around=st.sampled_from(["{}", "cannot reach {}: refused", "x={} y"]),
)
@settings(max_examples=300, deadline=None)
def test_no_password_is_shown(scheme, user, before, after, tail, around):
    """Whatever a password is made of; the letter in front keeps it from looking like a port."""
    text = around.format(f"{scheme}://{user}:p{before}{SECRET}{after}@host{tail}")
    assert SECRET not in redact(text)
    assert "host" in redact(text)
    assert redact(redact(text)) == redact(text)


@given(
    name=st.sampled_from(["token", "TOKEN", "password", "my_passwd", "api-key", "sig", "client_secret", "auth"]),
    value=words,
    between=st.sampled_from(["?", "?a=1&", "#", "?a=b@c&"]),
)
@settings(max_examples=100, deadline=None)
def test_no_secret_parameter_is_shown(name, value, between):
    assert SECRET not in redact(f"see http://host:80/x{between}{name}={value}{SECRET}&z=1 or not")


@pytest.mark.parametrize("text", ["https://host", "s3:/bucket/x", "a\0b", "a/" + "é" * 128, "HTTPS://host"])
def test_what_cannot_be_a_path(text):
    assert path_problem(text)


@pytest.mark.parametrize(
    "text", ["", "/a/b", "a:b/c", "x" * 255, "~nobody/a", "C:/x", "owner/name", "http/x", "é" * 127]
)
def test_what_can_be_a_path(text):
    assert path_problem(text) == ""
