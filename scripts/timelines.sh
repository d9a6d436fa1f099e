#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/timelines.sh [opd-cluster-sim]: draws the pictures of docs/sched/ again, from traces of the small simulated
# cluster in docs/sched/timelines/cluster.json.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
simulator=${1:-$root/build/test/examples/cluster_sim/opd-cluster-sim}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for schedule in sync step_off_1 step_off_2 async capacity cohort_fifo in_order edf drop retry areal; do
    "$simulator" --config "$root/docs/sched/timelines/cluster.json" --only "$schedule" --trace "$schedule" \
        --no-sensitivity --no-plots --quiet --out "$out" >/dev/null
    cp "$out/timeline.svg" "$root/docs/sched/timelines/$schedule.svg"
done
