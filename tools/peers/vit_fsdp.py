#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one training step of a ViT by PyTorch on several ranks of this machine (FSDP2 or DDP
over gloo, on the CPU, eager mode): forward, cross entropy, backward, gradient norm clipped to 1, AdamW, on
random pictures. The model is vit_step.py's.

--batch-size is the global batch. --shard:
  full     FSDP2, every block and the root sharded: parameters are gathered for forward and again for backward
  grad_op  the same, but gathered parameters stay until backward (reshard_after_forward=False)
  ddp      DistributedDataParallel: nothing is sharded, gradients are all-reduced
A step lasts as long as its slowest rank; ranks meet at a barrier before each, which is not timed. Whatever
the ranks and the sharding, the loss and the gradient norm printed are of the same global batch.
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # read when PyTorch is loaded, by the ranks too
    os.environ.pop(name, None)

from vit_step import CLASSES, FORMULA, PRESETS, F, describe, make_adamw, make_model, step_flops, torch
from vit_train import matmul_rate, nn

import torch.distributed as dist
import torch.multiprocessing


def peak_rss():
    """Of this process since it was started; ru_maxrss would also count what started it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def shard(model, args):
    """(what to call, whose parameters to train)"""
    if args.shard == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (args.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=args.shard == "full")
    fully_shard(model, mesh=mesh)  # the root's own, by FSDP2's default, stay gathered until backward
    if args.reduce == "sum" and hasattr(model, "set_force_sum_reduction_for_comms"):
        model.set_force_sum_reduction_for_comms(True)
    if args.prefetch:
        model._set_unshard_async_op(True)
        for block, following in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    return model, model


def run_rank(rank, args, folder):
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method="file://" + os.path.join(folder, "store"), rank=rank,
                            world_size=args.ranks)
    torch.manual_seed(0)  # the same weights and the same global batch everywhere
    model, owner = shard(make_model(args.model), args)
    share = args.batch_size // args.ranks
    mine = slice(rank * share, (rank + 1) * share)
    images = torch.randn(args.batch_size, 3, 224, 224)[mine].clone()
    labels = torch.randint(CLASSES, (args.batch_size,))[mine].clone()
    optimizer, kind = make_adamw(owner, 1e-3, 0.05, args.optimizer)
    parameters = list(owner.parameters())
    seconds = []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - start)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    ranks = [None] * args.ranks
    dist.all_gather_object(ranks, {"seconds": seconds, "loss": loss.item(), "peak_rss_bytes": peak_rss()})
    if rank == 0:
        with open(os.path.join(folder, "result"), "w") as file:
            json.dump({"optimizer": kind, "grad_norm": norm.item(), "ranks": ranks}, file)
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # PyTorch 2.15 now and then aborts when a rank shuts down in the usual way


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(PRESETS), default="vit_base_patch16_224")
    parser.add_argument("--shard", choices=["full", "grad_op", "ddp"], default="full")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--optimizer", choices=["auto", "fused", "foreach", "loop"], default="auto")
    parser.add_argument("--reduce", choices=["sum", "avg"], default="sum",
                        help="FSDP2 reduces gradients with a sum and divides, or with gloo's average (slower)")
    parser.add_argument("--prefetch", action="store_true",
                        help="FSDP2 gathers the next block while this one computes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the rest on stderr")
    args = parser.parse_args()
    if args.steps < 1 or args.warmup < 0 or args.ranks < 1 or args.threads < 1:
        parser.error("--steps, --ranks and --threads must be at least 1, --warmup not negative")
    if args.batch_size < 1 or args.batch_size % args.ranks:
        parser.error("--batch-size %d cannot be divided by %d ranks" % (args.batch_size, args.ranks))
    out = sys.stderr if args.json else sys.stdout

    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    result = describe(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (args, folder), args.ranks)
        with open(os.path.join(folder, "result")) as file:
            measured = json.load(file)
    ranks = measured.pop("ranks")
    before, after = result.pop("matmul_gflops"), matmul_rate()
    patch, dim, depth, _, parameters = PRESETS[args.model]
    seconds = [max(times) for times in zip(*(r["seconds"] for r in ranks))]
    median, flops = statistics.median(seconds), step_flops(args.batch_size, patch, dim, depth)
    limit = max(before, after) * args.ranks * args.threads
    result.update(measured, threads=args.threads, ranks=args.ranks, shard=args.shard, reduce=args.reduce,
                  prefetch=args.prefetch, model=args.model, parameters=parameters, batch_size=args.batch_size,
                  loss=statistics.mean(r["loss"] for r in ranks), seconds=seconds, median_seconds=median,
                  images_per_s=args.batch_size / median, flops_per_step=flops, gflops=flops / median / 1e9,
                  matmul_gflops_before=before, matmul_gflops_after=after,
                  share_of_matmul_rate=flops / median / 1e9 / limit,
                  peak_rss_bytes=sum(r["peak_rss_bytes"] for r in ranks),
                  peak_rss_bytes_of_ranks=[r["peak_rss_bytes"] for r in ranks])
    print("torch %(torch)s, %(ranks)d ranks of %(threads)d threads, load average before %(load_average).1f, "
          "2048^3 matmul fp32 at 1 thread %(matmul_gflops_before).1f GFLOP/s before, "
          "%(matmul_gflops_after).1f after" % result
          + ("" if result["sdpa"] else ", attention from plain operations"), file=out)
    print("%(model)s, %(parameters)d parameters, global batch %(batch_size)d, %(shard)s, AdamW %(optimizer)s, "
          "loss %(loss).6f, gradient norm %(grad_norm).6f\n"
          "median %(median_seconds).4f s/step   %(images_per_s).2f images/s   %(gflops).1f GFLOP/s   "
          "peak RSS of all ranks %(peak_rss_bytes)d bytes" % result, file=out)
    print("FLOPs per step = %s = %.4g; that is %.0f %% of ranks x threads x the best matmul"
          % (FORMULA, flops, 100 * result["share_of_matmul_rate"]), file=out)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
