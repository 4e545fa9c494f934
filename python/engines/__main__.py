"""The commands of the package ``engines``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import carry, suite

TARGETS = {name: Path(__file__).parents[2] / "target" / folder for name, folder in (("vllm", "engines"), ("sglang", "engines-sglang"))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--engine", choices=list(TARGETS), default="vllm")
    fetch = commands.add_parser("fetch", parents=[which], help="download the wheels of an engine from PyPI")
    fetch.add_argument("--python", default="3.12", help="the version of Python on the other machine")
    fetch.add_argument("--wheels", type=Path)
    pack = commands.add_parser("pack", parents=[which], help="make parts of less than 60 MiB of them")
    pack.add_argument("--wheels", type=Path)
    pack.add_argument("--out", type=Path)
    pack.add_argument("--moe", action="store_true", help="with vLLM's kernels for mixtures of experts")
    unpack = commands.add_parser("unpack", parents=[which], help="unpack parts, which may arrive one by one")
    unpack.add_argument("parts", type=Path, nargs="+", metavar="PART", help="a folder part-N")
    unpack.add_argument("--site", type=Path)
    run = commands.add_parser("run", parents=[which], help="run the suite")
    run.add_argument("--site", type=Path)
    run.add_argument("--wheel", type=Path, help="a wheel of device-ipc; without it, that of the environment is tested")
    run.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cases by name, such as 'update-*'")
    run.add_argument("--out", type=Path)
    run.add_argument("--deadline", type=float, metavar="SECONDS", help="the limit of each case, instead of its own")
    run.add_argument("--list", action="store_true", help="print the names of the cases")
    case = commands.add_parser("case", help="run one case in this process; run calls it")
    case.add_argument("name")
    case.add_argument("--cases", default=suite.MODULE, metavar="MODULES", help="the modules that register the cases")
    case.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "case":
        suite.MODULE = options.cases
        suite.run_here(options.name, options.out)
        return 0
    target = TARGETS[options.engine]
    if options.command == "fetch":
        folder = options.wheels or target / "wheels"
        carry.fetch(folder, options.python, options.engine)
        print(f"{len(carry.wheels(options.engine))} wheels are in {folder}")
    elif options.command == "pack":
        out = options.out or target
        sizes = carry.pack(options.wheels or target / "wheels", out, keep_moe=options.moe)
        for number, size in enumerate(sizes):
            print(f"{out / f'part-{number}'}: {size / (1 << 20):.1f} MiB")
    elif options.command == "unpack":
        site = options.site or target / "site"
        missing = carry.unpack(options.parts, site)
        print(f"parts are missing: {missing}" if missing else f"unpacked in {site}")
    else:
        suite.MODULE = suite.MODULES[options.engine]
        cases = suite.select(options.only)
        if options.list:
            for one in cases:
                print(f"{one.name}: {one.text}")
            return 0
        path = [options.site or target / "site"]
        with tempfile.TemporaryDirectory() as temporary:
            if options.wheel is not None:
                carry.install_wheel(options.wheel, Path(temporary))
                path.insert(0, Path(temporary))
            environment = suite.environment(path, dict(os.environ))
            return suite.run(cases, options.out or target / "results", environment, options.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
