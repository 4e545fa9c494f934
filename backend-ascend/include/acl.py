#!/usr/bin/env python3
"""Compares ``acl.h``, from which the bindings are made, with the vendor's headers.

The project builds without the vendor's toolkit, and a wrong constant or a missing argument is undefined behaviour on the
user's machine. So a C++ compiler compares each declaration with those of two CANN generations. Their
license does not permit redistribution, so pip downloads them, and they stay in the target directory. A self-test then inserts
mistakes into ``acl.h`` one by one, and checks that each is detected.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER = HERE / "acl.h"
SYMBOLS = HERE.parent / "src/symbols.rs"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))

# Wheels of torch-npu contain the headers of the CANN that they were built for. Functions that the older ones lack must be
# optional; the newer ones have all functions.
OLDER = ("2.9.0", "662e93507f2fbbe911f48a235c00bae4b60abc63da67b8421cdef90d3adb8a02")
NEWER = ("2.14.0", "2eb6358345efb1294d753a05a5ed99794060ac989cd8dae4b6836a1e831eabd9")
PREFIX = "torch_npu/include/third_party/acl/inc/"

ITEM = re.compile(
    r"""(?P<doc>(?:^\ *///[^\n]*\n)*)^\ *(?:
      static\ const\ (?P<constant_type>\w+)\ (?P<constant>\w+)\ =\ (?P<value>\w+);
    | \#define\ (?P<define>\w+)\ (?P<defined>\d+)$
    | typedef\ int\ (?P<status>\w+);
    | typedef\ void\ \*(?P<handle>\w+);
    | typedef\ void\ \(\*(?P<callback>\w+)\)\(void\ \*args\);
    | typedef\ (?P<kind>enum|struct)(?:\ \w+)?\ \{\n(?P<body>.*?)^\}\ (?P<type>\w+);
    | (?P<result>const\ char\ \*|\w+\ )(?P<function>\w+)\((?P<arguments>[^)]*)\);
    )\n""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
MEMBER = re.compile(r"(?P<doc>(?:^ *///[^\n]*\n)*)^ *(?:(?P<value>\w+) = (?P<number>\d+),|(?P<field>[^;]*);)\n", re.MULTILINE)
VARIABLE = re.compile(r"(?P<const>const )?(?P<base>\w+) (?P<pointers>\**)(?:const )?(?P<name>\w+)(?:\[(?P<length>\w+)\])?")


def items(text):
    """Returns the declarations of the header; raises for text that is none."""
    found = list(ITEM.finditer(text))
    rest = re.sub(r"^ *//[^\n]*|^#(?:ifndef|define|endif|include)[^\n]*", "", ITEM.sub("", text), flags=re.MULTILINE)
    if rest.strip():
        raise SystemExit(f"acl.h contains declarations that this program does not read:\n{rest.strip()}")
    return found


def argument_names_of(text):
    return [re.search(r"\w*$", one.strip())[0] for one in text.split(",") if one.strip() not in ("", "void")]


def checks(item):
    """Returns the symbols of a declaration, each with assertions in C++ that hold if the vendor's declaration is the same."""

    def same(left, right):
        return f"static_assert(std::is_same<{left}, {right}>::value);"

    if name := item["constant"] or item["define"]:
        yield name, f"static_assert({name} == {item['value'] or item['defined']});"
    elif item["kind"] == "enum":
        for member in MEMBER.finditer(item["body"]):
            name = member["value"]
            yield name, f"static_assert({name} == {member['number']}); {same(f'decltype({name})', item['type'])}"
    elif name := item["type"]:
        body = " ".join(re.sub("///.*", "", item["body"]).split())
        text = [f"namespace ours {{ struct {name} {{ {body} }}; }}"]
        text += [f"static_assert({of}(ours::{name}) == {of}(::{name}));" for of in ("sizeof", "alignof")]
        for member in MEMBER.finditer(item["body"]):
            field = VARIABLE.fullmatch(member["field"].strip())["name"]
            text.append(f"static_assert(offsetof(ours::{name}, {field}) == offsetof(::{name}, {field}));")
            text.append(same(f"decltype(ours::{name}::{field})", f"decltype(::{name}::{field})"))
        # Each structure has a namespace, so that its fields have the vendor's types.
        yield name, " ".join(text).replace("ours", f"ours_{name}")
    elif name := item["function"]:
        arguments = " ".join(item["arguments"].split())
        yield name, same(f"decltype({name})", f"{item['result']}({arguments})")


