#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_hf.sh [test_trainer_hf]: the trainer's transformer and its model files beside transformers itself. In a
# virtual environment with torch and transformers (build/venv-hf, or OPD_HF_VENV) makes OPD_HF_COUNT (24) random models
# of the three families with seed OPD_HF_SEED (1); the test program compares logits, log-probs and gradients of each and
# writes it in float32 and bfloat16; transformers loads what was written, and peft the adapters of two that learnt. Also
# compares the committed models with what this transformers computes. Prints OK or what is wrong; SKIPPED where PyPI
# cannot be had.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

program=${1:-$opd_root/build/test/tests/test_trainer_hf}
[ -x "$program" ] || opd_die "there is no $program; scripts/test.sh -R trainer.hf builds it"
venv=${OPD_HF_VENV:-$opd_root/build/venv-hf}
opd_venv "$venv" 'torch transformers' torch transformers || exit 0
golden=("$venv/bin/python" "$opd_root/scripts/make_hf_golden.py")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1

"${golden[@]}" --check
"${golden[@]}" --random "${OPD_HF_COUNT:-24}" --seed "${OPD_HF_SEED:-1}" "$folder/models"
mkdir "$folder/written"
OPD_HF_MODELS=$folder/models OPD_HF_WRITE=$folder/written "$program" \
    --test-case="logits and gradients*,what is written is read*"
"${golden[@]}" --loads "$folder/written" "$folder/models"
OPD_HF_WRITE=$folder/written "$program" --test-case="LoRA learns*"
"$venv/bin/python" -c 'import peft' 2>/dev/null || timeout 300 "$venv/bin/pip" install -q peft >>"$venv/pip.log" 2>&1 ||
    opd_say "no peft: $venv/pip.log"
"${golden[@]}" --adapters "$folder/written"
echo OK
