#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a small checkpoint with torch.distributed.checkpoint, from two processes over gloo.

    python3 tests/golden/make_distributed.py tests/golden/distributed/dcp       # PyTorch 2.5 or later

Element i of a tensor, in row-major order, is i plus a number of the tensor's own, see VALUES.
"""
import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# name: (shape, added, type, how it lies on the ranks)
VALUES = {"model.rows.weight": ((5, 3), 100, torch.float32, Shard(0)),
          "model.columns.weight": ((2, 5), 200, torch.bfloat16, Shard(1)),
          "model.scale": ((2,), 300, torch.float32, Replicate()),
          "optimizer.state.rows.weight.exp_avg": ((5, 3), 400, torch.float32, Shard(0)),
          "optimizer.state.rows.weight.step": ((), 7, torch.float32, None)}


def work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    state = {"epoch": 3}
    for name, (shape, added, dtype, placement) in VALUES.items():
        count = torch.Size(shape).numel()
        tensor = (torch.arange(count, dtype=torch.float32) + added).reshape(shape).to(dtype)
        state[name] = tensor if placement is None else distribute_tensor(tensor, mesh, [placement])
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    folder = parser.parse_args().folder
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, folder), nprocs=2)


if __name__ == "__main__":
    main()
