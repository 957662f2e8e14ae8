"""What stands in for CUDA graphs on a CPU."""


class Repeats:
    """Computes nothing when it captures, and calls the captured function for a replay."""

    def __init__(self, fails=False):
        self.num_recorded = self.num_replayed = self.num_forgotten = 0
        self.fails = fails

    def supports(self, device):
        return True

    def record(self, work):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_recorded += 1

        def replay():
            self.num_replayed += 1
            work()

        return replay

    def forget(self):
        self.num_forgotten += 1
