#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/offline_study.sh [directory]: sets up a fresh Debian 12, builds the reference trainer for this machine, and on each task distils the same
# warm student twice with Lightning OPD's estimator: online, and from a data set that this student and its teacher wrote before, with the same
# batches, optimiser, rate and steps. Prints what each closes of the gap, the share of it that offline keeps, how far the offline student
# has drifted from the policy that drew the set, and what each takes: the table of docs/offline.md. Runs that the directory (runs/offline unless
# given) holds are not made again. OPD_TRAIN: a program to use as it is. OPD_TASKS: "gcd grammar" unless given; OPD_RATES: "4e-3 1e-3".
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=${1-$opd_root/runs/offline}
train=${OPD_TRAIN-$opd_root/build/demo/examples/trainer/opd-train}
if [ -z "${OPD_TRAIN-}" ]; then
    opd_demo_program opd-train
fi
mkdir -p "$directory"

declare -A tasks=([gcd]="--preset quick" [grammar]="--task grammar --preset quick")
declare -A sequences=([gcd]=16384 [grammar]=6400) # 2.3 epochs of the steps, and one

printf '%-8s %5s %11s %11s %6s %9s %8s %8s %9s %9s %10s %9s\n' task rate "gap online" "gap offl." share "KL before" \
    online offline "mean w" "chi-sq." "eff. share" seconds
for task in ${OPD_TASKS-gcd grammar}; do
    # shellcheck disable=SC2206
    settings=(${tasks[$task]} --eval-every=0 --quiet)
    base=$directory/$task data=$directory/$task-set
    [ -f "$base/report.json" ] || "$train" --run-dir "$base" --overwrite "${settings[@]}" --steps=0 >/dev/null
    "$train" --run-dir "$base" --write-offline "$data" --offline-sequences="${sequences[$task]}" --quiet
    for rate in ${OPD_RATES-4e-3 1e-3}; do
        for kind in online offline; do
            run=$directory/$task-$kind-$rate
            from=()
            [ "$kind" = online ] || from=(--offline "$data")
            [ -f "$run/report.json" ] ||
                "$train" --run-dir "$run" --overwrite "${settings[@]}" --start-from "$base/checkpoints/student.ckpt" \
                    --estimator=lightning --rate="$rate" "${from[@]}" >/dev/null
        done
        python3 - "$task" "$rate" "$directory" <<'PYTHON'
import json, sys
task, rate, directory = sys.argv[1:]
online, offline = (json.load(open(f"{directory}/{task}-{kind}-{rate}/report.json")) for kind in ("online", "offline"))
def kl(report, when): # the mean along both kinds of prefixes, or along the student's own
    return report.get("held_out_kl", report["kl_to_teacher"])[when]
def seconds(report):
    return sum(report["seconds"][stage] for stage in ("rollout", "teacher_scoring", "learner"))
drift = offline["schedule"]["offline"]["drift"]
closed = [report["gap_closed"] for report in (online, offline)]
share = "%.0f%%" % (100 * closed[1] / closed[0]) if closed[0] > 0 else "-"
print("%-8s %5s %11.3f %11.3f %6s %9.3f %8.3f %8.3f %9.3f %9.3g %10.3f %5.0f/%-3.0f" % (
    task, rate, *closed, share, kl(online, "before"), kl(online, "after"), kl(offline, "after"), drift["ratio_mean"],
    drift["chi_squared"], drift["effective_share"], seconds(online), seconds(offline)))
PYTHON
    done
done
