#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_llama_server.sh: the client and the trainer against a real server of llama.cpp. In a virtual environment
# (build/llama) PyPI's xllamacpp, which has llama-server's code in a wheel, serves the teacher of a small run: its
# weights as GGUF (examples/convert/to_gguf.py). Then opd-train distils from it, with lists and without, opd-score
# writes a set with it, and what it says is compared with the teacher in the trainer's process. Prints OK or what is
# wrong; SKIPPED where PyPI cannot be had. llama-cpp-python is not used: it has to be compiled, and its own server takes
# text alone. OPD_TRAIN, OPD_SCORE: programs to use as they are.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folder=$opd_root/build/llama
programs=$opd_root/build/demo/examples/trainer
train=${OPD_TRAIN-$programs/opd-train} score=${OPD_SCORE-$programs/opd-score}
mkdir -p "$folder"
opd_venv "$folder/env" 'xllamacpp gguf numpy' --only-binary :all: xllamacpp gguf numpy || exit 0
if [ -z "${OPD_TRAIN-}" ]; then opd_demo_program opd-train opd-score; fi

# a teacher that knows something, and a student that knows less
settings=(--preset quick --teacher-steps 300 --student-max-steps 80 --eval-prompts 100 --quiet)
base=$folder/base checkpoint=$folder/base/checkpoints/student.ckpt
"$train" --run-dir "$base" --overwrite "${settings[@]}" --steps 0 >/dev/null
"$folder/env/bin/python" "$opd_root/examples/convert/to_gguf.py" "$checkpoint" "$folder/teacher.gguf"

rm -f "$folder/url"
"$folder/env/bin/python" - "$folder/teacher.gguf" "$folder/url" >"$folder/server.log" 2>&1 <<'PYTHON' &
import os, sys, threading
import xllamacpp

model, url = sys.argv[1:]
p = xllamacpp.CommonParams()
p.model.path, p.port = model, 0
p.n_ctx, p.n_parallel, p.warmup, p.cpuparams.n_threads = 4096, 4, False, 1
# in float: its default rounds keys and values to half, within flash attention too, which is 0.05 nats a response
p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(p)
open(url + ".new", "w").write(server.listening_address + "\n")
os.rename(url + ".new", url)
threading.Event().wait()
PYTHON
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for ((i = 0; i < 600; i++)); do
    [ -f "$folder/url" ] && break
    kill -0 $server 2>/dev/null || opd_die "the server has ended: $folder/server.log"
    sleep 0.1
done
served=(--teacher-url "$(cat "$folder/url")" --teacher-dialect llama_cpp)
echo '{"run": {"log_every": 1}}' >"$folder/own.json"
echo '{"run": {"log_every": 1}, "served": {"patience": 20}}' >"$folder/served.json"

for estimator in lightning topk tail_bucket; do
    for where in own served; do
        more=()
        [ $where = own ] || more=("${served[@]}")
        "$train" --config "$folder/$where.json" --run-dir "$folder/$estimator-$where" --overwrite "${settings[@]}" \
            --start-from "$checkpoint" --estimator $estimator --steps 8 --eval-every 0 "${more[@]}" >/dev/null
    done
done
rm -rf "$folder/set-own" "$folder/set-served"
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import json, random, sys

random.seed(1)
with open(sys.argv[1] + "/lines.jsonl", "w") as out:  # texts that nobody would write, scored all the same
    for _ in range(40):
        print(json.dumps({"prompt": [0, 4, 8, 10, 0, 1, 8, 11],
                          "response": [random.randrange(15) for _ in range(random.randrange(1, 40))]}), file=out)
PYTHON
"$score" --responses "$folder/lines.jsonl" --reference "$checkpoint" --out "$folder/set-own" --k 4
"$score" --responses "$folder/lines.jsonl" --reference "$checkpoint" --out "$folder/set-served" --k 4 "${served[@]}" \
    --teacher-patience 20

"$folder/env/bin/python" - "$folder" <<'PYTHON'
import glob, json, sys
import numpy as np

folder, wrong = sys.argv[1], []

def expect(what, holds):
    if not holds:
        wrong.append(what)

for estimator in ("lightning", "topk", "tail_bucket"):
    steps = []
    for where in ("own", "served"):
        lines = map(json.loads, open(f"{folder}/{estimator}-{where}/log.jsonl"))
        steps.append([line for line in lines if line.get("stage") == "distill" and "loss" in line])
    own, served = steps
    expect(f"{estimator}: 8 steps", len(own) == len(served) == 8)
    off = max(abs(a[k] - b[k]) for a, b in zip(own, served) for k in ("loss", "kl"))
    told = json.load(open(f"{folder}/{estimator}-served/report.json"))["schedule"]["served_teacher"]
    probe = told["probe"]
    expect(f"{estimator}: loss and KL within 1e-3, not {off}", off < 1e-3)
    expect(f"{estimator}: scored at the first try", told["retries"] == 0 and told["scored"] == 8 * 32)
    verdicts = [probe[name] for name in ("noise", "mass", "temperature", "shift", "ids")]
    expect(f"{estimator}: every verdict good, not {verdicts}", all(v == "good" for v in verdicts))
    expect(f"{estimator}: 15 ids, not {probe.get('vocabulary')}", probe.get("vocabulary") == 15)
    print(f"{estimator}: loss and KL of 8 steps off by at most {off:.2g}; sigma_Delta of a response "
          f"{probe['sequence_sigma_delta']:.2g} nats between scorings, "
          f"{probe['reference_sigma_delta']:.2g} from the trainer's")

def column(name, where):
    parts = []
    for file in sorted(glob.glob(f"{folder}/set-{where}/shard-*.safetensors")):
        raw = np.memmap(file, "u1", "r")
        data = 8 + int(raw[:8].view("<u8")[0])
        t = json.loads(bytes(raw[8:data]))[name]
        begin, end = t["data_offsets"]
        parts.append(raw[data + begin:data + end].view("<i4" if t["dtype"] == "I32" else "<f4"))
    return np.concatenate(parts)

for name, most in (("samples.log_q", 5e-3), ("support.log_q", 5e-3), ("support.ids", 0)):
    own, served = column(name, "own").astype("f8"), column(name, "served").astype("f8")
    off = np.abs(own - served)
    if name == "support.ids":
        expect("the best ids are the same but for near ties", np.mean(off > 0) < 0.01)
    else:
        expect(f"{name} within {most}, not {off.max()}", off.max() < most)
    print(f"opd-score: {name} off by at most {off.max():.2g} over {len(own)} numbers")
for what in wrong:
    print("wrong:", what)
print("OK" if not wrong else "FAILED")
sys.exit(bool(wrong))
PYTHON
