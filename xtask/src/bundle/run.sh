#!/usr/bin/env bash
# Runs a bundle of device-ipc: the program, then every test executable in the directory of this script.
# Requires bash and coreutils, and python3 for a bundle with NIXL; uses nvidia-smi if it is installed.
set -uo pipefail

usage() {
    cat <<'END'
usage: run.sh [--log FILE] [--logs DIR] [--only PATTERN] [--backend NAME] [--timeout SECONDS]

  --log FILE         also write the output to this file
  --logs DIR         also write the output of each step to a file in this directory
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
logs=
only=
limit=300
while [[ $# -gt 0 ]]; do
    case $1 in
        --help | -h) usage; exit 0 ;;
        --log | --logs | --only | --backend | --timeout) [[ $# -ge 2 ]] || usage_error "$1 requires a value" ;;
        *) usage_error "unknown argument: $1" ;;
    esac
    case $1 in
        --log) log=$2 ;;
        --logs) logs=$2 ;;
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
if [[ -n $logs ]]; then
    mkdir -p -- "$logs" && logs=$(cd -- "$logs" && pwd) || usage_error "cannot write to $logs"
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
    [[ -z $logs ]] || cp -- "$scratch/output" "$logs/$name.log"
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
# The backend of the steps that do not select one.
backend=${DEVICE_IPC_BACKEND:-$([[ $devices -eq 0 ]] && echo mock || echo cuda)}

step devices "$DEVICE_IPC_BIN" devices
step demo "$DEVICE_IPC_BIN" demo
if [[ $devices -ge 2 ]]; then
    step demo-0-to-1 "$DEVICE_IPC_BIN" demo --from 0 --to 1
fi
conformance=device-ipc-cuda--conformance
# The suite prints passed and skipped cases with reasons, which is shown even on success.
[[ ! -x $here/$conformance ]] || step "$conformance" env RUST_TEST_NOCAPTURE=1 "$here/$conformance" --test-threads 4
for test in "$here"/*--*; do
    name=$(basename -- "$test")
    case $name in
        "$conformance" | device-ipc-nixl--*) ;;
        device-ipc-broker-tests--*)
            # On the real driver, where each process takes seconds to start.
            [[ $devices -ge 1 ]] || continue
            for theme in hostile_counters kill namespaces recycling rings staged timelines; do
                step "device-ipc-broker-tests--$theme" env DEVICE_IPC_CUDA_LIBRARY=libcuda.so.1 \
                    DEVICE_IPC_KILL_ROUNDS="${DEVICE_IPC_KILL_ROUNDS:-2}" "$test" "$theme::" --skip ascend
            done
            ;;
        device-ipc-cuda--suite)
            # Each theme in a process of its own: some reset the device or count its memory.
            for theme in capture contexts hardware kinds lifetimes mps staged timelines unavailable visible_devices; do
                step "device-ipc-cuda--$theme" "$test" "$theme::"
            done
            ;;
        device-ipc-cli--*)
            for theme in cuda program; do
                step "device-ipc-cli--$theme" "$test" "$theme::"
            done
            ;;
        device-ipc--*)
            for theme in changes channels channels_tcp cuda_elements cuda_hand_over cuda_nvrtc cuda_owner_drops cuda_raw_handle \
                debug_text descriptors elements exit; do
                step "device-ipc--$theme" "$test" "$theme::"
            done
            # Without a backend, it runs on the simulated drivers, which the bundle does not contain.
            step device-ipc--parameter_server env DEVICE_IPC_BACKEND="$backend" "$test" parameter_server::
            ;;
        *) [[ ! -x $test ]] || step "$name" "$test" ;;
    esac
done
if [[ $devices -ge 1 && -x $here/cuda-probes ]]; then
    # Shortened; by default the program takes several minutes per row.
    step device-ipc-soak "$here/device-ipc-soak" --rounds 2000 --kill-every 1000
    step cuda-probes "$here/cuda-probes" libcuda.so.1
fi

# Prints the folder of the CUDA runtime that UCX's modules for CUDA need.
cuda_runtime() {
    local folder
    while read -r folder; do
        [[ ! -e $folder/libcudart.so.13 ]] || { echo "$folder"; return; }
    done < <(
        python3 -c 'import glob, sys
for path in sys.path: print(*glob.glob(path + "/nvidia/*/lib"), sep="\n")'
        printf '%s\n' /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib
    )
}

