#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of Sherd in the safetensors library and the other way round. Needs safetensors and numpy.

    python3 tests/golden/check_safetensors.py build/release/tools/cli/sherd
    python3 tests/golden/check_safetensors.py --write tests/golden/safetensors/python.safetensors

The second writes the file that tests/unit/safetensors_test.cpp reads without either.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

failures = passes = 0


def check(good, what):
    global failures, passes
    passes, failures = passes + bool(good), failures + (not good)
    if not good:
        print(f"failed: {what}")


def tensors():
    """Every type that numpy and Sherd share, a scalar, an empty tensor, names that need care."""
    return {"f64": numpy.arange(6, dtype=numpy.float64).reshape(2, 3) / 3,
            "f32": numpy.array([1.5, -0.0, numpy.inf, -numpy.inf], dtype=numpy.float32),
            "f16": numpy.array([[0.1, 65504.0]], dtype=numpy.float16),
            "i64": numpy.array([-1, 1 << 40]), "i32": numpy.array([[7], [-8]], dtype=numpy.int32),
            "u8": numpy.arange(5, dtype=numpy.uint8), "scalar": numpy.array(2.5),
            "empty": numpy.zeros((0, 4), dtype=numpy.float32),
            'a "quoted" \\ name': numpy.ones(1, dtype=numpy.float32), "größe": numpy.zeros(2)}


def same(found, expected, what):
    check(sorted(found) == sorted(expected), f"{what}: the names {sorted(found)}")
    for name, array in expected.items():
        other = found.get(name)
        good = (other is not None and other.dtype == array.dtype and other.shape == array.shape
                and other.tobytes() == array.tobytes())
        check(good, f"{what}: {name}")


def compare(sherd, folder):
    def convert(*arguments):
        done = subprocess.run([sherd, "convert", *map(str, arguments)], capture_output=True, text=True)
        check(done.returncode == 0, done.stderr)

    expected = tensors()
    start = folder / "start.safetensors"
    save_file(expected, start, metadata={"format": "pt", "note": "ä"})
    # Through every format of Sherd, and out of each.
    convert(start, folder / "one.safetensors")
    same(load_file(folder / "one.safetensors"), expected, "one file")
    with safe_open(folder / "one.safetensors", "numpy") as file:
        check(file.metadata().get("note") == "ä", "metadata")
    convert(start, folder / "pieces", "--to", "checkpoint", "--pieces", 3)
    for piece in (folder / "pieces").glob("*.safetensors"):
        check(len(load_file(piece)) > 0, f"a file of a checkpoint: {piece.name}")
    convert(folder / "pieces", folder / "split", "--to", "split", "--max-file-size", "50B")
    index = json.loads((folder / "split/model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / "split" / file, "numpy") as opened:
            found[name] = opened.get_tensor(name)
    same(found, expected, "split files")
    check(index["metadata"]["total_size"] == sum(a.nbytes for a in expected.values()), "total_size")
    # What the library writes as several files.
    names = sorted(expected)
    theirs = folder / "theirs"
    theirs.mkdir()
    files = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, of in files.items():
        save_file({name: expected[name] for name in of}, theirs / file)
    (theirs / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {name: file for file, of in files.items() for name in of}}))
    convert(theirs, folder / "joined.safetensors")
    same(load_file(folder / "joined.safetensors"), expected, "split files of the library")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sherd", nargs="?")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write:
        save_file(tensors(), arguments.write)
        return
    if not arguments.sherd:
        parser.error("give the path of the sherd program")
    for name in ("python", "sherd"):  # who wrote it
        committed = Path(__file__).parent / f"safetensors/{name}.safetensors"
        same(load_file(committed), tensors(), f"the committed file of {name}")
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments.sherd, Path(folder))
    print(f"{passes} passed, {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
