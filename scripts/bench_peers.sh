#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/bench_peers.sh [--threads=1] [--rows=64,256] [--amx]: losses from hidden states beside the same in PyTorch, on this machine's CPU, in turns.
# --amx: heads for matrix tiles (opd::amx_head), in float as torch's.
# PYTHON names an interpreter that has torch; without one torch is installed from PyPI into build/peers, some 5 GB. torch gets what it is
# fastest with: an allocator that keeps its memory, huge pages, no cap on its product's instruction set. An optional tool: no build and
# no test needs it.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$opd_root" || exit 1
threads=1 rows=64,256 amx=()
for argument in "$@"; do
    case $argument in
    --threads=*) threads=${argument#*=} ;;
    --rows=*) rows=${argument#*=} ;;
    --amx) amx=(--amx) ;;
    *) opd_die "unknown argument $argument" ;;
    esac
done
python=${PYTHON-}
if [ -z "$python" ]; then
    python=$opd_root/build/peers/bin/python
    if [ ! -x "$python" ]; then
        python3 -m venv build/peers && build/peers/bin/pip install --quiet torch numpy
    fi
fi
opd_setup bench
opd_configure bench -DCMAKE_BUILD_TYPE=Release -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
    -DOPD_BUILD_EXAMPLES=OFF -DOPD_BUILD_BENCHMARKS=ON
opd_build bench --target bench_hidden
unset OPENBLAS_CORETYPE MKL_ENABLE_INSTRUCTIONS
for round in 1 2; do
    opd_say "round $round"
    build/bench/bench/bench_hidden --threads="$threads" --rows="$rows" ${amx[@]+"${amx[@]}"}
    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=64000000000 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 OMP_NUM_THREADS=$threads \
        MKL_NUM_THREADS=$threads "$python" bench/peer_torch_hidden.py --threads "$threads" --rows "$rows"
done
