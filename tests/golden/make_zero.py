#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small checkpoints of DeepSpeed's ZeRO from two processes on the CPU, and beside them what
DeepSpeed's own zero_to_fp32 makes of them.

    python3 tests/golden/make_zero.py tests/golden/distributed      # DeepSpeed 0.16 or later

Two groups of weights, odd sizes, a frozen weight, a tied one and a buffer. Adam's first moments are set to
twice the weights, its second ones to three times, so that they can be told.
"""
import argparse
import json
import os
import shutil
import socket
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.frozen = torch.nn.Linear(5, 5, bias=False)
        self.last = torch.nn.Linear(5, 1)
        self.frozen.weight.requires_grad_(False)
        self.tied = torch.nn.Linear(5, 1, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, images):
        return self.last(self.frozen(self.first(images))) * self.scale.sum()


def work(rank, port, folder, stage):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      LOCAL_RANK=str(rank), WORLD_SIZE="2")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(stage)
    model = Model()
    groups = [{"params": [model.first.weight, model.last.weight], "weight_decay": 0.1},
              {"params": [model.first.bias, model.last.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})
    loss = engine(torch.randn(2, 3).bfloat16()).float().sum()
    engine.backward(loss)
    engine.step()
    for vector, state in optimizer.optimizer.state.items():
        state["exp_avg"].copy_(2 * vector.detach())
        state["exp_avg_sq"].copy_(3 * vector.detach())
    engine.save_checkpoint(str(folder), tag="step1")
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    above = parser.parse_args().folder
    for stage in (1, 2, 3):
        folder = above / f"zero{stage}"
        shutil.rmtree(folder, ignore_errors=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.spawn(work, (port, folder, stage), nprocs=2)
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / name).unlink(missing_ok=True)
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="step1")
        expected = {name: {"shape": list(weight.shape), "values": weight.flatten().tolist()}
                    for name, weight in sorted(weights.items())}
        (above / f"zero{stage}.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
