#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/served.sh [directory] [opd-train arguments]: sets up a fresh Debian 12, builds the reference trainer for this
# machine, and distils the quick task's student from a teacher in another process: trains the teacher and warms the
# student up (once: in the directory, runs/served unless given), has opd-serve-teacher serve the teacher on the loopback
# in the form of a vLLM server, and has opd-train score its responses there, prefetching on a schedule that is one step
# off. OPD_TRAIN, OPD_SERVE_TEACHER: programs to use as they are.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/served
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi
programs=$opd_root/build/demo/examples/trainer
train=${OPD_TRAIN-$programs/opd-train} serve=${OPD_SERVE_TEACHER-$programs/opd-serve-teacher}
if [ -z "${OPD_TRAIN-}" ]; then opd_demo_program opd-train opd-serve-teacher; fi
mkdir -p "$directory"

base=$directory/base url=$directory/teacher.url
[ -f "$base/report.json" ] || "$train" --run-dir "$base" --overwrite --preset quick --steps 0
rm -f "$url"
"$serve" --checkpoint "$base/checkpoints/student.ckpt" --port 0 --url-file "$url" >/dev/null &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for ((i = 0; i < 600; i++)); do
    [ -f "$url" ] && break
    kill -0 $server 2>/dev/null || opd_die "opd-serve-teacher has ended"
    sleep 0.1
done
"$train" --run-dir "$directory/run" --overwrite --preset quick --start-from "$base/checkpoints/student.ckpt" \
    --teacher-url "$(cat "$url")" --estimator topk --schedule step-off --schedule-k 1 "$@"
