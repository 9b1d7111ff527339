#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one training step of a ViT by PyTorch, on the CPU or on a GPU: forward, cross entropy,
backward, AdamW, on random pictures (ImageNet's 1000 classes). Eager, or with --compile.

GFLOP/s counts the matrix products of the forward pass, 2 per multiply-add, times 3 (backward has twice
as many). With N tokens (class token included), D = dim, P = patch, L = depth, C = classes, per picture:
  forward = 2 (N-1) 3 P^2 D  +  L (2 N D 3D + 2 N N D + 2 N N D + 2 N D D + 2 2 N D 4D)  +  2 D C
"""
import argparse
import contextlib
import json
import resource
import statistics
import sys
import time

from vit_train import (F, VisionTransformer, available_threads, describe, make_adamw, matmul_rate, print_info,
                       torch)

PRESETS = {  # patch, dim, depth, heads, parameters (timm's count)
    "vit_tiny_patch16_224": (16, 192, 12, 3, 5717416),
    "vit_small_patch16_224": (16, 384, 12, 6, 22050664),
    "vit_base_patch16_224": (16, 768, 12, 12, 86567656),
    "vit_large_patch16_224": (16, 1024, 24, 16, 304326632),
    "vit_huge_patch14_224": (14, 1280, 32, 16, 632045800),
}
CLASSES = 1000
FORMULA = "3 x batch x [2(N-1)3P^2 D + L(24 N D^2 + 4 N^2 D) + 2DC]"


def step_flops(batch, patch, dim, depth):
    n = (224 // patch) ** 2 + 1
    return 3 * batch * (2 * (n - 1) * 3 * patch ** 2 * dim + depth * (24 * n * dim ** 2 + 4 * n * n * dim)
                        + 2 * dim * CLASSES)


def make_model(name):
    patch, dim, depth, heads, parameters = PRESETS[name]
    model = VisionTransformer(224, patch, 3, CLASSES, dim, depth, heads, 4)
    count = sum(p.numel() for p in model.parameters())
    if count != parameters:
        sys.exit("%s: %d parameters, expected %d" % (name, count, parameters))
    return model


def device_rate(precision, size=8192, repeats=5):
    """GFLOP/s of one large product on the GPU, the best of a few."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device="cuda").to(kind) for _ in range(2))
    return 2 * size ** 3 / min(timed_on_device(lambda: torch.mm(a, b), repeats, 1)) / 1e9


def timed_on_device(step, steps, warmup):
    """Seconds of each step by events of the GPU: the host enqueues ahead and waits once, at the end."""
    pairs = []
    for i in range(warmup + steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        if i >= warmup:
            pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def timed_on_host(step, steps, warmup):
    seconds = []
    for i in range(warmup + steps):
        start = time.perf_counter()
        step()
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(PRESETS), default="vit_base_patch16_224")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, help="steps before them [cpu 1, cuda 3]")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32",
                        help="bf16: forward and loss under torch.autocast, as PyTorch recommends")
    parser.add_argument("--optimizer", choices=["auto", "fused", "foreach", "loop"], default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model; compiling is not timed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the rest on stderr")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch %s (CUDA %s) sees no GPU here" % (torch.__version__, torch.version.cuda))
    if args.warmup is None:
        args.warmup = 3 if cuda else 1
    out = sys.stderr if args.json else sys.stdout

    result = describe(args.threads)
    if cuda:
        result.update(gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda)
        print("torch %(torch)s, CUDA %(cuda)s, %(gpu)s" % result, file=out)
    else:
        print_info(result, out)
    with torch.device("cuda") if cuda else contextlib.nullcontext():  # initial weights are slow on the host
        model = make_model(args.model)
    patch, dim, depth, _, parameters = PRESETS[args.model]
    optimizer, kind = make_adamw(model, 1e-3, 0.05, args.optimizer)
    images = torch.randn(args.batch_size, 3, 224, 224, device=args.device)
    labels = torch.randint(CLASSES, (args.batch_size,), device=args.device)
    forward = torch.compile(model) if args.compile else model
    losses = []

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        losses[:] = [loss.detach()]

    rate = device_rate(args.precision) if cuda else result["matmul_gflops"]
    seconds = (timed_on_device if cuda else timed_on_host)(step, args.steps, args.warmup)
    rate = max(rate, device_rate(args.precision) if cuda else matmul_rate())
    median, flops = statistics.median(seconds), step_flops(args.batch_size, patch, dim, depth)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result.update(device=args.device, matmul_gflops=rate, model=args.model, parameters=parameters,
                  batch_size=args.batch_size, precision=args.precision, compiled=args.compile, optimizer=kind,
                  loss=losses[0].item(), seconds=seconds, median_seconds=median,
                  images_per_s=args.batch_size / median, flops_per_step=flops, gflops=flops / median / 1e9,
                  share_of_matmul_rate=flops / median / 1e9 / rate, peak_rss_bytes=peak)
    if cuda:
        result["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    print("%(model)s, %(parameters)d parameters, batch %(batch_size)d, %(precision)s, AdamW %(optimizer)s" % result
          + (", compiled" if args.compile else "")
          + "\nmedian %(median_seconds).4f s/step   %(images_per_s).2f images/s   %(gflops).1f GFLOP/s   " % result
          + ("peak %(peak_device_bytes)d bytes on the GPU" if cuda else "peak RSS %(peak_rss_bytes)d bytes") % result,
          file=out)
    print("FLOPs per step = %s = %.4g; best %s matmul %.1f GFLOP/s, so %.0f %% of it"
          % (FORMULA, flops, "8192^3 " + args.precision if cuda else "2048^3", rate,
             100 * result["share_of_matmul_rate"]), file=out)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
