#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# 11_opd_loop.sh <opd-train> <example_11_opd_loop> <folder>: a short run of the trainer, and the example from the same
# start: the same weights.
set -euo pipefail
train=$1 example=$2 folder=$3
rm -rf "$folder"
mkdir -p "$folder"
echo '{"task": {"max_steps": 6}, "student": {"target_accuracy": 1}, "distill": {"warmup": 2}}' >"$folder/settings.json"
common="--preset=quick --config=$folder/settings.json --quiet --threads=2 --eval-every=0 --eval-prompts=8"
# shellcheck disable=SC2086 # a list of words
"$train" $common --run-dir="$folder/start" --teacher-steps=60 --student-max-steps=20 --steps=0
# shellcheck disable=SC2086
"$train" $common --run-dir="$folder/run" --start-from="$folder/start/checkpoints/student.ckpt" --seed=3 --prompts=6 \
    --answers=2 --steps=8 --schedule=sync
"$example" "$folder/start/checkpoints/student.ckpt" "$folder/run/checkpoints/latest.ckpt"
