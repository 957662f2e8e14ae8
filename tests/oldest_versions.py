"""Prints the oldest versions of model libraries that pyproject.toml allows, for `make test-oldest`."""

import re
import tomllib
from pathlib import Path

PACKAGES = ("transformers", "peft")


def oldest(dependencies: list[str], packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Such as ["transformers==5.17"] of ["transformers>=5.17"]; each package must have a lower bound."""
    bounds = dict(match.groups() for one in dependencies if (match := re.fullmatch(r"([\w-]+)>=([\d.]+)", one)))
    return [f"{name}=={bounds[name]}" for name in packages]


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    print(*oldest(project["dependencies"]))
