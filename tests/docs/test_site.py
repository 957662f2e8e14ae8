"""The site is built strictly: a broken link, a broken anchor and a page outside the navigation end the build."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import build_site
import trimtab
from build_site import BuildError, navigation, newest_version
from docstrings import markdown_of
from python_api import engine_page
from staging import BrokenLinks, Staging, with_blank_lines
from trimtab.cli.main import app
from trimtab.runs.contents import CONTENTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build_site.build(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_every_page_is_built_and_reachable(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert len(pages) > 15
    assert pages <= built
    text = (site / "index.html").read_text()
    assert not [page for page in pages if f'href="./{page.as_posix()}"' not in text and page.name != "index.html"]
    assert (site.parent / "index.html").read_text().count(f"{site.name}/index.html") == 2


@pytest.mark.slow
def test_it_shows_its_version_and_the_changelog(site):
    assert site.name == trimtab.__version__ == newest_version((ROOT / "CHANGELOG.md").read_text())
    assert f"trimtab {trimtab.__version__}" in (site / "index.html").read_text()
    assert f'id="{trimtab.__version__.replace(".", "")}' in (site / "changelog.html").read_text()
    assert (site.parent / "versions.json").read_text().count(trimtab.__version__) == 2


@pytest.mark.slow
def test_a_page_that_is_not_there_leads_back_from_any_path_of_a_server(site):
    for place in (site, site.parent):
        text = (place / "404.html").read_text()
        assert "Page not found" in text
        assert not re.findall(r"""(?:href|src)=["']?/""", text), "the root of a server need not be the site"


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site):
    """Scripts, styles, fonts and images: all are files of the site. Links that a reader may follow are not meant."""
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        text = path.read_text()
        fetched = re.findall(
            r"""(?:<(?:script|img|iframe)[^>]*\ssrc=|<link[^>]*\shref=|url\()["']?((?:https?:)?//[^"')]+)""", text
        )
        assert not [address for address in fetched if 'rel="canonical"' not in address], path


@pytest.mark.slow
def test_the_reference_has_every_command_and_every_name(site):
    import typer

    text = (site / "reference" / "command-line.html").read_text()
    commands = typer.main.get_command(app).commands
    assert len(commands) > 20
    for name, command in commands.items():
        assert f'id="trimtab-{name}' in text
        for parameter in () if hasattr(command, "commands") else command.params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                assert parameter.opts[0] in text
    text = "".join((site / "reference" / name).read_text() for name in ("python.html", "engine.html"))
    for name in trimtab.__all__:
        assert name == "__version__" or f'id="{name.lower()}"' in text, name
    for method in ("prepare", "backward", "accumulate", "save_state", "gather_for_metrics"):
        assert f'id="{method}"' in text
    engine = engine_page()
    assert "\n    gradient_accumulation_steps: int = 1,\n" in engine
    assert engine.index("## prepare\n") < engine.index("## print\n"), "what a loop needs comes first"
    assert "75" in (site / "reference" / "exit-codes.html").read_text()
    assert "<code>rtx-4060-ti</code>" in (site / "reference" / "gpus.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[x](no-such-page.md)", "glossary.md: no-such-page.md"),
        ("[x](../benchmarks/no_such.py)", "no_such.py"),
        ("[x](planner.md#no-such-heading)", "anchor does not exist"),
    ],
)
def test_a_broken_link_ends_the_build(tmp_path, line, says):
    copy = tmp_path / "repository"
    for name in ("docs", "benchmarks", "examples", "recipes"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    with (copy / "docs" / "glossary.md").open("a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises((BuildError, BrokenLinks), match=says):
        build_site.build(tmp_path / "site", copy)


def test_a_page_outside_the_navigation_is_an_error():
    sections = [{"title": "All", "pages": ["first.md", "more/*.md", "absent*.md"]}, {"title": "None", "pages": ["x*"]}]
    pages = dict.fromkeys(["more/b.md", "first.md", "more/a.md", "source/x.py.md"], "")
    assert navigation(sections, pages) == [{"All": ["first.md", "more/a.md", "more/b.md"]}]
    with pytest.raises(BuildError, match="no section of docs/site/nav.toml: forgotten.md"):
        navigation(sections, pages | {"forgotten.md": ""})
    with pytest.raises(BuildError, match=r"do not exist: first.md"):
        navigation(sections, {})


def test_every_page_of_the_navigation_has_a_title_of_its_own():
    staging = Staging(ROOT)
    staging.collect()
    titles = {name: text.partition("\n")[0] for name, text in staging.pages.items() if name != "readme.md"}
    assert len(titles) > 50
    twice = {title for title in titles.values() if list(titles.values()).count(title) > 1}
    assert not {name: title for name, title in titles.items() if title in twice}


def test_links_that_leave_docs_lead_to_pages_of_the_site(tmp_path):
    for name, text in {
        "docs/deep/page.md": "`[no](x.md)` [a](../../tool.py) [b](../other.md#b) ![c](c.png)\n```\n[no](x.md)\n```\n",
        "docs/other.md": "[r.md](../benchmarks/results/r.md) [folder](../examples)\n",
        "docs/deep/c.png": "",
        "tool.py": "print()\n",
        "benchmarks/results/r.md": "# R\n",
        "examples/one.py": "",
        **dict.fromkeys(("README.md", "CHANGELOG.md", "CONTRIBUTING.md"), ""),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    staging = Staging(tmp_path)
    staging.collect()
    expected = "`[no](x.md)` [a](../source/tool.py.md) [b](../other.md#b) ![c](c.png)\n```\n[no](x.md)\n```\n"
    assert staging.pages["deep/page.md"] == expected
    assert staging.pages["other.md"] == "[R](measurements/r.md) [folder](source/examples.md)\n"
    assert staging.pages["source/tool.py.md"] == "# tool.py\n\n```python\nprint()\n```\n"
    assert staging.pages["source/examples.md"] == "# examples\n\n- [one.py](examples/one.py.md)\n"
    assert list(staging.files) == ["deep/c.png"]


def test_lists_get_a_blank_line_before_them():
    text = "so:\n- a\n- b\n  more\n- c\n```\nx\n- d\n```\n"
    assert with_blank_lines(text) == text.replace("so:\n", "so:\n\n")


def test_docstrings_become_markdown():
    text = """Do it.

    Args:
        one: First
            of two.
        **more: Others.

    Returns:
        What was done.
    """
    expected = "Do it.\n\n**Arguments**\n\n- `one`: First of two.\n- `**more`: Others.\n\n**Returns** What was done."
    assert markdown_of(text) == expected


def test_the_files_of_a_run_are_those_of_the_guide():
    section = (ROOT / "docs" / "training.md").read_text().partition("## The run folder")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    assert len(named) > 5
    assert set(named) <= set(CONTENTS)


def test_settings_of_the_site_are_valid():
    settings = build_site.settings("1.2.3", [{"Start": ["index.md"]}])
    project = tomllib.loads(settings)["project"]
    assert (project["copyright"], project["nav"]) == ("trimtab 1.2.3, Apache-2.0", [{"Start": ["index.md"]}])
    assert project["theme"]["font"] is False
