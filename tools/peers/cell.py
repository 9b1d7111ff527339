#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One cell of `sherd bench matrix` by PyTorch or DeepSpeed: steps of a ViT on several ranks of this machine.

It starts from the weights, images, labels and learning rates that `sherd bench step --write-inputs DIR` wrote,
so that its losses can be compared with Sherd's. The last line it prints is one JSON object.

--engine:
  ddp             DistributedDataParallel: nothing is sharded
  fsdp2_grad_op   FSDP2; gathered parameters stay until backward (reshard_after_forward=False)
  fsdp2_full      FSDP2; parameters are gathered for forward and again for backward
  fsdp2_hybrid    the same inside each half of the ranks, which are copies of each other
  deepspeed1, deepspeed2, deepspeed3   ZeRO of this stage

The rules, which are Sherd's too: a unit is a block (FSDP2: fully_shard of each block; ZeRO-3: each block a leaf
module, no parameter stays gathered; DDP and ZeRO 1 and 2: buckets of a block's size), and one is gathered ahead.
Timed is a step: gradients to none, forward, loss, backward, the global gradient norm clipped, AdamW; not the barrier
before it. Steps of the warm-up are not timed. A step lasts as long as its slowest rank. With --precision bf16, FSDP2
and DeepSpeed compute and send in bf16 and keep fp32 weights for AdamW; DDP runs under torch.autocast and sends fp32
gradients.

Exit status: 3 where the engine is not installed, 1 for any other failure."""
import argparse
import glob
import importlib
import json
import os
import statistics
import struct
import sys
import tempfile
import time
import traceback

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # read when PyTorch is loaded, by the ranks too
    os.environ.pop(name, None)

NOT_INSTALLED = 3
ENGINES = ("ddp", "fsdp2_grad_op", "fsdp2_full", "fsdp2_hybrid", "deepspeed1", "deepspeed2", "deepspeed3")
REPLICAS = 2  # of fsdp2_hybrid


def find(module):
    """(its version, why there is none)"""
    try:
        return importlib.import_module(module).__version__, ""
    except Exception as error:  # DeepSpeed fails in other ways too where something does not fit
        return None, "%s: %s" % (type(error).__name__, str(error).splitlines()[0] if str(error) else "no reason given")


def engine_version(name):
    """Of torch or deepspeed; leaves with NOT_INSTALLED where it is missing."""
    if name == "deepspeed":
        find("torch")
    version, reason = find(name)
    if version is None:
        print("cell.py: %s cannot be imported by %s (%s); install it there, or name another Python with --python"
              % (name, sys.executable, reason), file=sys.stderr)
        sys.exit(NOT_INSTALLED)
    return version


def read_safetensors(path):
    """(metadata, [(name, array)]): one tensor after the other is read, so that none is held twice."""
    import numpy
    kinds = {"F32": numpy.float32, "F64": numpy.float64, "I64": numpy.int64}
    file = open(path, "rb")
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    begin = file.tell()

    def tensors():
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            file.seek(begin + entry["data_offsets"][0])
            count = (entry["data_offsets"][1] - entry["data_offsets"][0]) // numpy.dtype(kinds[entry["dtype"]]).itemsize
            yield key, numpy.fromfile(file, kinds[entry["dtype"]], count).reshape(entry["shape"])
    return header.pop("__metadata__", {}), tensors()


class Inputs:
    """Of the global batch. Everything about the model comes from the files."""
    def __init__(self, folder):
        import torch
        self.metadata, tensors = read_safetensors(os.path.join(folder, "inputs.safetensors"))
        tensors = {name: torch.from_numpy(array) for name, array in tensors}
        self.images, self.labels = tensors["images"], tensors["labels"]
        self.learning_rates = tensors["learning_rates"].tolist()
        expected = "gelu, cls pooling, drop 0, drop path 0, label smoothing 0, adamw"
        same = [float(x) for x in self.metadata["betas"].split(",") + [self.metadata["eps"],
                self.metadata["layer_norm_eps"]]] == [0.9, 0.999, 1e-8, 1e-6]
        if self.metadata["variant"] != expected or not same:
            sys.exit("cell.py: the inputs are of another model or optimizer (%s) than this script builds (%s, betas "
                     "0.9 and 0.999, eps 1e-8, LayerNorm's 1e-6)" % (self.metadata, expected))

    def take(self, args, rank):
        """This rank's images and labels."""
        need = args.ranks * args.micro_batch
        if len(self.labels) < need or len(self.learning_rates) < args.warmup + args.steps:
            sys.exit("cell.py: the inputs hold %d images and %d learning rates; this cell needs %d and %d"
                     % (len(self.labels), len(self.learning_rates), need, args.warmup + args.steps))
        mine = slice(rank * args.micro_batch, (rank + 1) * args.micro_batch)
        return self.images[mine].clone(), self.labels[mine].clone()


