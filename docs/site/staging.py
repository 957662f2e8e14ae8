"""Collects the pages of the site: those of docs/, and every file of the repository that they link to.

A link in docs/ is relative to the repository, because that is where code hosts show the page. Here the file behind it
becomes a page too (a table of results as it is, a script or a recipe as a listing, a folder as a list), and the link
is rewritten; a link that reads "training.md" gets the title of that page. A link to nothing is an error.
"""

import posixpath
import re
import shutil
from pathlib import Path

COPIED = {".svg", ".png", ".ipynb"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".json": "json", ".toml": "toml"}
NAMED = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?P<label>\[[^\[\]]*\]|\])\((?P<target>[^)\s]+)\)")
_LIST_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


class BrokenLinks(Exception):
    """Links that lead nowhere, one per line."""


class Staging:
    """Pages and other files of the site, by their path in it.

    Args:
        root: Folder of the repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pages: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        self._broken: list[str] = []
        self._queue: list[Path] = []
        self._seen: set[Path] = set()

    def collect(self) -> None:
        """Read docs/ and the three pages at the root, and follow their links."""
        for path in sorted((self.root / "docs").rglob("*.md")):
            self._add(path)
        for name in NAMED:
            self._add(self.root / name)
        while self._queue:
            path = self._queue.pop()
            self.pages[self.address(path)] = self._page_of(path)
        if self._broken:
            raise BrokenLinks("\n".join(self._broken))

    def address(self, path: Path) -> str:
        """Where a file or folder of the repository is in the site."""
        relative = path.relative_to(self.root).as_posix()
        if relative in NAMED:
            return NAMED[relative]
        if path.suffix == ".md":
            return relative.removeprefix("docs/").replace("benchmarks/results/", "measurements/")
        if path.suffix in COPIED:
            return relative.removeprefix("docs/")
        return f"source/{relative}.md"

    def write(self, folder: Path) -> None:
        """Write all pages and files to an empty folder."""
        for address, text in self.pages.items():
            target = folder / address
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        for address, path in self.files.items():
            (folder / address).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / address)

    def _add(self, path: Path) -> None:
        if path not in self._seen:
            self._seen.add(path)
            if path.suffix in COPIED:
                self.files[self.address(path)] = path
            else:
                self._queue.append(path)

    def _page_of(self, path: Path) -> str:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            files = [entry for entry in sorted(path.iterdir()) if entry.is_file()]
            return self._rewritten(f"# {name}\n\n" + "".join(f"- [{file.name}]({file})\n" for file in files), path)
        text = path.read_text()
        if path.suffix == ".md":
            return self._rewritten(with_blank_lines(text), path)
        return f"# {name}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n```\n"

    def _rewritten(self, text: str, page: Path) -> str:
        """The page with its links as paths of the site; what they lead to is collected too."""
        here = posixpath.dirname(self.address(page)) or "."

        def replace(match: re.Match[str]) -> str:
            path, hash_sign, anchor = match["target"].partition("#")
            if not path or "://" in path:
                return match[0]
            target = (page.parent / path).resolve()
            if not target.exists() or not target.is_relative_to(self.root):
                self._broken.append(f"{page.relative_to(self.root)}: {match['target']}")
                return match[0]
            self._add(target)
            address = posixpath.relpath(self.address(target), here)
            is_a_name = match["label"].strip("[]").rpartition("/")[2] == target.name
            label = f"[{title_of(target)}]" if is_a_name else match["label"]
            return f"{label}({address}{hash_sign}{anchor})"

        pieces = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
        return "".join(piece if index % 2 else _LINK.sub(replace, piece) for index, piece in enumerate(pieces))


def title_of(path: Path) -> str:
    """The heading of a page, or the name of another file."""
    heading = re.match(r"# (.+)", path.read_text()) if path.suffix == ".md" else None
    return heading[1] if heading else path.name


def with_blank_lines(text: str) -> str:
    """A blank line before every list: Python-Markdown needs it where other readers of Markdown do not."""
    lines: list[str] = []
    in_fence = False
    for line in text.splitlines():
        in_fence ^= line.startswith("```")
        previous = lines[-1] if lines else ""
        begins = _LIST_ITEM.match(line) and not _LIST_ITEM.match(previous) and not previous.startswith(" ")
        if begins and previous and not in_fence:
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"
