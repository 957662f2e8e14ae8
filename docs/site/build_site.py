"""Builds the documentation site: `python docs/site/build_site.py [FOLDER]`, or `make docs`.

Pages are collected (staging.py), the reference is generated from the code (reference.py and its neighbours), the
navigation is made from nav.toml, and Zensical builds all of it. A broken link or anchor, and a page that is in no
section of the navigation, end the build. The result is FOLDER/VERSION, by the changelog, with a list of the versions
that are there.
"""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import trimtab
from reference import reference_pages
from staging import BrokenLinks, Staging

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# A server shows this page at any address, and the site may be at any path of it: Zensical's own page would look for its
# styles at the root of the server. Links lead to the version of the address, or else to the folder of all versions.
NOT_FOUND = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Page not found - trimtab</title>
<style>body { font: 1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 15vh auto; padding: 0 1rem }</style>
<h1>Page not found</h1>
<p>There is no page at this address; it may have another name in this version.</p>
<p><a id="start" href="index.html">Go to the first page</a>: its search finds pages, keys and error messages.</p>
<script>
const version = location.pathname.match(/^.*?\\/\\d+\\.\\d+\\.\\d+\\//);
if (version) document.getElementById("start").href = version[0] + "index.html";
</script>
</html>
"""


class BuildError(Exception):
    """The site cannot be built; the message is for the author of a page."""


def build(folder: Path, root: Path = ROOT) -> Path:
    """Build the site of the repository at `root` and return the folder of this version.

    Args:
        folder: Where the versions of the site are; its subfolder `work` has the collected pages.
        root: The repository.
    """
    version = newest_version((root / "CHANGELOG.md").read_text())
    if version != trimtab.__version__:
        raise BuildError(f"CHANGELOG.md begins with {version}, the package has version {trimtab.__version__}")
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    staging = Staging(root)
    staging.collect()
    staging.pages |= reference_pages()
    staging.write(work / "pages")
    shutil.copyfile(HERE / "extra.css", work / "pages" / "extra.css")
    sections = tomllib.loads((HERE / "nav.toml").read_text())["section"]
    (work / "zensical.toml").write_text(settings(version, navigation(sections, staging.pages)))
    run_zensical(work)
    target = folder / version
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(work / "site", target)
    write_versions(folder, version)
    for place in (folder, target):
        (place / "404.html").write_text(NOT_FOUND)
    return target


def newest_version(changelog: str) -> str:
    """The version of the first section of the changelog."""
    found = re.search(r"^## (\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    if found is None:
        raise BuildError("CHANGELOG.md has no section '## X.Y.Z'")
    return found[1]


def navigation(sections: list[dict[str, Any]], pages: dict[str, str]) -> list[dict[str, list[str]]]:
    """The pages of each section, patterns expanded.

    Raises:
        BuildError: A listed page that does not exist, or a page of docs/ that is in no section.
    """
    named = {entry for section in sections for entry in section["pages"] if "*" not in entry}
    missing = sorted(named - pages.keys())
    if missing:
        raise BuildError(f"docs/site/nav.toml lists pages that do not exist: {', '.join(missing)}")
    found: list[dict[str, list[str]]] = []
    taken = set(named)
    for section in sections:
        listed: list[str] = []
        for entry in section["pages"]:
            matches = [entry] if entry in named else sorted(set(fnmatch.filter(pages, entry)) - taken)
            listed += matches
            taken.update(matches)
        if listed:
            found.append({section["title"]: listed})
    left = sorted(page for page in pages.keys() - taken if not page.startswith(("source/", "readme.md")))
    if left:
        raise BuildError(f"in no section of docs/site/nav.toml: {', '.join(left)}")
    return found


def settings(version: str, sections: list[dict[str, list[str]]]) -> str:
    """zensical.toml with the name of the site and the navigation."""
    entries = [
        f"{{ {json.dumps(title)} = {json.dumps(pages)} }}" for section in sections for title, pages in section.items()
    ]
    given = (
        f'[project]\nsite_name = "trimtab"\ncopyright = "trimtab {version}, Apache-2.0"\nnav = [\n    '
        + ",\n    ".join(entries)
        + ",\n]\n"
    )
    return (HERE / "zensical.toml").read_text().replace("[project]\n", given, 1)


def run_zensical(work: Path) -> None:
    """Build `work/pages` to `work/site`; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", "zensical.toml"],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
        raise BuildError(plain.partition("Traceback")[0])


def write_versions(folder: Path, newest: str) -> None:
    """List the versions that are in the folder, and lead its start page to the newest."""
    found = [path.name for path in folder.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name)]
    found.sort(key=lambda name: [int(number) for number in name.split(".")], reverse=True)
    (folder / "versions.json").write_text(
        json.dumps([{"version": name, "title": name, "aliases": []} for name in found])
    )
    (folder / "index.html").write_text(
        f'<!doctype html><title>trimtab</title><meta http-equiv="refresh" content="0; url={newest}/index.html">\n'
        f'<a href="{newest}/index.html">trimtab {newest}</a>\n'
    )


def main() -> None:
    """Build into the folder on the command line, by default build/site."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    try:
        print(build(folder.resolve()) / "index.html")
    except (BuildError, BrokenLinks) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
