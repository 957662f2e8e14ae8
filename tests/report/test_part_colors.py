"""The colors of the parts of memory, as readers with and without a color blindness see them."""

import itertools

import pytest
import torch

from trimtab.report.part_colors import DARK, LIGHT
from trimtab.report.step_record import ALLOCATED

# Machado, Oliveira, Fernandes 2009: full protanopia, deuteranopia and tritanopia, on linear RGB
SIGHTS = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = torch.tensor([0.9505, 1.0, 1.089])


def seen(color, sight):
    """CIELAB coordinates of a color."""
    rgb = torch.tensor([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = (TO_XYZ @ (torch.tensor(SIGHTS[sight], dtype=torch.float) @ linear).clamp(0, 1) / WHITE) ** (1 / 3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_parts_can_be_told_apart(colors, sight):
    for one, other in itertools.combinations(ALLOCATED, 2):
        distance = torch.dist(seen(colors[one], sight), seen(colors[other], sight))
        assert distance > 20, f"{one} and {other}: 2 is just noticeable, 20 is another color"