class Generation:
    """The vendor's headers of one generation."""

    def __init__(self, version, sha256):
        self.name = f"torch-npu {version}"
        self.directory = TARGET / f"verify-abi/torch-npu-{version}"
        if not self.directory.is_dir():
            self.download(version, sha256)
        self.text = self.compile("-E", "#include <acl/acl.h>\n").stdout + self.compile("-E", "-dM", "#include <acl/acl.h>\n").stdout

    def download(self, version, sha256):
        wheels = TARGET / "verify-abi/wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        requirement = wheels / "requirement.txt"
        requirement.write_text(f"torch-npu=={version} --hash=sha256:{sha256}\n")
        platform = ["--platform", "manylinux_2_28_aarch64", "--python-version", "310", "--implementation", "cp"]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *platform]
            + ["--require-hashes", "--dest", wheels, "--requirement", requirement],
            check=True,
        )
        with zipfile.ZipFile(next(wheels.glob(f"torch_npu-{version}-*.whl"))) as wheel:
            partial = self.directory.with_suffix(".partial")
            wheel.extractall(partial, [name for name in wheel.namelist() if name.startswith(PREFIX)])
            (partial / PREFIX).rename(self.directory)

    def compile(self, *arguments):
        """Compiles the last argument."""
        include = ["-I", self.directory, "-I", self.directory / "acl"]
        command = [os.environ.get("CXX", "c++"), "-x", "c++", "-std=c++17", "-w", *arguments[:-1], *include, "-"]
        return subprocess.run(command, input=arguments[-1], capture_output=True, text=True)

    def compare(self, text, argument_names=False):
        """Returns the symbols of our header that are absent, and those that differ."""
        absent, source = [], ["#include <acl/acl.h>", "#include <cstddef>", "#include <type_traits>"]
        different = set()
        for item in items(text):
            for name, check in checks(item):
                if not re.search(rf"\b{name}\b", self.text):
                    absent.append(name)
                    continue
                source.append(f'#line 1 "{name}"\n{check}')
                # C ignores the names of arguments, but they reveal swapped arguments of equal type.
                if argument_names and item["function"]:
                    theirs = re.search(rf"\b{name}\(([^)]*)\)", self.text)
                    if not theirs or argument_names_of(item["arguments"]) != argument_names_of(theirs[1]):
                        different.add(name)
        errors = self.compile("-fsyntax-only", "-fmax-errors=0", "\n".join(source) + "\n").stderr
        different.update(re.findall(r"^(\w+):\d+:\d+: error", errors, re.MULTILINE))
        if "error" in errors and not different:
            raise SystemExit(errors)
        return absent, sorted(different)


def lists_of_functions():
    """Returns the lists of functions in symbols.rs, by name."""
    lists = re.findall(r"const (\w+): &\[&str\] = &\[(.*?)\];", SYMBOLS.read_text(), re.DOTALL)
    return {name: re.findall(r'"(\w+)"', body) for name, body in lists}


def wrong_names(lists, declared, absent_in_older):
    """Returns the names in the lists that we do not declare, and required ones that the older headers lack."""
    unknown = [name for names in lists.values() for name in names if name not in declared]
    return unknown + [name for name in lists["REQUIRED"] if name in absent_in_older]


