"""The tiny pretraining of the tests as a process: folder of photos, folder of results, steps after which it kills
itself (0: never)."""

import os
import signal
import sys

import torch
from dino_runs import quick

from selectivit.train.pretrain import pretrain
from selectivit.train.settings import Running


def main(photos, out, fatal):
    def tell(report):
        if report.step == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    pretrain([photos], out, quick(), Running(workers=1, checkpoint_every=2), tell=tell)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
