"""`torchrun` this: trains, and a callback of the second process asks to stop after step 20.

stopping.py TEXT OUT
"""

import sys

import torch
from tiny_text import TINY

from fused_recoder.training import Callback, Config, Trainer, processes


class Stop(Callback):
    def on_step(self, trainer, row):
        if trainer.processes.rank == 1 and trainer.progress.step == 20:
            trainer.stop()


with processes(torch.device("cpu")) as together:
    trainer = Trainer(
        Config(**TINY), sys.argv[1], sys.argv[2], callbacks=[Stop()], processes=together
    )
    print(f"process {together.rank}: {trainer.train()['stopped_by']}", flush=True)
