#!/usr/bin/env bash
# Compiles samples of hicann/runtime, unmodified, against the simulator, and runs them. Nothing of the vendor's is in this
# repository: the first argument is a checkout of https://github.com/hicann/runtime.
#
#   git clone --depth 1 https://github.com/hicann/runtime /tmp/runtime
#   tests/sim-ascendcl/samples/run.sh /tmp/runtime
#
# docs/internals/ascend-rules.md has the table of what each prints.
set -euo pipefail

checkout=${1:?the path of a checkout of hicann/runtime}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
examples=$checkout/example
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cargo build --quiet --manifest-path "$root/Cargo.toml" -p device-ipc-sim-ascendcl
built=$(cd "$root" && cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/debug
cp "$built/libdevice_ipc_sim_ascendcl.so" "$work/libascendcl.so"

include=(-I "$checkout/include/external" -I "$examples" -I "$examples/1_basic_features/memory")
for header in "$checkout/pkg_inc" "$checkout/include"; do
    include+=(-I "$header")
done
compiler=${CXX:-c++}
flags=(-std=c++17 -O1 -w "${include[@]}" -L "$work" -Wl,-rpath,"$work")
failed=0

compile() { # OUTPUT SOURCES...
    local output=$1
    shift
    "$compiler" "${flags[@]}" -o "$output" "$@" "$here/kernels.cpp" \
        "$examples/1_basic_features/memory/file_ops.cpp" -lascendcl -lpthread
}

# Runs the programs of a sample side by side in a directory of its own, with a deadline; what they print goes to one file each.
sample() { # NAME MACHINE WANTED PROGRAM[:ARGUMENTS]...
    local name=$1 machine=$2 wanted=$3
    shift 3
    local folder=$work/${name//\//_} pids=() status=0
    rm -rf "$folder"
    mkdir -p "$folder/file"
    for program in "$@"; do
        local file=${program%%:*}
        compile "$folder/$file" "$examples/$name/$file.cpp" -I "$examples/$name"
    done
    cd "$folder"
    for program in "$@"; do
        local file=${program%%:*} arguments=()
        [[ $program == *:* ]] && read -ra arguments <<<"${program#*:}"
        DEVICE_IPC_SIM_ASCEND="$machine;shared-peers=samples$$" timeout 60 "./$file" "${arguments[@]}" >"$file.txt" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || status=$?
    done
    local verdict=ok
    if [[ $status -ne 0 ]] || ! grep -qE "$wanted" ./*.txt || grep '\[ERROR\]' ./*.txt | grep -qv 'returned error code 507035'; then
        verdict=FAILED failed=1
    fi
    echo "$verdict  $name  ($machine)"
    if [[ $verdict == ok ]]; then
        grep -hE "$wanted" ./*.txt | sort -u | sed 's/^/        /'
    else
        tail -n 20 ./*.txt | sed 's/^/        /'
    fi
    cd "$root"
}

for soc in 910b 910_93 950; do
    one="soc=$soc;devices=1"
    sample 1_basic_features/memory/10_ipc_memory_withpid "$one" '(Source|Destination) data: 123' proc_a proc_b
    sample 1_basic_features/memory/11_ipc_memory_withoutpid "$one" '(Source|Destination) data: 123' proc_a proc_b
    sample 1_basic_features/memory/7_physical_memory_sharing_withpid "$one" '(Source|Destination) data: [0-9]+' proc_a proc_b
    sample 1_basic_features/memory/8_physical_memory_sharing_withoutpid "$one" '(Source|Destination) data: [0-9]+' proc_a proc_b
    sample 2_advanced_features/notify/0_ipc_notify_withpid "soc=$soc;devices=4;two-links" '(Source|Destination) data: [0-9]+' proc_a proc_b
    sample 2_advanced_features/notify/1_ipc_notify_withoutpid "soc=$soc;devices=4;two-links" '(Source|Destination) data: [0-9]+' proc_a proc_b
    sample 1_basic_features/device/2_device_P2P "soc=$soc;devices=2;two-links" 'verify success' main
done
for soc in 910b 910_93; do
    sample 2_advanced_features/ipcevent/0_ipcevent "soc=$soc;devices=1" 'cleanup completed' proc_a proc_b
    sample 2_advanced_features/ipcevent/1_ipcevent_multi_device "soc=$soc;devices=2;two-links" 'completed' proc_a:1 "proc_b:1 1"
done
sample 1_basic_features/stream/1_stream_with_failure_mode "soc=910b;devices=1" 'result is:? [0-9]|507035' main
exit "$failed"
