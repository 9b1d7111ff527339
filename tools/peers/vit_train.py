#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The quick start's Vision Transformer on Fashion-MNIST, by PyTorch on the CPU in eager mode.

A peer for `sherd train`: the same model (patch 7, dim 64, depth 4, 4 heads, MLP ratio 2; 139,018
parameters) and recipe (AdamW, lr 1e-3, weight decay 0.05 except rank <= 1, position and class token;
1 warm-up epoch, cosine to 0; gradient norm clipped to 1; batch 128; no augmentation). It is as fast as
plain eager code gets: pictures normalised once into one tensor, fused attention and AdamW where this
PyTorch has them. vit_step.py uses the model of this file.
"""
import argparse
import gzip
import json
import math
import os
import platform
import sys
import time

try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ImportError as missing:
    sys.exit("This peer needs PyTorch (%s; Python is %s). On Debian: apt-get install "
             "python3-torch libopenblas0-openmp, then run it with /usr/bin/python3; elsewhere: "
             "pip install torch numpy" % (missing, sys.executable))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, hidden), "fc2": nn.Linear(hidden, dim)})

    def attention(self, x):
        batch, tokens, dim = x.shape
        qkv = self.attn["qkv"](x).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if hasattr(F, "scaled_dot_product_attention"):  # PyTorch 2.0
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q * (dim // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.attn["proj"](y.transpose(1, 2).reshape(batch, tokens, dim))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class VisionTransformer(nn.Module):
    """timm's plain ViT, its names of parameters and its initial weights; class token pooling."""

    def __init__(self, image, patch, channels, classes, dim, depth, heads, mlp_ratio):
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(channels, dim, patch, patch)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 1e-6)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, int(dim * mlp_ratio)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images):
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def make_adamw(model, lr, weight_decay, kind="auto"):
    """(optimizer, its kind): fused where this PyTorch has it on the CPU (2.4), else foreach or loop."""
    undecayed = [p for n, p in model.named_parameters()
                 if p.dim() <= 1 or n in ("pos_embed", "cls_token")]
    ids = {id(p) for p in undecayed}
    decayed = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": decayed, "weight_decay": weight_decay},
              {"params": undecayed, "weight_decay": 0.0}]
    for name in ("fused", "foreach", "loop") if kind == "auto" else (kind,):
        options = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[name]
        try:
            return torch.optim.AdamW(groups, lr=lr, **options), name
        except (RuntimeError, TypeError):  # not on the CPU, or not known
            if name == kind:
                sys.exit("PyTorch %s has no %s AdamW on the CPU" % (torch.__version__, name))


def matmul_rate(size=2048, repeats=5):
    """GFLOP/s of one large fp32 product, the best of a few."""
    a, b, best = torch.randn(size, size), torch.randn(size, size), math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * size ** 3 / best / 1e9


def describe(threads):
    """Sets the threads; what a reader must know to judge the numbers."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    info = {"torch": torch.__version__, "python": platform.python_version(),
            "threads": torch.get_num_threads(), "sdpa": hasattr(F, "scaled_dot_product_attention"),
            "load_average": os.getloadavg()[0], "matmul_gflops": matmul_rate()}
    for name in ("OPENBLAS_CORETYPE", "OMP_WAIT_POLICY"):
        if os.environ.get(name):
            info[name] = os.environ[name]
    return info


def print_info(info, out):
    print("torch %(torch)s, %(threads)d threads, 2048^3 matmul fp32 %(matmul_gflops).1f GFLOP/s, "
          "load average before %(load_average).1f" % info
          + ("" if info["sdpa"] else ", attention from plain operations (no F.scaled_dot_product_attention)")
          + "".join(", %s=%s" % (k, info[k]) for k in ("OPENBLAS_CORETYPE", "OMP_WAIT_POLICY") if k in info),
          file=out)
    if info["matmul_gflops"] < 15:
        print("warning: so slow a product means the reference BLAS or a busy machine, not a fair peer; "
              "on Debian: apt-get install libopenblas0-openmp", file=out)


def available_threads():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def load(directory, prefix):
    import numpy as np  # vit_step.py does without
    path = os.path.join(directory, prefix)
    try:
        with gzip.open(path + "-images-idx3-ubyte.gz") as f:
            images = np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(path + "-labels-idx1-ubyte.gz") as f:
            labels = np.frombuffer(f.read(), np.uint8, offset=8)
    except OSError as error:
        sys.exit("%s\non Debian: apt-get install dataset-fashion-mnist; else give --data" % error)
    images = torch.from_numpy(images.astype(np.float32)).div_(255).sub_(0.286).div_(0.353)
    return images, torch.from_numpy(labels.astype(np.int64))


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum())
                    for x, y in zip(images.split(1000), labels.split(1000)))
    model.train()
    return 100.0 * right / len(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches", type=int, help="stop after this many steps (a quick reading of speed)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist", help="folder of the .gz files")
    parser.add_argument("--optimizer", choices=["auto", "fused", "foreach", "loop"], default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the rest on stderr")
    args = parser.parse_args()
    out = sys.stderr if args.json else sys.stdout

    result = describe(args.threads)
    print_info(result, out)
    torch.manual_seed(args.seed)
    model = VisionTransformer(28, 7, 1, 10, dim=64, depth=4, heads=4, mlp_ratio=2)
    parameters = list(model.parameters())
    optimizer, kind = make_adamw(model, 1e-3, 0.05, args.optimizer)
    result.update(optimizer=kind, parameters=sum(p.numel() for p in parameters),
                  batch_size=args.batch_size, seed=args.seed, epochs=[])
    print("%d parameters, AdamW %s, batch %d" % (result["parameters"], kind, args.batch_size), file=out)
    images, labels = load(args.data, "train")
    test = load(args.data, "t10k")

    per_epoch = math.ceil(len(labels) / args.batch_size)
    total, step = args.epochs * per_epoch, 0
    stop = min(total, args.batches or total)
    for epoch in range(1, args.epochs + 1):
        if step == stop:
            break
        start, seen, losses = time.perf_counter(), 0, torch.zeros(())
        for index in torch.randperm(len(labels)).split(args.batch_size)[:stop - step]:
            lr = 1e-3 * (step + 1) / per_epoch if step < per_epoch else \
                0.5e-3 * (1 + math.cos(math.pi * (step - per_epoch) / (total - per_epoch)))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images[index]), labels[index])
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses += loss.detach()
            step, seen = step + 1, seen + len(index)
        seconds = time.perf_counter() - start
        record = {"epoch": epoch, "steps": step, "loss": float(losses) / math.ceil(seen / args.batch_size),
                  "seconds": seconds, "images_per_s": seen / seconds,
                  "test_accuracy": accuracy(model, *test)}
        result["epochs"].append(record)
        print("epoch %(epoch)d  step %(steps)d  loss %(loss).4f  %(images_per_s).0f images/s (training only)  "
              "test accuracy %(test_accuracy).2f %%" % record, file=out, flush=True)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
