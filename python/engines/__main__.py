"""The commands of the package ``engines``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from . import carry, suite

TARGET = Path(__file__).parents[2] / "target/engines"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="download the wheels of wheels.txt from PyPI")
    fetch.add_argument("--python", default="3.12", help="the version of Python on the other machine")
    fetch.add_argument("--wheels", type=Path, default=TARGET / "wheels")
    pack = commands.add_parser("pack", help="make parts of less than 60 MiB of them")
    pack.add_argument("--wheels", type=Path, default=TARGET / "wheels")
    pack.add_argument("--out", type=Path, default=TARGET)
    pack.add_argument("--moe", action="store_true", help="with vLLM's kernels for mixtures of experts")
    unpack = commands.add_parser("unpack", help="unpack parts, which may arrive one by one")
    unpack.add_argument("parts", type=Path, nargs="+", metavar="PART", help="a folder part-N")
    unpack.add_argument("--site", type=Path, default=TARGET / "site")
    run = commands.add_parser("run", help="run the suite")
    run.add_argument("--site", type=Path, default=TARGET / "site")
    run.add_argument("--wheel", type=Path, help="a wheel of device-ipc; without it, that of the environment is tested")
    run.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cases by name, such as 'update-*'")
    run.add_argument("--out", type=Path, default=TARGET / "results")
    run.add_argument("--deadline", type=float, metavar="SECONDS", help="the limit of each case, instead of its own")
    run.add_argument("--list", action="store_true", help="print the names of the cases")
    case = commands.add_parser("case", help="run one case in this process; run calls it")
    case.add_argument("name")
    case.add_argument("--cases", default=suite.MODULE, metavar="MODULE", help="the module that registers the cases")
    case.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "fetch":
        carry.fetch(options.wheels, options.python)
        print(f"{len(carry.wheels())} wheels are in {options.wheels}")
    elif options.command == "pack":
        sizes = carry.pack(options.wheels, options.out, keep_moe=options.moe)
        for number, size in enumerate(sizes):
            print(f"{options.out / f'part-{number}'}: {size / (1 << 20):.1f} MiB")
    elif options.command == "unpack":
        missing = carry.unpack(options.parts, options.site)
        print(f"parts are missing: {missing}" if missing else f"unpacked in {options.site}")
    elif options.command == "case":
        suite.MODULE = options.cases
        suite.run_here(options.name, options.out)
    elif options.list:
        for one in suite.select(options.only):
            print(f"{one.name}: {one.text}")
    else:
        path = [options.site]
        with tempfile.TemporaryDirectory() as folder:
            if options.wheel is not None:
                carry.install_wheel(options.wheel, Path(folder))
                path.insert(0, Path(folder))
            environment = suite.environment(path, dict(os.environ))
            return suite.run(suite.select(options.only), options.out, environment, options.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
