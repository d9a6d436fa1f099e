#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/bench_peers.sh [--dense] [--threads=1] [--rows=64,256] [--amx]: losses from hidden states beside the same in
# PyTorch, on this machine's CPU, in turns; with --dense those of logits in memory (TRL's formulas, eager and
# torch.compile).
# --amx: heads for matrix tiles (opd::amx_head), in float as torch's.
# PYTHON names an interpreter that has torch; without one torch is installed from PyPI into build/peers, some 5 GB.
# torch gets what it is fastest with: an allocator that keeps its memory, huge pages, no cap on its product's
# instruction set. An optional tool: no build and no test needs it.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$opd_root" || exit 1
threads=1 rows=64,256 amx=() what=hidden
for argument in "$@"; do
    case $argument in
    --threads=*) threads=${argument#*=} ;;
    --rows=*) rows=${argument#*=} ;;
    --amx) amx=(--amx) ;;
    --dense) what=dense ;;
    *) opd_die "unknown argument $argument" ;;
    esac
done
python=${PYTHON-}
if [ -z "$python" ]; then
    python=$opd_root/build/peers/bin/python
    opd_venv "$opd_root/build/peers" 'torch numpy' torch numpy || exit 0
fi
[ $what = hidden ] || [ ${#amx[@]} = 0 ] || opd_die "--amx is of heads: not with --dense"
opd_setup bench
opd_configure bench -DCMAKE_BUILD_TYPE=Release -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
    -DOPD_BUILD_EXAMPLES=OFF -DOPD_BUILD_BENCHMARKS=ON
opd_build bench --target bench_$what
unset OPENBLAS_CORETYPE MKL_ENABLE_INSTRUCTIONS
peer() {
    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=64000000000 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 OMP_NUM_THREADS=$threads \
        MKL_NUM_THREADS=$threads "$python" "$@"
}
for round in 1 2; do
    opd_say "round $round"
    if [ $what = hidden ]; then
        build/bench/bench/bench_hidden --threads="$threads" --rows="$rows" ${amx[@]+"${amx[@]}"}
        peer bench/peer_torch_hidden.py --threads "$threads" --rows "$rows"
        continue
    fi
    build/bench/bench/bench_dense --quick --threads="$threads" --rows="${rows%%,*}"
    peer bench/peer_torch_dense.py --threads "$threads" --rows "${rows%%,*}"
done
