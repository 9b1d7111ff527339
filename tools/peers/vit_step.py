#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one training step of a ViT by PyTorch on the CPU in eager mode: forward, cross
entropy, backward, AdamW, on random pictures (ImageNet's 1000 classes).

GFLOP/s counts the matrix products of the forward pass, 2 per multiply-add, times 3 (backward has twice
as many). With N tokens (class token included), D = dim, P = patch, L = depth, C = classes, per picture:
  forward = 2 (N-1) 3 P^2 D  +  L (2 N D 3D + 2 N N D + 2 N N D + 2 N D D + 2 2 N D 4D)  +  2 D C
"""
import argparse
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(PRESETS), default="vit_base_patch16_224")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32",
                        help="bf16: forward and loss under torch.autocast, as PyTorch recommends")
    parser.add_argument("--optimizer", choices=["auto", "fused", "foreach", "loop"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the rest on stderr")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    out = sys.stderr if args.json else sys.stdout

    result = describe(args.threads)
    print_info(result, out)
    model = make_model(args.model)
    patch, dim, depth, _, parameters = PRESETS[args.model]
    optimizer, kind = make_adamw(model, 1e-3, 0.05, args.optimizer)
    images, labels = torch.randn(args.batch_size, 3, 224, 224), torch.randint(CLASSES, (args.batch_size,))
    seconds = []
    for step in range(args.warmup + args.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - start)
    median, flops = statistics.median(seconds), step_flops(args.batch_size, patch, dim, depth)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    rate = max(result["matmul_gflops"], matmul_rate())
    result.update(matmul_gflops=rate, model=args.model, parameters=parameters, batch_size=args.batch_size,
                  precision=args.precision, optimizer=kind, loss=loss.item(), seconds=seconds,
                  median_seconds=median, images_per_s=args.batch_size / median, flops_per_step=flops,
                  gflops=flops / median / 1e9, share_of_matmul_rate=flops / median / 1e9 / rate,
                  peak_rss_bytes=peak)
    print("%(model)s, %(parameters)d parameters, batch %(batch_size)d, %(precision)s, AdamW %(optimizer)s\n"
          "median %(median_seconds).4f s/step   %(images_per_s).2f images/s   %(gflops).1f GFLOP/s   "
          "peak RSS %(peak_rss_bytes)d bytes" % result, file=out)
    print("FLOPs per step = %s = %.4g; best 2048^3 matmul %.1f GFLOP/s, so %.0f %% of it"
          % (FORMULA, flops, rate, 100 * result["share_of_matmul_rate"]), file=out)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
