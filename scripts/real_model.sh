#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/real_model.sh [directory] [opd-distil arguments]: distils a trained language model. Fetches the PyPI package
# glassllm (MIT; 852,608 parameters) into a virtual environment (build/venv-glass, or OPD_GLASS_VENV), converts its
# English model to a Hugging Face directory, makes a student of every other layer, and has opd-distil train it on
# prompts from these docs. Shows an answer before and after, and the KL from the teacher on held-out prompts; ends with
# an error if less than .7 of that is gone. What it writes is in the directory (runs/real), which `transformers` loads.
# OPD_DISTIL, OPD_TOKENIZE: programs to use as they are. SKIPPED where PyPI cannot be had.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/real
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi
venv=${OPD_GLASS_VENV:-$opd_root/build/venv-glass}
opd_venv "$venv" glassllm glassllm==0.1.0 || exit 0
programs=$opd_root/build/demo/examples/trainer
distil=${OPD_DISTIL-$programs/opd-distil} tokenize=${OPD_TOKENIZE-$programs/opd-tokenize}
if [ -z "${OPD_DISTIL-}" ] || [ -z "${OPD_TOKENIZE-}" ]; then opd_demo_program opd-distil opd-tokenize; fi

begin=$SECONDS
rm -rf "$directory/teacher" "$directory/student" "$directory/distilled"
mkdir -p "$directory"
convert=("$venv/bin/python" "$opd_root/examples/convert/from_glassllm.py")
"${convert[@]}" --out "$directory/teacher"
"${convert[@]}" --out "$directory/student" --layers 0,2
"${convert[@]}" --prompts "$directory" "$opd_root/README.md" "$opd_root"/docs/*.md "$opd_root"/docs/*/*.md
"$tokenize" "$directory/teacher/tokenizer.json" "$directory/text.jsonl" | cmp - "$directory/ids.jsonl" ||
    opd_die "the converted tokenizer encodes otherwise than glassllm's"
said=$directory/said
"$distil" --student "$directory/student" --teacher "$directory/teacher" --prompts "$directory/text.jsonl" \
    --out "$directory/distilled" --log "$directory/steps.jsonl" --steps 500 --batch 32 --max-response 48 --held-out 64 \
    --rate 2e-3 --warmup 20 --slots 64 --say-every 50 "$@" | tee "$said"
awk -v seconds=$((SECONDS - begin)) '
    /^KL\(student, teacher\) on held-out prompts/ { before = $6; after = $11 }
    END {
        if (!(before > 0)) { print "error: no KL was printed"; exit 1 }
        closed = 1 - after / before
        printf "%.3f of the gap in held-out KL closed in %d s\n", closed, seconds
        if (closed < .7) { print "error: less than .7"; exit 1 }
    }' "$said"
