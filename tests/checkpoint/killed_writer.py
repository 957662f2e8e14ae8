"""A process that starts writers to be killed: `python killed_writer.py MODE FOLDER`, then a line on stdin for each.

It loads torch once and forks; every writer says its number on stdout and writes checkpoints until it is killed.
"""

import os
import sys
from pathlib import Path

import torch

from trimtab.checkpoint import folder as folder_module
from trimtab.checkpoint.background import BackgroundWriter
from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.mirror import Mirror
from trimtab.checkpoint.shelf import Shelf
from trimtab.checkpoint.store import StoredCheckpoint, write_checkpoint


def state(number):
    """A state whose every value tells its number, so that a mixture of two would show."""
    return {"a": encode({"x": torch.full((200_000,), number), "n": number}), "b": encode(torch.full((9,), number))}


def replace_one(home):
    """Writes the same folder again and again."""
    place = home / "ckpt"
    number = StoredCheckpoint(place).facts["step"] if place.exists() or list(home.glob(".ckpt.outdated-*")) else 0
    while True:
        number += 1
        write_checkpoint(place, state(number), {"step": number})
        done(home, number)


def fill_shelf(home):
    """Saves in the background, keeps two and mirrors them, as a run does."""
    shelf = Shelf(home / "run" / "checkpoints", keep=2)
    shelf.clear_leftovers()
    mirror = Mirror(home / "run", home / "mirror", folders=())
    newest = shelf.newest()
    number = newest.step if newest else 0

    def after(path):
        done(home, number)
        shelf.tidy(best=1)
        mirror.sync_soon()

    writer = BackgroundWriter(on_saved=after)
    while True:
        number += 1
        writer.save(shelf.place(number), state(number), {"step": number})
        assert writer.wait() is None


def done(home, number):
    (home / "done").write_text(str(number))


if __name__ == "__main__":
    mode, home = sys.argv[1], Path(sys.argv[2])
    if mode == "two renames":
        folder_module._exchange = lambda one, other: False
    torch.set_num_threads(1)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                fill_shelf(home) if mode == "shelf" else replace_one(home)
            finally:
                os._exit(3)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