# Copies over the network: two processes of this host, which do not open each other's memory. Each step has a short time limit.
if [[ -f $here/nixl.zip ]]; then
    python3 -m zipfile -e "$here/nixl.zip" "$scratch/nixl" || exit 2
    export DEVICE_IPC_NIXL="$scratch/nixl/.nixl_cu13.mesonpy.libs/libnixl_capi.so"
    # By default UCX logs to the standard output, where processes exchange lines.
    export UCX_NET_DEVICES=lo UCX_LOG_FILE=stderr
    runtime=$(cuda_runtime)
    say "" "libcudart.so.13: ${runtime:-not found; UCX does not recognise memory of CUDA without it}"
    [[ -z $runtime ]] || export LD_LIBRARY_PATH="$runtime${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    for module in libucm_cuda libuct_cuda; do
        say "$module.so: $(ldd "$scratch/nixl/nixl_cu13.libs/ucx/$module.so.0.0.0" 2>&1 | grep -E 'cuda|nvidia|not found' | tr -s '\t\n ' ' ')"
    done
    suite=$here/device-ipc-nixl--suite
    case_of() { limit=$1 step "$2" env RUST_TEST_THREADS=8 DEVICE_IPC_BACKEND="$3" UCX_TLS="$4" "$suite" "${@:5}"; }
    # Whether NIXL runs here at all, with host memory. On a machine with a GPU it needs UCX's transport for CUDA nevertheless.
    case_of 60 nixl-host-memory mock "tcp$([[ $devices -eq 0 ]] || echo ,cuda_copy)" road::state_dict_is_pulled road::pull_into_existing
    # The logs of NIXL and UCX show the reason if memory of the backend cannot be registered or copied.
    NIXL_LOG_LEVEL=DEBUG UCX_LOG_LEVEL=info \
        case_of 60 nixl-log "$backend" tcp,cuda_copy road::memory_of_another_host_is_pulled --nocapture
    case_of 400 nixl-tcp "$backend" tcp,cuda_copy road::
    # A copy by cuda_ipc does not need the exporter's process, and has ended before the test kills or suspends a process.
    case_of 120 nixl-cuda-ipc "$backend" tcp,cuda_copy,cuda_ipc road:: --skip killed --skip suspended --skip silent \
        --skip dropped_export_is_kept --skip failed_pull --skip in_a_copy --skip leave
    for transports in tcp,cuda_copy tcp,cuda_copy,cuda_ipc; do
        # shellcheck disable=SC2016 # the inner shell expands
        UCX_TLS=$transports limit=60 step "nixl-program-$transports" bash -c '
            "$DEVICE_IPC_BIN" send --backend "$0" --remote 127.0.0.1 --file w.ipc --receivers 1 --value 3 > sent 2>&1 &
            sender=$!
            until [[ -s w.ipc ]]; do kill -0 $sender || { cat sent; exit 1; }; sleep 0.1; done
            "$DEVICE_IPC_BIN" recv --backend "$0" --file w.ipc --copy pulled > received 2>&1
            code=$?
            [[ $code -eq 0 ]] || kill $sender
            wait $sender
            cat sent received
            [[ $code -eq 0 ]] && grep -q "(a copy" received && grep -q "mean=3.0" received' "$backend"
        UCX_TLS=$transports limit=200 step "nixl-bench-$transports" "$here/device-ipc-bench" --backend "$backend" \
            --row pull --rounds 5
    done
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
