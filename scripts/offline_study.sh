#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/offline_study.sh [directory]: sets up a fresh Debian 12, builds the reference trainer for this machine, and
# does on its two tasks what Lightning OPD (arXiv 2604.13010) does on language models. Two teachers a task, which differ
# in their seed alone; a student of each, SFT on the teacher's own answers; data sets of each student's rollouts, scored
# by each teacher. Every student then learns from every teacher, online and from the data set, with the same batches,
# optimiser, rate and steps. Three tables, as Markdown on the terminal and as CSV in the directory:
#   twins.csv        what offline closes beside online, with the drawn tokens' log-probs (lightning) and with the
#                    teacher's best ids (tail_bucket), and how far the offline student has moved from pi_ref (the
#                    paper's table 1, figure 3a); drift.svg
#   consistency.csv  SFT teacher x scoring teacher, online and offline (tables 3 and 4); consistency.svg, and
#                    teacher-consistency.svg, which explains what is crossed
#   cost.csv         seconds of SFT, rollout and scoring, learning (table 2)
# The directory is runs/offline unless given; runs that it holds are not made again. OPD_TRAIN: a program to use as it
# is. OPD_TASKS: "gcd grammar" unless given. OPD_SEEDS: seeds of distillation and of its data sets, 1 unless given.
# OPD_JOBS: runs at a time, each on one thread, 2 unless given. Ten minutes on two cores. docs/plots/offline-* are
# copies.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=${1-$opd_root/runs/offline}
train=${OPD_TRAIN-$opd_root/build/demo/examples/trainer/opd-train}
if [ -z "${OPD_TRAIN-}" ]; then
    opd_demo_program opd-train
    opd_setup python
fi
mkdir -p "$directory"

common="--preset=quick --threads=1 --eval-every=0 --quiet"
declare -A task=([gcd]="--task=gcd --eval-prompts=499" [grammar]="--task=grammar --eval-prompts=512")
declare -A warmup=(
    [gcd]="1200" [gcd-file]='"target_accuracy": 0.7'
    [grammar]="600" [grammar-file]='"target_accuracy": 1, "batch": 64')
declare -A distill=(
    [gcd]="--steps=150 --prompts=128 --rate=5e-4"
    [grammar]="--steps=150 --prompts=64 --rate=3e-4")
declare -A sequences=([gcd]=19200 [grammar]=9600) # as many as the steps learn from
declare -A own=(
    [gcd-lightning-file]=', "advantage_clip": 0.3' [grammar-lightning-file]=', "advantage_clip": 5'
    [gcd-tail_bucket]="--k=8" [grammar-tail_bucket]="--k=64")
declare -A teacher=([A]=0 [B]=77) # seeds
settings() { # more groups: what a run has beside its flags
    echo "{\"evaluation\": {\"samples\": 4}, $1}"
}

base() { # task, SFT teacher
    local run=$directory/$1-$2
    if [ -f "$run/report.json" ]; then return; fi
    # shellcheck disable=SC2086
    "$train" --config <(settings "\"student\": {${warmup[$1-file]}}, \"teacher\": {\"seed\": ${teacher[$2]}}") \
        --run-dir "$run" --overwrite $common ${task[$1]} --student-max-steps="${warmup[$1]}" --warmup-data=teacher \
        --steps=0 >/dev/null
}

cell() { # task, SFT teacher, scoring teacher, seed: a data set, and the twins
    local run=$directory/$1-$2$3-$4 student=$directory/$1-$2/checkpoints/student.ckpt
    local scorer=() accept=()
    if [ "$2" != "$3" ]; then
        scorer=(--scoring-teacher "$directory/$1-$3/checkpoints/student.ckpt") accept=(--accept-mismatch scoring_teacher)
    fi
    if [ ! -f "$run-set.log" ]; then
        rm -rf "$run-set"
        # shellcheck disable=SC2086
        "$train" --run-dir "$run" --start-from "$student" --write-offline "$run-set" ${task[$1]} --preset=quick \
            --warmup-data=teacher --offline-sequences="${sequences[$1]}" --estimator=tail_bucket \
            ${own[$1-tail_bucket]} --seed="$4" --threads=1 "${scorer[@]}" >"$run-set.part" 2>&1 ||
            { cat "$run-set.part"; return 1; }
        mv "$run-set.part" "$run-set.log"
    fi
    local estimators=(lightning) kind from estimator
    [ "$2" != "$3" ] || estimators+=(tail_bucket)
    for estimator in "${estimators[@]}"; do
        for kind in online offline; do
            if [ -f "$run-$estimator-$kind/report.json" ]; then continue; fi
            from=()
            [ "$kind" = online ] || from=(--offline "$run-set")
            # shellcheck disable=SC2086
            "$train" --config <(settings "\"run\": {\"log_every\": 5},
                    \"distill\": {\"warmup\": 10${own[$1-$estimator-file]-}}") \
                --run-dir "$run-$estimator-$kind" --overwrite $common ${task[$1]} --start-from "$student" \
                --estimator="$estimator" ${own[$1-$estimator]-} ${distill[$1]} --seed="$4" "${from[@]}" \
                "${scorer[@]}" "${accept[@]}" >/dev/null
        done
    done
}

lanes() { # lines of commands, so many at a time
    local line
    while read -r line; do
        while [ "$(jobs -rp | wc -l)" -ge "${OPD_JOBS-2}" ]; do wait -n || opd_die "a run failed, see above"; done
        $line &
    done
    while [ -n "$(jobs -rp)" ]; do wait -n || opd_die "a run failed, see above"; done
}

lanes < <(for t in ${OPD_TASKS-gcd grammar}; do printf "base $t %s\n" A B; done)
lanes < <(for seed in ${OPD_SEEDS-1}; do
    for t in ${OPD_TASKS-gcd grammar}; do printf "cell $t %s $seed\n" "A A" "B B" "A B" "B A"; done
done)
# shellcheck disable=SC2086
python3 "$opd_root/scripts/offline_study.py" "$directory" --tasks ${OPD_TASKS-gcd grammar} --seeds ${OPD_SEEDS-1}
