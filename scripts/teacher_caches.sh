#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/teacher_caches.sh [directory]: sets up a fresh Debian 12, builds the reference trainer for this machine, and
# distils the same student from the same teacher kept in logits, in hidden states and in fewer numbers of them, under
# sync and async (in virtual time, where every run is the same again), with the task's 15 symbols and with a vocabulary
# padded to 2,048. Prints what each takes and closes: the table of docs/performance.md. Runs that the directory
# (runs/caches unless given) holds are not made again. OPD_TRAIN: a program to use as it is.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=${1-$opd_root/runs/caches}
train=${OPD_TRAIN-$opd_root/build/demo/examples/trainer/opd-train}
if [ -z "${OPD_TRAIN-}" ]; then
    opd_demo_program opd-train
fi
mkdir -p "$directory"

# A task of two digits, which a teacher learns in seconds.
task=(--teacher-steps=900 --student-max-steps=600 --eval-every=0 --eval-prompts=490 --quiet)
settings() { # vocabulary, cache
    local budget='"hidden_budget": 1048576'
    if [ "$2" = dense ]; then budget=; fi
    echo "{\"task\": {\"max_operand\": 99, \"max_steps\": 10, \"vocabulary\": $1}, \"distill\": {$budget},
           \"student\": {\"target_accuracy\": 0.4}, \"evaluation\": {\"samples\": 0}}"
}
declare -A schedules=([sync]="--schedule=sync" [async]="--schedule=async --tau=4 --driver=virtual")
declare -A caches=([dense]="--teacher-cache=dense" [hidden]="--teacher-cache=hidden"
    [rank24]="--teacher-cache=hidden-lowrank --cache-rank=24" [rank8]="--teacher-cache=hidden-lowrank --cache-rank=8"
    [rank12]="--teacher-cache=hidden-lowrank --cache-rank=12")

distil() { # directory, vocabulary, cache, then options
    [ -f "$1/report.json" ] ||
        "$train" --config <(settings "$2" "$3") --run-dir "$1" --overwrite "${task[@]}" "${@:4}" >/dev/null
}
printf '%-6s %-6s %-7s %8s %8s %10s %12s %12s %12s\n' V "" cache gap KL bytes/token "in flight" "logits" "KL of codec"
for vocabulary in 15 2048; do
    [ "$vocabulary" = 15 ] && amount="--steps=400" || amount="--steps=200 --prompts=16"
    base=$directory/v$vocabulary
    distil "$base/base" "$vocabulary" dense --steps=0
    for schedule in sync async; do
        for cache in dense hidden rank24 rank12 rank8; do
            run=$base/$schedule-$cache
            # shellcheck disable=SC2086
            distil "$run" "$vocabulary" "$cache" --start-from="$base/base/checkpoints/student.ckpt" $amount \
                ${schedules[$schedule]} ${caches[$cache]}
            python3 - "$run/report.json" "$vocabulary" "$schedule" "$cache" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
cache = report["schedule"]["teacher_cache"]
print("%-6s %-6s %-7s %8.3f %8.4f %10.0f %12d %12d %12s" % (
    *sys.argv[2:], report["gap_closed"], report["kl_to_teacher"]["after"], cache["bytes_a_token"],
    cache["most_bytes_in_flight"], cache["learner_logit_bytes"],
    "%.2g" % cache["kl_on_student"] if "rank" in cache else ""))
PYTHON
        done
    done
done
