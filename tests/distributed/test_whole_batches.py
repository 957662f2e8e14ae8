"""With `split_batches=False` another number of processes resumes at the same row, or refuses to."""

import whole_batches
from launching import run_alone, run_together


def test_no_row_is_lost_or_seen_twice(fork_server, tmp_path):
    run_alone(fork_server, whole_batches, tmp_path)
    for num_processes in (2, 3):
        run_together(fork_server, whole_batches, tmp_path, num_processes)
    run_alone(fork_server, whole_batches, tmp_path)  # with the state of two
    assert len(list(tmp_path.glob("by-*"))) == 2
    assert len(list(tmp_path.glob("done-*"))) == 1 + 2 + 3
