#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes small files in the layout of torch.save, with nothing but the standard library.

    tests/golden/make_torch_files.py tests/golden/torch

Stand-ins for the classes that torch's pickles name are put under those names, so that pickle itself
writes the operations a real file has. The values are made up; what they are, the tests say too.
"""
import argparse
import collections
import io
import pickle
import struct
import sys
import types
import zipfile
from pathlib import Path

FORMATS = {"FloatStorage": "f", "DoubleStorage": "d", "LongStorage": "q", "IntStorage": "i",
           "ByteStorage": "B", "BoolStorage": "?"}
BYTES = {"HalfStorage": 2, "BFloat16Storage": 2, "UntypedStorage": 1, "ComplexFloatStorage": 8}


def module(name):
    found = sys.modules.get(name)
    if found is None:
        found = sys.modules[name] = types.ModuleType(name)
    return found


def name_in(module_name, name, value):
    value.__module__, value.__qualname__, value.__name__ = module_name, name, name
    setattr(module(module_name), name, value)
    return value


def stub(module_name, name):
    return name_in(module_name, name, lambda *arguments: None)


for name in list(FORMATS) + ["HalfStorage", "BFloat16Storage", "ComplexFloatStorage"]:
    name_in("torch", name, type(name, (), {}))
name_in("torch.storage", "UntypedStorage", type("UntypedStorage", (), {}))
module("torch").storage = module("torch.storage")
REBUILD = {name: stub("torch._utils", "_rebuild_" + name)
           for name in ("tensor_v2", "tensor_v3", "parameter")}
Sequential = name_in("torch.nn.modules.container", "Sequential", type("Sequential", (), {}))


class Global:
    """Pickled by its name alone, as torch.float32 is."""
    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


def constant(name):
    value = Global(name)
    value.__module__ = "torch"
    setattr(module("torch"), name, value)
    return value


class Storage:
    def __init__(self, kind, values):
        self.kind = kind
        self.data = values if isinstance(values, bytes) else struct.pack(
            f"<{len(values)}{FORMATS[kind]}", *values)
        self.numel = len(self.data) // (BYTES.get(kind) or struct.calcsize("<" + FORMATS[kind]))


def strides_of(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


class Tensor:
    def __init__(self, storage, shape, strides=None, offset=0, dtype=None):
        self.storage, self.shape, self.offset, self.dtype = storage, tuple(shape), offset, dtype
        self.strides = strides_of(shape) if strides is None else strides

    def __reduce__(self):
        start = (self.storage, self.offset, self.shape, self.strides, False,
                 collections.OrderedDict())
        if self.dtype is not None:
            return REBUILD["tensor_v3"], start + (self.dtype,)
        return REBUILD["tensor_v2"], start


class Parameter:
    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return REBUILD["parameter"], (self.tensor, True, collections.OrderedDict())


class StateDict(collections.OrderedDict):
    """An OrderedDict with attributes, as Module.state_dict() gives one."""
    def __reduce__(self):
        versions = collections.OrderedDict([("", {"version": 1})])
        return collections.OrderedDict, (), {"_metadata": versions}, None, iter(self.items())


class Pickler(pickle.Pickler):
    keys = None
    legacy = False  # as before PyTorch 1.6

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        key = self.keys.setdefault(id(value), (str(len(self.keys)), value))[0]
        place = "torch.storage" if value.kind == "UntypedStorage" else "torch"
        parts = ("storage", getattr(sys.modules[place], value.kind), key, "cpu", value.numel)
        return parts + (None,) if self.legacy else parts


def save(path, value, protocol=2, deflate=False):
    with zipfile.ZipFile(path, "w") as archive:
        def put(name, data, method=zipfile.ZIP_STORED):
            entry = zipfile.ZipInfo(f"{path.stem}/{name}")  # with zip's first date
            entry.compress_type = method
            archive.writestr(entry, data)

        out = io.BytesIO()
        pickler = Pickler(out, protocol=protocol)
        pickler.keys = {}
        pickler.dump(value)
        put("data.pkl", out.getvalue(), zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED)
        put("byteorder", "little")
        for key, storage in pickler.keys.values():
            put(f"data/{key}", storage.data)
        put("version", "3\n")


def save_legacy(path, value):
    magic, version = 0x1950a86a20f9469cfc6c, 1001
    with open(path, "wb") as file:
        pickle.dump(magic, file, protocol=2)
        pickle.dump(version, file, protocol=2)
        pickle.dump({"protocol_version": version, "little_endian": True,
                     "type_sizes": {"short": 2, "int": 4, "long": 4}}, file, protocol=2)
        pickler = Pickler(file, protocol=2)
        pickler.keys, pickler.legacy = {}, True
        pickler.dump(value)
        storages = dict(sorted(pickler.keys.values()))
        pickle.dump(list(storages), file, protocol=2)
        for storage in storages.values():
            file.write(struct.pack("<q", storage.numel) + storage.data)


def floats(count, start=0.0):
    return Storage("FloatStorage", [start + i for i in range(count)])


def vit_like(name):
    """Weights of a Vision Transformer: patch 2 of one channel, 2x4 pixels, dim 4, depth 1, 2 heads,
    hidden 8, 3 classes, each tensor counting on from the last, in eighths."""
    place = 0

    def tensor(*shape):
        nonlocal place
        count = 1
        for size in shape:
            count *= size
        place += count
        return Tensor(Storage("FloatStorage", [i / 8 for i in range(place - count, place)]), shape)

    dim, hidden = 4, 8
    weights = StateDict()
    weights[name("cls_token")] = tensor(1, 1, dim)
    weights[name("pos_embed")] = tensor(1, 3, dim)
    for key, shape in [("patch_embed.proj.weight", (dim, 1, 2, 2)), ("patch_embed.proj.bias", (dim,))]:
        weights[name(key)] = tensor(*shape)
    for key, shape in [("norm1.weight", (dim,)), ("norm1.bias", (dim,)),
                       ("attn.qkv.weight", (3 * dim, dim)), ("attn.qkv.bias", (3 * dim,)),
                       ("attn.proj.weight", (dim, dim)), ("attn.proj.bias", (dim,)),
                       ("norm2.weight", (dim,)), ("norm2.bias", (dim,)),
                       ("mlp.fc1.weight", (hidden, dim)), ("mlp.fc1.bias", (hidden,)),
                       ("mlp.fc2.weight", (dim, hidden)), ("mlp.fc2.bias", (dim,))]:
        full = "blocks.0." + key
        names = name(full)
        if isinstance(names, str):
            weights[names] = tensor(*shape)
        else:
            whole = tensor(*shape)
            rows = shape[0] // 3
            for part, part_name in enumerate(names):
                shape_part = (rows,) + shape[1:]
                offset = part * rows * (shape[1] if len(shape) == 2 else 1)
                weights[part_name] = Tensor(whole.storage, shape_part, offset=offset)
    for key, shape in [("norm.weight", (dim,)), ("norm.bias", (dim,)), ("head.weight", (3, dim)),
                       ("head.bias", (3,))]:
        weights[name(key)] = tensor(*shape)
    return weights


def transformers_name(generation):
    outside = {"cls_token": "vit.embeddings.cls_token", "pos_embed": "vit.embeddings.position_embeddings",
               "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
               "norm": "vit.layernorm", "head": "classifier"}
    inside = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    inside |= ({"attn.proj": "attention.output.dense", "mlp.fc1": "intermediate.dense",
                "mlp.fc2": "output.dense"} if generation == 4 else
               {"attn.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"})
    layer = "vit.encoder.layer.0." if generation == 4 else "vit.layers.0."
    parts = (["attention.attention." + part for part in ("query", "key", "value")]
             if generation == 4 else ["attention." + part for part in ("q_proj", "k_proj", "v_proj")])

    def name(timm):
        if timm in outside:
            return outside[timm]
        stem, last = timm.rsplit(".", 1)
        if not stem.startswith("blocks.0."):
            return f"{outside[stem]}.{last}"
        stem = stem[len("blocks.0."):]
        if stem == "attn.qkv":
            return [f"{layer}{part}.{last}" for part in parts]
        return f"{layer}{inside[stem]}.{last}"
    return name


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    base = floats(24)
    views = {"base": Tensor(base, (4, 6)), "transposed": Tensor(base, (6, 4), (1, 6)),
             "cut": Tensor(base, (2, 3), (6, 1), 8), "spread": Tensor(floats(3), (4, 3), (0, 1)),
             "cube": Tensor(base, (2, 3, 4), (1, 8, 2)),
             "scalar": Tensor(Storage("DoubleStorage", [3.5]), ()),
             "empty": Tensor(Storage("FloatStorage", []), (0, 4)),
             "half": Tensor(Storage("HalfStorage", struct.pack("<3e", 1, -2, 0.5)), (3,)),
             "bfloat": Tensor(Storage("BFloat16Storage", struct.pack("<2H", 0x3f80, 0xc000)), (2,)),
             "long": Tensor(Storage("LongStorage", [-1, 1 << 40]), (2,)),
             "bytes": Tensor(Storage("ByteStorage", [7, 255]), (2,)),
             "flags": Tensor(Storage("BoolStorage", [True, False]), (2,)),
             "complex": Tensor(Storage("ComplexFloatStorage", struct.pack("<2f", 1, 2)), (1,)),
             "small": Tensor(Storage("UntypedStorage", bytes(3)), (3,), dtype=constant("float8_e4m3fn"))}
    save(folder / "views.pt", views)
    save(folder / "views_protocol4.pt", views, protocol=4)
    save(folder / "views_deflated_pickle.pt", views, protocol=5, deflate=True)

    del views["small"]  # PyTorch itself cannot load untyped storages from that format
    save_legacy(folder / "views_legacy.pt", views)

    weights = vit_like(lambda name: name)
    save(folder / "vit.pt", weights)
    moments = {i: {"step": Tensor(floats(1, 3), ()), "exp_avg": Tensor(floats(4), (4,))}
               for i in range(2)}
    wrapped = StateDict((f"module._orig_mod.{key}", value) for key, value in weights.items())
    save(folder / "checkpoint.pt",
         {"epoch": 3, "best": 0.25, "name": "vit", "nothing": None, "big": 1 << 70,
          "args": argparse.Namespace(lr=0.1, betas=[0.9, 0.999], steps={1, 2}),
          "raw": b"ab\xff", "history": collections.defaultdict(list, {"loss": [2.5, 1.5]}),
          "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
          "model": wrapped, "scale": Parameter(Tensor(floats(1, 2), (1,)))})
    save(folder / "transformers4.bin", vit_like(transformers_name(4)))
    save(folder / "transformers5.bin", vit_like(transformers_name(5)))
    save(folder / "module.pt", Sequential())


if __name__ == "__main__":
    main()