def make_model(folder, inputs):
    import torch
    from vit_train import VisionTransformer
    _, tensors = read_safetensors(os.path.join(folder, "weights.safetensors"))
    weights = {name: torch.from_numpy(array) for name, array in tensors}
    dim, channels, patch, _ = weights["patch_embed.proj.weight"].shape
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    ratio = weights["blocks.0.mlp.fc1.weight"].shape[0] / dim
    with torch.device("meta"):  # its own initial weights would cost time and memory
        model = VisionTransformer(inputs.images.shape[-1], patch, channels, weights["head.weight"].shape[0], dim,
                                  depth, int(inputs.metadata["heads"]), ratio)
    model.load_state_dict(weights, strict=True, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model


def peak_rss(reset=False):
    """The largest resident memory of this process; since the last reset, where the system allows one."""
    if reset:
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def sent_bytes(args, parameters, in_blocks):
    """By one rank in a step, as ring collectives send them; no peer counts what it sends."""
    n, size = args.ranks, 2 if args.precision == "bf16" else 4
    share = (n - 1) / n  # of a tensor: what a rank sends to gather it, or to reduce and scatter it
    if args.engine == "ddp":
        return int(2 * share * parameters * 4)
    if args.engine == "fsdp2_hybrid":
        shards = n // REPLICAS
        inside = (shards - 1) / shards * (parameters + in_blocks + parameters)
        return int((inside + 2 * (REPLICAS - 1) / REPLICAS * parameters / shards) * size)
    # FSDP2's root stays gathered until backward. ZeRO 1 and 2 of DeepSpeed 0.19 all-reduce buckets of gradients,
    # whatever reduce_scatter says (use_multi_rank_bucket_allreduce), and then gather parameters once.
    gathered, reduced = {"fsdp2_full": (parameters + in_blocks, parameters),
                         "fsdp2_grad_op": (parameters, parameters),
                         "deepspeed3": (2 * parameters, parameters)}.get(args.engine, (parameters, 2 * parameters))
    return int(share * (gathered + reduced) * size)


class Step:
    """What a rank trains: run(learning rate) is the timed step, and returns the loss of this rank's samples."""
    def __init__(self, args, rank, inputs):
        import torch
        import torch.nn.functional as F
        from vit_train import make_adamw
        self.device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
        self.images, self.labels = (x.to(self.device) for x in inputs.take(args, rank))
        model = make_model(args.inputs, inputs)
        block = sum(p.numel() for p in model.blocks[0].parameters())
        self.parameters = sum(p.numel() for p in model.parameters())
        self.in_blocks = block * len(model.blocks)
        decay, clip = float(inputs.metadata["weight_decay"]), float(inputs.metadata["clip_grad_norm"])
        if not args.engine.startswith("fsdp2"):  # FSDP2 moves shards, so that the whole need not fit
            model = model.to(self.device)
        if args.engine.startswith("deepspeed"):
            self.with_deepspeed(args, model, block, decay, clip)
            return
        autocast = args.engine == "ddp" and args.precision == "bf16"
        model, owner = self.wrap(args, rank, model, block)
        optimizer, self.optimizer = make_adamw(owner, inputs.learning_rates[0], decay)
        parameters = list(owner.parameters())

        def run(rate):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(args.device, torch.bfloat16, enabled=autocast):
                logits = model(self.images)
            loss = F.cross_entropy(logits.float(), self.labels)
            loss.backward()
            if clip > 0:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            return loss.detach()
        self.run = run

    def wrap(self, args, rank, model, block):
        """(what to call, whose parameters to train)"""
        import torch
        if args.engine == "ddp":
            return torch.nn.parallel.DistributedDataParallel(
                model, device_ids=[rank] if args.device == "cuda" else None, gradient_as_bucket_view=True,
                bucket_cap_mb=max(1, block * 4 / 2 ** 20)), model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        if args.engine == "fsdp2_hybrid":
            mesh = init_device_mesh(args.device, (REPLICAS, args.ranks // REPLICAS),
                                    mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(args.device, (args.ranks,))
        kind = torch.bfloat16 if args.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=kind)
        for unit in model.blocks:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=args.engine != "fsdp2_grad_op")
        fully_shard(model, mesh=mesh, mp_policy=policy)
        # On a GPU streams overlap by themselves. Over gloo the next block is gathered beside a block only where
        # it is asked for; Sherd does so too.
        if args.device == "cpu" and hasattr(model, "_set_unshard_async_op"):
            model._set_unshard_async_op(True)
            for unit, following in zip(model.blocks, model.blocks[1:]):
                unit.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([unit])
        # gloo averages more slowly than it sums (README.md); with the sum FSDP2 divides by itself.
        if args.device == "cpu" and hasattr(model, "set_force_sum_reduction_for_comms"):
            model.set_force_sum_reduction_for_comms(True)
        return model, model

    def with_deepspeed(self, args, model, block, decay, clip):
        import deepspeed
        import torch
        import torch.nn.functional as F
        from vit_train import Block, make_adamw
        stage = int(args.engine[-1])
        optimizer, self.optimizer = make_adamw(model, 1e-3, decay)
        zero = {"stage": stage, "overlap_comm": args.device == "cuda", "contiguous_gradients": True,
                "reduce_bucket_size": block}
        if stage == 3:
            zero.update(stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=block,
                        stage3_max_live_parameters=2 * block, stage3_max_reuse_distance=0)
            deepspeed.utils.set_z3_leaf_modules(model, [Block])
        else:
            zero["allgather_bucket_size"] = block
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={
            "train_micro_batch_size_per_gpu": args.micro_batch, "gradient_accumulation_steps": 1,
            "gradient_clipping": clip, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": args.precision == "bf16"}, "steps_per_print": 1 << 30})
        images = self.images.bfloat16() if args.precision == "bf16" else self.images

        def run(rate):
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(engine(images).float(), self.labels)
            engine.backward(loss)
            engine.step()  # clips, updates, and sets the gradients to none
            return loss.detach()
        self.run = run


def product_rate(args, device, size):
    """FLOP/s of one large product in the type that is computed in, the best of a few."""
    import torch
    kind = torch.bfloat16 if args.precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size ** 3 / best


def synchronize(device):
    import torch
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_rank(rank, args, folder):
    try:
        # Ranks meet by a file; DeepSpeed wants the names all the same, and names shared memory by them.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getppid() % 40000))
        import torch
        import torch.distributed as dist
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
        if args.device == "cuda":
            torch.cuda.set_device(device)
        group = {"init_method": "file://" + os.path.join(folder, "store"), "rank": rank, "world_size": args.ranks}
        backend = "nccl" if args.device == "cuda" else "gloo"
        if args.engine.startswith("deepspeed"):
            import deepspeed
            deepspeed.init_distributed(dist_backend=backend, **group)
        else:
            dist.init_process_group(backend, **group)
        base = peak_rss()
        step = Step(args, rank, inputs := Inputs(args.inputs))
        dist.barrier()
        size = args.product or (8192 if args.device == "cuda" else 2048)
        rates = [product_rate(args, device, size)]
        seconds, losses = [], []
        for i in range(args.warmup + args.steps):
            if i == args.warmup:
                peak_rss(reset=True)
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
            dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            losses.append(step.run(inputs.learning_rates[i]))
            synchronize(device)
            if i >= args.warmup:
                seconds.append(time.perf_counter() - start)
        mine = {"seconds": seconds, "losses": [x.item() for x in losses], "peak": peak_rss(), "base": base}
        if args.device == "cuda":
            mine.update(allocated=torch.cuda.max_memory_allocated(device),
                        reserved=torch.cuda.max_memory_reserved(device))
        dist.barrier()
        mine["rate"] = max(rates + [product_rate(args, device, size)])
        ranks = [None] * args.ranks
        dist.all_gather_object(ranks, mine)
        if rank == 0:
            with open(os.path.join(folder, "result"), "w") as file:
                json.dump({"optimizer": step.optimizer, "parameters": step.parameters, "in_blocks": step.in_blocks,
                           "ranks": ranks}, file)
        dist.barrier()
        status = 0
    except BaseException as error:
        traceback.print_exc()
        with open(os.path.join(folder, "error-%d" % rank), "w") as file:
            file.write("%s: %s" % (type(error).__name__, " ".join(str(error).split())[:400]))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # PyTorch 2.15 now and then aborts when a rank shuts down in the usual way


def check(args, parser):
    if min(args.steps, args.ranks, args.threads, args.micro_batch) < 1 or min(args.warmup, args.product) < 0:
        parser.error("--steps, --ranks, --threads and --micro-batch must be at least 1, --warmup and --product not "
                     "negative")
    if args.engine == "fsdp2_hybrid" and (args.ranks < 2 * REPLICAS or args.ranks % REPLICAS):
        parser.error("--engine fsdp2_hybrid: %d ranks cannot be %d groups of at least 2" % (args.ranks, REPLICAS))
    import torch
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        sys.exit("cell.py: %d ranks need a GPU each; PyTorch %s (CUDA %s) sees %d"
                 % (args.ranks, torch.__version__, torch.version.cuda, torch.cuda.device_count()))


def probe():
    result = {"python": sys.executable}
    for name in ("torch", "deepspeed"):
        result[name], result[name + "_missing"] = find(name)
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", action="store_true", help="print which of PyTorch and DeepSpeed is there, and end")
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--inputs", help="the folder that `sherd bench step --write-inputs` wrote")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--micro-batch", type=int, default=4, help="images of each rank")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--product", type=int, default=0, help="side of the product [8192 on cuda, else 2048]")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if args.probe:
        return probe()
    if args.engine is None or args.inputs is None:
        parser.error("--engine and --inputs are needed")
    versions = {"torch": engine_version("torch")}
    if args.engine.startswith("deepspeed"):
        versions["deepspeed"] = engine_version("deepspeed")
    check(args, parser)
    if sys.platform == "linux" and args.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    load = os.getloadavg()[0]
    import torch.multiprocessing
    with tempfile.TemporaryDirectory() as folder:
        # Each rank is its own process; the first that fails ends the others.
        try:
            torch.multiprocessing.spawn(run_rank, (args, folder), args.ranks)
        except Exception as ended:  # the last line says what the first rank that failed said
            said = sorted((os.path.getmtime(path), path) for path in glob.glob(os.path.join(folder, "error-*")))
            sys.exit("cell.py: rank %s failed: %s" % (said[0][1].rsplit("-", 1)[1], open(said[0][1]).read()) if said
                     else "cell.py: %s" % " ".join(str(ended).split()))
        with open(os.path.join(folder, "result")) as file:
            measured = json.load(file)
    ranks, in_blocks = measured.pop("ranks"), measured.pop("in_blocks")
    seconds = [max(times) for times in zip(*(r["seconds"] for r in ranks))]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    median = statistics.median(seconds)
    result = {"program": "cell.py", **versions, "engine": args.engine, "device": args.device,
              "precision": args.precision, "ranks": args.ranks, "threads": args.threads,
              "batch_size": args.ranks * args.micro_batch, **measured, "seconds_per_step": median,
              "seconds_lower_quartile": quartiles[0], "seconds_upper_quartile": quartiles[2], "seconds": seconds,
              "losses": [statistics.fmean(losses) for losses in zip(*(r["losses"] for r in ranks))],
              "images_per_second": args.ranks * args.micro_batch / median,
              "sent_bytes_per_step": sent_bytes(args, measured["parameters"], in_blocks),
              "matrix_flops_per_second": ranks[0]["rate"], "load_average": load,
              "base_resident_bytes_of_processes": [r["base"] for r in ranks],
              "peak_resident_bytes_of_processes": [r["peak"] for r in ranks]}
    if args.device == "cuda":
        result.update(device_allocated_bytes=max(r["allocated"] for r in ranks),
                      device_reserved_bytes=max(r["reserved"] for r in ranks))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
