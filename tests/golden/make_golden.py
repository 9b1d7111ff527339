#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden training runs of a Vision Transformer, by PyTorch in float64.

  make_golden.py --preset cls|mean --out DIR    one of the two small committed goldens
  make_golden.py --config golden.json --out DIR [--initial FILE]
                                                any other: model, data, loss, optimizer and schedule
                                                are read from the file, its recorded steps ignored
  make_golden.py --check DIR                    repeat the golden in DIR and compare all numbers

A golden is a directory with golden.json, initial.safetensors (F32), final_float64.safetensors and,
for data.set "idx", its own images and labels. README.md beside this script says what each field
means. Needs PyTorch 1.13 or newer and numpy; random numbers come from numpy alone, so the starting
point does not depend on PyTorch's version.
"""
import argparse
import gzip
import json
import math
import os
import struct
import sys

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as missing:
    sys.exit("make_golden.py needs PyTorch and numpy (%s; Python is %s). On Debian: apt-get install "
             "python3-torch, then run it with /usr/bin/python3; elsewhere: pip install torch numpy"
             % (missing, sys.executable))

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist
NOTE = ("PyTorch float64. grad_norm is the global 2-norm before clipping; gradients are multiplied by "
        "min(1, clip_grad_norm / (grad_norm + 1e-6)){null}. AdamW as PyTorch: p -= lr * weight_decay * p, "
        "then the Adam update. Undecayed: rank <= 1, pos_embed, cls_token. Learning rate of step s: "
        "base_lr (s+1)/warmup_steps while s < warmup_steps, then base_lr/2 (1 + cos(pi (s - "
        "warmup_steps)/(steps - warmup_steps))). Loss: mean cross-entropy with label smoothing.{pool}")


# ---- files ----------------------------------------------------------------------------------------

def write_safetensors(path, tensors):
    """{name: numpy array, all of one type} -> path, in the order of the names."""
    names = {np.dtype("<f4"): "F32", np.dtype("<f8"): "F64"}
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        blob = array.tobytes()
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_safetensors(path):
    with open(path, "rb") as f:
        data = f.read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        dtype = {"F32": "<f4", "F64": "<f8"}[entry["dtype"]]
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[start + begin:start + end], dtype).reshape(entry["shape"])
    return tensors


def write_idx(path, array):
    """uint8 array -> gzip-compressed IDX (MNIST's format), the same bytes every time."""
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(">%dI" % array.ndim, *array.shape)
    with open(path, "wb") as f:
        f.write(gzip.compress(header + array.astype(np.uint8).tobytes(), 9, mtime=0))


def read_idx(path):
    with gzip.open(path, "rb") as f:
        data = f.read()
    zero, kind, rank = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != 8:
        sys.exit("%s: not an IDX file of bytes" % path)
    shape = struct.unpack(">%dI" % rank, data[4:4 + 4 * rank])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def load_data(config, directory):
    """Normalised images [n, 1, H, W] in float64, and labels, in file order."""
    data = config["data"]
    if data["set"] == "fashion-mnist":
        prefix = {"train": "train", "test": "t10k"}[data["split"]]
        files = [os.path.join(FASHION_MNIST, prefix + suffix)
                 for suffix in ("-images-idx3-ubyte.gz", "-labels-idx1-ubyte.gz")]
        if not os.path.exists(files[0]):
            sys.exit("%s is missing: apt-get install dataset-fashion-mnist" % files[0])
    elif data["set"] == "idx":
        files = [os.path.join(directory, data[key]) for key in ("images", "labels")]
    else:
        sys.exit("data.set is '%s', expected fashion-mnist or idx" % data["set"])
    count = data["batch_size"] * config["schedule"]["steps"]
    images, labels = (read_idx(file) for file in files)
    if len(images) != len(labels) or len(images) < count:
        sys.exit("%s: %d images and %d labels, the steps need %d"
                 % (files[0], len(images), len(labels), count))
    pixels = torch.from_numpy(images[:count].astype(np.float64))[:, None]
    return (pixels / 255 - data["mean"]) / data["std"], torch.from_numpy(labels[:count].astype(np.int64))


# ---- the model, with timm's names -----------------------------------------------------------------

def inner_dim(model):
    """Width of q, k and v together over the heads: dim, unless head_dim is given."""
    return model["heads"] * model.get("head_dim", model["dim"] // model["heads"])


def shapes(model):
    dim, patch = model["dim"], model["patch"]
    hidden, inner = int(dim * model["mlp_ratio"]), inner_dim(model)
    result = {"cls_token": (1, 1, dim), "pos_embed": (1, 1 + (model["image"] // patch) ** 2, dim),
              "patch_embed.proj.weight": (dim, model["channels"], patch, patch),
              "patch_embed.proj.bias": (dim,)}
    linears = {"head": (model["classes"], dim)}
    norms = ["norm"]
    for i in range(model["depth"]):
        block = "blocks.%d." % i
        norms += [block + "norm1", block + "norm2"]
        linears.update({block + "attn.qkv": (3 * inner, dim), block + "attn.proj": (dim, inner),
                        block + "mlp.fc1": (hidden, dim), block + "mlp.fc2": (dim, hidden)})
    for name in norms:
        result[name + ".weight"] = result[name + ".bias"] = (dim,)
    for name, shape in linears.items():
        result[name + ".weight"] = shape
        if model["qkv_bias"] or not name.endswith("qkv"):
            result[name + ".bias"] = shape[:1]
    return result


def random_initial(model, seed):
    """Not a recipe for training: nothing is zero or one, so that every term is seen from step 0."""
    rng = np.random.RandomState(seed)
    tensors = {}
    for name, shape in sorted(shapes(model).items()):
        value = rng.standard_normal(shape)
        if name in ("cls_token", "pos_embed"):
            value *= 0.5
        elif "norm" in name and name.endswith("weight"):
            value = 1 + 0.1 * value
        elif name.endswith("bias"):
            value *= 0.1
        else:
            value /= math.sqrt(np.prod(shape[1:]))
        tensors[name] = value.astype("<f4")
    return tensors


def forward(model, p, images):
    dim, heads, inner = model["dim"], model["heads"], inner_dim(model)
    gelu = {"erf": F.gelu, "tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}[model["gelu"]]

    def norm(x, name):
        return F.layer_norm(x, (dim,), p[name + ".weight"], p[name + ".bias"], model["layer_norm_eps"])

    def linear(x, name):
        return F.linear(x, p[name + ".weight"], p.get(name + ".bias"))

    x = F.conv2d(images, p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], stride=model["patch"])
    x = x.flatten(2).transpose(1, 2)
    batch = x.shape[0]
    x = torch.cat([p["cls_token"].expand(batch, -1, -1), x], 1) + p["pos_embed"]
    for i in range(model["depth"]):
        block = "blocks.%d." % i
        qkv = linear(norm(x, block + "norm1"), block + "attn.qkv")
        q, k, v = qkv.reshape(batch, -1, 3, heads, inner // heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (inner // heads) ** -0.5).softmax(-1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(batch, -1, inner), block + "attn.proj")
        x = x + linear(gelu(linear(norm(x, block + "norm2"), block + "mlp.fc1")), block + "mlp.fc2")
    x = norm(x, "norm")
    return linear({"cls": lambda: x[:, 0], "mean": lambda: x[:, 1:].mean(1)}[model["pool"]](), "head")


# ---- the run --------------------------------------------------------------------------------------

def learning_rate(schedule, step):
    base, warmup, steps = schedule["base_lr"], schedule["warmup_steps"], schedule["steps"]
    if step < warmup:
        return base * (step + 1) / warmup
    return base / 2 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(config, initial, directory):
    """(recorded steps, final weights) of the run that config describes."""
    model, optim, data = config["model"], config["optimizer"], config["data"]
    if optim["name"] != "adamw" or config["schedule"]["name"] != "warmup_cosine" \
            or config["loss"]["name"] != "cross_entropy":
        sys.exit("this script knows adamw, warmup_cosine and cross_entropy only")
    expected = {name: tuple(shape) for name, shape in shapes(model).items()}
    got = {name: value.shape for name, value in initial.items()}
    if got != expected:
        sys.exit("the initial weights do not fit the model: %s"
                 % sorted(set(got.items()) ^ set(expected.items())))
    images, labels = load_data(config, directory)
    p = {name: torch.tensor(value.astype(np.float64), requires_grad=True)
         for name, value in sorted(initial.items())}
    undecayed = [name for name in p if p[name].dim() <= 1 or name in ("pos_embed", "cls_token")]
    groups = [{"params": [p[n] for n in p if n not in undecayed], "weight_decay": optim["weight_decay"]},
              {"params": [p[n] for n in undecayed], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=tuple(optim["betas"]), eps=optim["eps"])
    steps = []
    for step in range(config["schedule"]["steps"]):
        batch = slice(step * data["batch_size"], (step + 1) * data["batch_size"])
        loss = F.cross_entropy(forward(model, p, images[batch]), labels[batch],
                               label_smoothing=config["loss"]["label_smoothing"])
        adamw.zero_grad()
        loss.backward()
        grad_norm = math.sqrt(sum(float((t.grad ** 2).sum()) for t in p.values()))
        if optim["clip_grad_norm"] is not None:
            scale = min(1.0, optim["clip_grad_norm"] / (grad_norm + 1e-6))
            for t in p.values():
                t.grad *= scale
        lr = learning_rate(config["schedule"], step)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        steps.append({"step": step, "lr": lr, "loss": loss.item(), "grad_norm": grad_norm})
    return steps, {name: t.detach().numpy() for name, t in p.items()}


# ---- the committed goldens ------------------------------------------------------------------------

def preset(name):
    mean = name == "mean"
    return {
        "note": NOTE.format(
            null="; null means no clipping" if mean else "",
            pool=" Pooling mean: the final norm on all tokens, then the mean over the patch tokens "
                 "(not the class token), then the head." if mean else ""),
        "model": {"image": 14, "channels": 1, "classes": 5, "patch": 2, "dim": 18, "depth": 2, "heads": 2,
                  "head_dim": 7, "mlp_ratio": 1.5, "layer_norm_eps": 1e-05, "qkv_bias": False,
                  "gelu": "tanh", "pool": "mean"} if mean else
                 {"image": 14, "channels": 1, "classes": 10, "patch": 7, "dim": 20, "depth": 2, "heads": 4,
                  "mlp_ratio": 2, "layer_norm_eps": 1e-06, "qkv_bias": True, "gelu": "erf", "pool": "cls"},
        "data": {"set": "idx", "images": "images.idx3-ubyte.gz", "labels": "labels.idx1-ubyte.gz",
                 "split": "train", "order": "file; step s takes images [s*batch_size, (s+1)*batch_size)",
                 "batch_size": 6 if mean else 8, "mean": 0.45 if mean else 0.5,
                 "std": 0.3 if mean else 0.25},
        "loss": {"name": "cross_entropy", "label_smoothing": 0.0 if mean else 0.1},
        "optimizer": {"name": "adamw", "betas": [0.8, 0.95] if mean else [0.9, 0.999],
                      "eps": 1e-08 if mean else 1e-05, "weight_decay": 0.3 if mean else 0.05,
                      "clip_grad_norm": None if mean else 3.0},
        "schedule": {"name": "warmup_cosine", "base_lr": 0.005 if mean else 0.003,
                     "warmup_steps": 2 if mean else 3, "steps": 6 if mean else 8},
    }


def write_preset_data(config, directory, seed):
    """Noisy stripes whose direction and width depend on the class."""
    model, data = config["model"], config["data"]
    count, size = data["batch_size"] * config["schedule"]["steps"], model["image"]
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, model["classes"], count)
    y, x = np.mgrid[0:size, 0:size]
    angle = (np.pi * labels / model["classes"])[:, None, None]
    wave = np.sin((np.cos(angle) * x + np.sin(angle) * y) * (0.6 + 0.1 * labels[:, None, None])
                  + rng.uniform(0, 1, count)[:, None, None])
    grey = 127 + 80 * wave + 20 * rng.standard_normal(wave.shape)
    images = np.clip(np.rint(grey / 17) * 17, 0, 255)  # 16 levels, which compress well
    write_idx(os.path.join(directory, data["images"]), images)
    write_idx(os.path.join(directory, data["labels"]), labels)


def relative(got, expected):
    return abs(got - expected) / max(abs(expected), 1e-300)


def check(directory):
    with open(os.path.join(directory, "golden.json")) as f:
        config = json.load(f)
    steps, final = train(config, read_safetensors(os.path.join(directory, "initial.safetensors")), directory)
    if len(steps) != len(config["steps"]):
        sys.exit("%d steps, recorded %d" % (len(steps), len(config["steps"])))
    worst = {key: max(relative(a[key], b[key]) for a, b in zip(steps, config["steps"]))
             for key in ("lr", "loss", "grad_norm")}
    recorded = read_safetensors(os.path.join(directory, "final_float64.safetensors"))
    if recorded.keys() != final.keys():
        sys.exit("final weights: other names than recorded")
    worst["final weights"] = max(
        np.linalg.norm(final[n] - recorded[n]) / np.linalg.norm(recorded[n]) for n in final)
    for key, value in worst.items():
        print("%-14s largest relative difference %.2e" % (key, value))
    if max(worst.values()) > 1e-11:
        sys.exit("%s: NOT reproduced" % directory)
    print("%s: reproduced" % directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=["cls", "mean"])
    what.add_argument("--config", help="a golden.json")
    what.add_argument("--check", metavar="DIR")
    parser.add_argument("--initial", help="initial weights, safetensors (with --config)")
    parser.add_argument("--seed", type=int, default=20, help="of initial weights and made-up images")
    parser.add_argument("--out", metavar="DIR")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.check:
        return check(args.check)
    if not args.out:
        parser.error("--out DIR is needed")
    os.makedirs(args.out, exist_ok=True)
    if args.preset:
        config, directory = preset(args.preset), args.out
        write_preset_data(config, directory, args.seed)
    else:
        directory = os.path.dirname(os.path.abspath(args.config))
        with open(args.config) as f:
            config = json.load(f)
    initial = read_safetensors(args.initial) if args.initial else random_initial(config["model"], args.seed)
    config["steps"], final = train(config, initial, directory)
    write_safetensors(os.path.join(args.out, "initial.safetensors"), initial)
    write_safetensors(os.path.join(args.out, "final_float64.safetensors"), final)
    with open(os.path.join(args.out, "golden.json"), "w") as f:
        json.dump(config, f, indent=1)
        f.write("\n")
    for step in config["steps"]:
        print("step %(step)d  lr %(lr).6g  loss %(loss).6f  grad_norm %(grad_norm).4f" % step)


if __name__ == "__main__":
    main()
