#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/gpu.sh           on a machine with a GPU: builds the device tests and the benchmark with nvcc, runs the tests,
#                          some of them under compute-sanitizer, then the benchmark. In $OUT, or build/gpu: gpu.txt with
#                          all that was printed, gpu.json with the outcomes and figures. Nine minutes at most, mostly
#                          the compiler's.
# scripts/gpu.sh --pack    on the machine before it: copies the one header that is not CUDA's or opd's (doctest) to
#                          .gpu-pack/, which git ignores, for a machine that has nothing but CUDA and a C++20 compiler
# scripts/gpu.sh --build   compiles only; needs nvcc and no GPU
# scripts/gpu.sh --build-library [parts]   libopd and libopd_cuda, of these parts (ON: all; "dense;support") and of
#                          9.0 or the GPU's architecture: --run then tests them through PyTorch. Half an hour of two
#                          processors for all
# scripts/gpu.sh --run     runs what --build left in build/gpu/work, on another machine too: no time with a GPU goes to
#                          the compiler
#
# Without a GPU it prints SKIPPED and builds nothing.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pack=$root/.gpu-pack
out=${OUT-$root/build/gpu}
work=$root/build/gpu/work
started=$SECONDS

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

case ${1-} in
--pack)
    header=$(printf '#include <doctest/doctest.h>\n' | "${CXX-c++}" -x c++ -M - | grep -oE '[^ ]*/doctest/doctest\.h' | head -1)
    [ -n "$header" ] || die "doctest/doctest.h was not found (Debian: doctest-dev)"
    mkdir -p "$pack/doctest" && cp "$header" "$pack/doctest/" && echo "packed $pack/doctest/doctest.h"
    exit
    ;;
"" | --build | --build-library | --run) ;;
*) die "gpu.sh takes --pack, --build, --build-library, --run or nothing" ;;
esac

if [[ "${1-}" != --build* ]] && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "SKIPPED: no GPU on this machine"
    exit 0
fi
PATH=$PATH:/usr/local/cuda/bin
[ "${1-}" = --run ] || command -v nvcc >/dev/null || die "nvcc was not found"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
arch=sm_${capability:-90}
mkdir -p "$out" "$work" || exit 1
log=$out/gpu.txt
: >"$log"
say() { printf '== %s\n' "$*" | tee -a "$log"; }

if [ "${1-}" = --build-library ]; then
    cmake -S "$root" -B "$root/build/gpu/library" -DCMAKE_BUILD_TYPE=Release -DOPD_BUILD_LIBRARY=ON "-DOPD_LIBRARY_CUDA=${2-ON}" \
        "-DOPD_CUDA_ARCHITECTURES=${arch#sm_}" -DOPD_BUILD_TESTS=OFF -DOPD_BUILD_EXAMPLES=OFF -DOPD_BUILD_BENCHMARKS=OFF &&
        cmake --build "$root/build/gpu/library" -j "$(nproc)" --target opd_c opd_c_cuda || die "libopd_cuda does not build"
    mkdir -p "$work/lib"
    find "$root/build/gpu/library" -name 'libopd*.so.1' -exec cp -L {} "$work/lib/" \;
    ls -l "$work/lib"
    exit
fi

# --- build: all programs at once --------------------------------------------------------------------------------------
programs="cuda_dense cuda_sparse cuda_draw cuda_hidden cuda_shards cuda_refusals bench_cuda"
build() {
    local name=$1 source=$root/tests/backends/$1_test.cu main=$work/main.o
    [ "$name" = bench_cuda ] && source=$root/bench/bench_cuda.cu main=
    # shellcheck disable=SC2086 # no main is no word
    timeout 400 nvcc -std=c++20 -O2 "-arch=$arch" "-I$root/include" "-I$root/tests" "-I$pack" -w "$source" $main -o "$work/$name" -lcublas
}
say "$(nvidia-smi -L 2>/dev/null | head -1) $(nvcc --version 2>/dev/null | tail -1) $arch"
if [ "${1-}" = --run ]; then
    for name in $programs; do
        [ -x "$work/$name" ] || die "$work/$name is missing: run scripts/gpu.sh --build first"
    done
else
    printf '#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN\n#include <doctest/doctest.h>\n' >"$work/main.cpp"
    nvcc -std=c++20 -O1 "-I$pack" -c "$work/main.cpp" -o "$work/main.o" 2>&1 | tee -a "$log"
    [ -e "$work/main.o" ] || die "doctest/doctest.h is missing: run scripts/gpu.sh --pack where it is installed"
    jobs_at_once=$(nproc)
    for name in $programs; do
        rm -f "$work/$name"
        build "$name" >"$work/$name.log" 2>&1 &
        while [ "$(jobs -rp | wc -l)" -ge "$jobs_at_once" ]; do wait -n; done
    done
    wait
    for name in $programs; do
        cat "$work/$name.log" >>"$log"
        [ -x "$work/$name" ] || { cat "$work/$name.log" && die "$name does not build"; }
    done
    say "built after $((SECONDS - started)) s"
fi
[ "${1-}" = --build ] && exit 0

# --- run --------------------------------------------------------------------------------------------------------------
failed=0 outcomes=
# run <name> <seconds> <command...>: its output to the log, its outcome to the summary. What is skipped where there is a
# GPU failed.
run() {
    local name=$1 limit=$2 begin=$SECONDS left=$((530 - (SECONDS - started))) status told=passed
    shift 2
    say "$name"
    : >"$work/last"
    timeout "$((left < 1 ? 1 : left < limit ? left : limit))" "$@" 2>&1 | tee -a "$log" "$work/last"
    status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || told="failed with exit status $status" failed=1
    if grep -q SKIPPED "$work/last"; then told="failed: skipped" failed=1; fi
    outcomes+="${outcomes:+,}\"$name\":\"$told\""
    say "$name: $told, $((SECONDS - begin)) s"
}
for name in cuda_dense cuda_sparse cuda_draw cuda_hidden cuda_shards cuda_refusals; do run "$name" 90 "$work/$name"; done
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
        run "$tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 "$work/cuda_dense" -tc="*env.on_bad*,*captured*"
    done
    run memcheck_hidden 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$work/cuda_hidden" -tc="*bad rows*,*captured*"
    run memcheck_draw 45 compute-sanitizer --tool memcheck --error-exitcode 9 "$work/cuda_draw" -tc="*captured*"
    run memcheck_shards 45 compute-sanitizer --tool memcheck --error-exitcode 9 "$work/cuda_shards" -tc="*drawn tokens*,*heads*"
else
    say "compute-sanitizer: not on this machine"
fi
figures=$work/bench.json
rm -f "$figures"
run bench_cuda 150 "$work/bench_cuda" "$figures"
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    run torch 90 python3 "$root/bench/peer_torch.py"
fi
if [ -e "$work/lib/libopd.so.1" ]; then
    export OPD_LIBRARY=$work/lib/libopd.so.1
    run opd_torch 120 bash -c "cd '$root/python' && python3 -m unittest -v tests.test_torch_cuda"
fi
{
    printf '{"arch":"%s","seconds":%d,"outcomes":{%s},"bench":' "$arch" $((SECONDS - started)) "$outcomes"
    if [ -e "$figures" ]; then cat "$figures"; else echo null; fi
    echo '}'
} >"$out/gpu.json.new" && mv "$out/gpu.json.new" "$out/gpu.json"
say "written: $log, $out/gpu.json; $((SECONDS - started)) s"
exit $failed
