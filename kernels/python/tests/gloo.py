"""Processes of one gloo group.

Gloo's threads may outlive the group with tensors that Python knows; when the interpreter ends under them, the process aborts now and then
("terminate called without an active exception", pytorch/pytorch#179291). So a process leaves at once when its part is done; what it
raises is told as ever."""
import os
import sys

import torch


def part(rank, world, folder, function):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    function(rank, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def processes(world, folder, function):
    torch.multiprocessing.spawn(part, (world, folder, function), nprocs=world)
