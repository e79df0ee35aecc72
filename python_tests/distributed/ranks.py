"""Start the ranks of a job: `python -m python_tests.distributed.ranks RANKS MODULE ARGUMENTS`.

The ranks are forks of one process that has imported the job's module, as torchrun's workers would
each import it: that takes longer than most jobs.  What is there before the fork is out of the
garbage collector's sight, as Accelerate collects after every training.  Each has torchrun's
environment and calls the module's `main` with the arguments.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress

import torch._dynamo  # noqa: F401  which optimisers import
from torch.distributed import TCPStore


def main(ranks: int, module: str, *arguments: str) -> int:
    """Return 0 once every rank has ended well; the first that fails ends the others."""
    job = importlib.import_module(module)
    gc.freeze()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins this store, too
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    running = set()
    for rank in range(ranks):
        if not (child := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            status = 1
            try:
                job.main(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        running.add(child)
    while running:
        child, status = os.wait()
        running.remove(child)
        if status:
            for other in running:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
