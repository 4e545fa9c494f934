#!/usr/bin/env bash
# Runs a bundle of device-ipc: the program, then every test executable in the directory of this script.
# Requires bash and coreutils; uses nvidia-smi if it is installed.
set -uo pipefail

usage() {
    cat <<'END'
usage: run.sh [--log FILE] [--only PATTERN] [--backend NAME] [--timeout SECONDS]

  --log FILE         also write the output to this file
  --only PATTERN     run only steps whose name contains this shell pattern
  --backend NAME     set DEVICE_IPC_BACKEND=NAME
  --timeout SECONDS  timeout of each step (default: 300)

Exit code: 0 if all steps passed, 1 if a step failed, 2 for invalid arguments.
END
}

usage_error() {
    echo "run.sh: $1" >&2
    usage >&2
    exit 2
}

log=
only=
limit=300
while [[ $# -gt 0 ]]; do
    case $1 in
        --help | -h) usage; exit 0 ;;
        --log | --only | --backend | --timeout) [[ $# -ge 2 ]] || usage_error "$1 requires a value" ;;
        *) usage_error "unknown argument: $1" ;;
    esac
    case $1 in
        --log) log=$2 ;;
        --only) only=$2 ;;
        --backend) export DEVICE_IPC_BACKEND=$2 ;;
        --timeout) limit=$2 ;;
    esac
    shift 2
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || usage_error "--timeout requires a number of seconds, not '$limit'"

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit 2
export DEVICE_IPC_BIN="$here/device-ipc"
export DEVICE_IPC_BROKER_AGENT="$here/broker-agent"
export RUST_BACKTRACE=1
# Tests that measure device memory must not run concurrently.
export RUST_TEST_THREADS=1

# Steps write to files, not to a pipe: a process that a failed test leaves behind would keep the pipe open.
scratch=$(mktemp -d) || exit 2
trap 'rm -rf -- "$scratch"' EXIT
if [[ -n $log ]]; then
    : > "$log" || usage_error "cannot write $log"
    log=$(cd -- "$(dirname -- "$log")" && pwd)/$(basename -- "$log")
else
    log=$scratch/log
fi
say() { printf '%s\n' "$@" | tee -a -- "$log"; }

names=()
results=()
seconds=()
failed=0

# step NAME COMMAND...: runs the command in an empty directory if NAME is selected.
step() {
    local name=$1 code start
    shift
    # shellcheck disable=SC2053 # --only takes a pattern
    [[ $name == *$only* ]] || return 0
    say "" "==== $name"
    mkdir -p -- "$scratch/work"
    start=$SECONDS
    (cd -- "$scratch/work" && timeout --kill-after=10 "$limit" "$@") > "$scratch/output" 2>&1 < /dev/null
    code=$?
    tee -a -- "$log" < "$scratch/output"
    rm -rf -- "$scratch/work"
    names+=("$name")
    results+=("$code")
    seconds+=($((SECONDS - start)))
    [[ $code -eq 0 ]] || failed=1
    case $code in
        0) say "---- $name: passed" ;;
        124 | 137) say "---- $name: FAILED with $code, timed out or killed (timeout $limit s)" ;;
        *) say "---- $name: FAILED with $code" ;;
    esac
}

say "device-ipc bundle on $(uname -srm), $(date -u +%Y-%m-%dT%H:%M:%SZ)"
say "backend: ${DEVICE_IPC_BACKEND:-selected by the library}"
devices=0
if command -v nvidia-smi > /dev/null; then
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,uuid --format=csv 2>&1 | tee -a -- "$log"
    devices=$(nvidia-smi -L 2> /dev/null | wc -l)
else
    say "nvidia-smi not found"
fi

step devices "$DEVICE_IPC_BIN" devices
step demo "$DEVICE_IPC_BIN" demo
if [[ $devices -ge 2 ]]; then
    step demo-0-to-1 "$DEVICE_IPC_BIN" demo --from 0 --to 1
fi
conformance=device-ipc-cuda--conformance
# The suite prints passed and skipped cases with reasons, which is shown even on success.
step "$conformance" env RUST_TEST_NOCAPTURE=1 "$here/$conformance"
for test in "$here"/*--*; do
    name=$(basename -- "$test")
    case $name in
        "$conformance") ;;
        device-ipc-broker-tests--*)
            # On the real driver, where each process takes seconds to start.
            [[ $devices -eq 0 ]] || step "$name" env DEVICE_IPC_CUDA_LIBRARY=libcuda.so.1 \
                DEVICE_IPC_KILL_ROUNDS="${DEVICE_IPC_KILL_ROUNDS:-2}" "$test" --skip ascend
            ;;
        # Without a backend, it runs on the simulated drivers, which the bundle does not contain.
        *--parameter_server) step "$name" env DEVICE_IPC_BACKEND="${DEVICE_IPC_BACKEND:-$([[ $devices -eq 0 ]] && echo mock || echo cuda)}" "$test" ;;
        *) [[ ! -x $test ]] || step "$name" "$test" ;;
    esac
done
if [[ $devices -ge 1 ]]; then
    # Shortened; by default the program takes several minutes per row.
    step device-ipc-soak "$here/device-ipc-soak" --rounds 2000 --kill-every 1000
    step cuda-probes "$here/cuda-probes" libcuda.so.1
fi

if [[ ${#names[@]} -eq 0 ]]; then
    say "no step matches '$only'"
    exit 2
fi
width=4
for name in "${names[@]}"; do
    width=$((${#name} > width ? ${#name} : width))
done
say "" "==== summary"
say "$(
    printf '%-*s  %4s  %7s\n' "$width" name exit seconds
    for index in "${!names[@]}"; do
        printf '%-*s  %4s  %7s\n' "$width" "${names[index]}" "${results[index]}" "${seconds[index]}"
    done
)"
exit "$failed"
