#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Answers Meson's questions to pkg-config from the pack this file was copied into (see pack.py): a GPU
machine need not have pkg-config, and the pack's folder is wherever it was carried to."""
import json
import os
import sys

PACK = os.path.dirname(os.path.realpath(__file__))


def main(arguments):
    if arguments == ["--version"]:
        print("1.8.1")  # of the pkg-config whose answers these are like
        return 0
    with open(os.path.join(PACK, "manifest.json")) as file:
        packages = json.load(file)["packages"]
    names = [word for word in arguments if not word.startswith("-")]
    flags = [word.split("=")[0] for word in arguments if word.startswith("-")]
    for name in names:
        if name not in packages:
            print("Package %s is not in %s" % (name, PACK), file=sys.stderr)
            return 1
        for flag, field in (("--modversion", "version"), ("--cflags", "cflags"), ("--libs", "libs")):
            if flag in flags:
                print(packages[name][field].replace("{pack}", PACK))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
