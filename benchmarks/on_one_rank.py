"""Run `bitcheck` under torchrun with a switch of the trainer in another form on one rank alone.

torchrun --nproc-per-node 4 benchmarks/on_one_rank.py 2 moe.dprob=atomic reference train --ep 4 ...

What a faulty kernel, driver or chip on one host does to a job: rank 2's experts add in an order of their own.
"""

from __future__ import annotations

import os
import sys

from bitcheck.cli import main

if __name__ == "__main__":
    rank, setting, *arguments = sys.argv[1:]
    main([*arguments, "--set", setting] if os.environ["RANK"] == rank else arguments)
