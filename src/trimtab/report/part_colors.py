"""The colors of the parts of memory, the same in all pictures.

Parts that are stacked on each other differ in lightness as well as in hue: all pairs can be told apart with any common
color blindness, on white and on a dark background.
"""

from collections.abc import Mapping

from trimtab.report.step_record import ALLOCATED

_OVERHEAD = ("allocator slack", "outside the allocator")
LIGHT: Mapping[str, str] = dict(
    zip(
        (*ALLOCATED, *_OVERHEAD),
        ("#838d97", "#b8500f", "#4b22c4", "#5fa9fb", "#035034", "#edbd22", "#d9dee3", "#b3bac1"),
        strict=True,
    )
)
DARK: Mapping[str, str] = dict(
    zip(
        (*ALLOCATED, *_OVERHEAD),
        ("#bcc8d4", "#bf6d16", "#7349e6", "#6aa9f8", "#138060", "#f8da34", "#3d444d", "#59616b"),
        strict=True,
    )
)


def css_name(part: str) -> str:
    """The name of a part in class names and variables."""
    return part.replace(" ", "-")


def _variables(colors: Mapping[str, str]) -> str:
    return " ".join(f"--{css_name(part)}: {color};" for part, color in colors.items())


PART_COLORS = (
    f":root {{ {_variables(LIGHT)} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
)
