"""The tiny run of the tests as a process: folder of photos, folder of results, steps after which it kills itself (0:
never)."""

import os
import signal
import sys

import torch
from tiny_runs import make_student, make_teacher, quick

from selectivit.train.distill import distill
from selectivit.train.settings import Running


def main(photos, out, fatal):
    def tell(report):
        if report.step == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    running = Running(workers=1, checkpoint_every=2)
    distill(make_student(), make_teacher(), [photos], out, quick(), running, tell=tell)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