# A text in our header, its replacement, and the symbols that the comparison must report.
MISTAKES = [
    ("ACL_ERROR_RT_CONTEXT_NULL = 107002", "ACL_ERROR_RT_CONTEXT_NULL = 107022", "ACL_ERROR_RT_CONTEXT_NULL"),
    ("ACL_EVENT_IPC = 0x40", "ACL_EVENT_IPC = 0x80", "ACL_EVENT_IPC"),
    ("ACL_MEMCPY_DEVICE_TO_DEVICE = 3", "ACL_MEMCPY_DEVICE_TO_DEVICE = 30", "ACL_MEMCPY_DEVICE_TO_DEVICE"),
    ("Align32(void **devPtr, size_t size", "Align32(void **devPtr, uint32_t size", "aclrtMallocAlign32"),
    ("aclrtSetDevice(int32_t deviceId)", "aclrtSetDevice(uint32_t deviceId)", "aclrtSetDevice"),
    (
        "aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)",
        "aclrtStreamWaitEvent(aclrtEvent event, aclrtStream stream)",
        "aclrtStreamWaitEvent",
    ),
    ("int32_t deviceId, int32_t peerDeviceId)", "int32_t peerDeviceId, int32_t deviceId)", "aclrtDeviceCanAccessPeer"),
    ("PeerAccess(int32_t peerDeviceId, uint32_t flags)", "PeerAccess(int32_t peerDeviceId)", "aclrtDeviceEnablePeerAccess"),
    ("(aclrtIpcEventHandle handle", "(aclrtIpcEventHandle *handle", "aclrtIpcOpenEventHandle"),
    ("aclError aclrtFree(", "void aclrtFree(", "aclrtFree"),
    ("_HANDLE_SIZE 64", "_HANDLE_SIZE 65", "ACL_IPC_EVENT_HANDLE_SIZE"),
    ("[ACL_IPC_EVENT_HANDLE_SIZE]", "[65]", "aclrtIpcEventHandle"),
    (
        "    uint32_t id;\n    aclrtMemLocationType type;\n",
        "    aclrtMemLocationType type;\n    uint32_t id;\n",
        "aclrtMemLocation",
    ),
    ("    uint32_t pageSize;\n", "    int32_t pageSize;\n", "aclrtPtrAttributes"),
    ("    uint32_t rsv[4];\n", "", "aclrtPtrAttributes"),
    ("aclError aclrtFree(", "aclError aclrtUnknown(void);\naclError aclrtFree(", "aclrtUnknown"),
    ("#define ACL_IPC_EVENT_HANDLE_SIZE 64", "#define ACL_IPC_EVENT_HANDLE_SIZE 64\n#define ACL_UNKNOWN 1", "ACL_UNKNOWN"),
    ("STATUS_COMPLETE = 1,\n} aclrtEvent", "STATUS_COMPLETE = 1,\n    ACL_UNKNOWN = 2,\n} aclrtEvent", "ACL_UNKNOWN"),
]


def self_test(text, newer, declared, absent_in_older):
    for before, after, symbol in MISTAKES:
        if text.count(before) != 1:
            raise SystemExit(f"{before!r} occurs {text.count(before)} times in acl.h, not once")
        absent, different = newer.compare(text.replace(before, after), argument_names=True)
        if absent + different != [symbol]:
            raise SystemExit(f"with {after!r} in acl.h, the comparison reports {absent + different}, not {symbol}")
    later = absent_in_older[0]
    if wrong_names({"REQUIRED": [later], "OTHER": ["aclUnknown"]}, declared, absent_in_older) != ["aclUnknown", later]:
        raise SystemExit("a wrong list of functions is not detected")


def verify(text):
    older, newer = Generation(*OLDER), Generation(*NEWER)
    absent_in_older, different = older.compare(text)
    absent, different_from_newer = newer.compare(text, argument_names=True)
    declared = [item["function"] for item in items(text) if item["function"]]
    wrong = [f"{name} differs from {older.name}" for name in different]
    wrong += [f"{name} differs from {newer.name}" for name in different_from_newer]
    wrong += [f"{newer.name} has no {name}" for name in absent]
    absent_functions = [name for name in absent_in_older if name in declared]
    lists = lists_of_functions()
    wrong += [f"{name} in {SYMBOLS.name} is not declared, or required but not in {older.name}"
              for name in wrong_names(lists, declared, absent_functions)]
    if wrong:
        raise SystemExit("acl.h does not match the vendor's headers:\n" + "\n".join(wrong))
    print(f"{len(declared)} functions match the vendor's; {len(lists['REQUIRED'])} are required")
    print(f"not in {older.name}: {', '.join(absent_in_older)}")
    self_test(text, newer, declared, absent_functions)
    print(f"self-test: {len(MISTAKES) + 1} mistakes, all detected")


if __name__ == "__main__":
    verify(HEADER.read_text())
