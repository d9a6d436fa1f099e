#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/bench_model.sh [rounds]: the trainer's transformer beside PyTorch's transformers, on the CPU: tokens a second
# of training and of decoding at batches of 1 and 16, and peak memory, of random weights of the Qwen3 family; the
# trainer's in float and in bfloat16. In turns, so many rounds (3). OPD_SHAPE=width,layers,vocabulary (768,12,32000: 0.1
# billion weights); OPD_THREADS; OPD_HF_VENV. SKIPPED where PyPI cannot be had.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

venv=${OPD_HF_VENV:-$opd_root/build/venv-hf}
opd_venv "$venv" 'torch transformers' torch transformers || exit 0
program=${OPD_COMPARE_MODEL-$opd_root/build/demo/examples/trainer/opd-compare-model}
if [ -z "${OPD_COMPARE_MODEL-}" ]; then opd_demo_program opd-compare-model; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error PYTHONWARNINGS=ignore
threads=${OPD_THREADS:-$(nproc)}
peer=("$venv/bin/python" "$opd_root/bench/peer_torch_model.py" "$folder")
"${peer[@]}" --make "${OPD_SHAPE:-768,12,32000}"
for round in $(seq "${1:-3}"); do
    opd_say "round $round"
    "$program" "$folder" --threads "$threads"
    "$program" "$folder" --threads "$threads" --bfloat16
    OMP_NUM_THREADS=$threads MKL_NUM_THREADS=$threads "${peer[@]}" --threads "$threads"
done
