#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test_hf_text.sh [lines]: the trainer's tokenizer beside the PyPI package `tokenizers`, on so many lines of
# mixed text (12,000): this repository's own, corners, random text of every script. In a virtual environment
# (build/venv-text) scripts/make_bpe_golden.py trains tokenizers of the families of GPT-2, Qwen and Llama-3; both encode
# and decode every line, and the ids and texts must be the same. Then every character of Unicode in a few surroundings,
# where it is told how many differ, and what each takes. Prints OK or what is wrong; SKIPPED where PyPI cannot be had.
# OPD_TOKENIZE: a program to use as it is.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folder=$opd_root/build/text
venv=${OPD_TEXT_VENV:-$opd_root/build/venv-text}
tokenize=${OPD_TOKENIZE-$opd_root/build/demo/examples/trainer/opd-tokenize}
mkdir -p "$folder"
opd_venv "$venv" 'tokenizers jinja2' --only-binary :all: tokenizers jinja2 || exit 0
if [ -z "${OPD_TOKENIZE-}" ]; then opd_demo_program opd-tokenize; fi

"$venv/bin/python" "$opd_root/scripts/make_bpe_golden.py" --lines "${1-12000}" "$folder"
"$venv/bin/python" - "$folder" "$tokenize" <<'PYTHON'
import json, subprocess, sys, time
import tokenizers

folder, program = sys.argv[1:]
wrong = 0

def ours(*arguments):
    out = subprocess.run([program, *arguments], check=True, stdout=subprocess.PIPE).stdout
    return [json.loads(line) for line in out.decode("utf-8").split("\n") if line]

def read(name):
    return [json.loads(line) for line in open(f"{folder}/{name}")]

def write(name, values):
    with open(f"{folder}/{name}", "w") as out:
        out.writelines(json.dumps(v) + "\n" for v in values)

lines = read("lines.jsonl")
# every character alone, in words and between spaces, in pieces of a kilobyte
every = [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000]
characters = [{"text": "".join(f"{c}a{c}1 {c} '{c}\n" for c in every[i:i + 64])} for i in range(0, len(every), 64)]
write("characters.jsonl", characters)
for family in ("gpt2", "qwen", "llama3"):
    path = f"{folder}/{family}.json"
    theirs = tokenizers.Tokenizer.from_file(path)
    ids, texts = read(f"{family}.ids.jsonl"), read(f"{family}.text.jsonl")
    mine = ours(path, f"{folder}/lines.jsonl")
    back = ours("--decode", path, f"{folder}/{family}.ids.jsonl")
    assert len(mine) == len(back) == len(lines)
    off = [(l["text"], a["ids"], b["ids"]) for l, a, b in zip(lines, ids, mine) if a != b]
    off += [(a["text"], b["text"]) for a, b in zip(texts, back) if a != b]
    wrong += len(off)
    for case in off[:5]:
        print("wrong:", family, *map(ascii, case))

    seen = ours(path, f"{folder}/characters.jsonl")
    pieces = [c["text"] for c, s in zip(characters, seen) if theirs.encode(c["text"]).ids != s["ids"]]
    alone = [{"text": line} for piece in pieces for line in piece.split("\n") if line]
    write("alone.jsonl", alone or [{"text": "a"}])
    seen = ours(path, f"{folder}/alone.jsonl")
    differ = "".join(a["text"][0] for a, s in zip(alone, seen) if theirs.encode(a["text"]).ids != s["ids"])
    print(f"{family}: {len(lines)} lines, {sum(len(i['ids']) for i in ids)} tokens, {len(off)} wrong; of {len(every)} "
          f"characters {len(differ)} are split or normalised otherwise, as {ascii(differ[:12])}")

texts = [line["text"] for line in lines] * 3
write("timed.jsonl", [{"text": t} for t in texts])
size = sum(len(t.encode()) for t in texts) * 1e-6
for family in ("gpt2", "qwen", "llama3"):
    path = f"{folder}/{family}.json"
    rates = [ours("--time", path, f"{folder}/timed.jsonl")[0] for _ in range(3)]
    theirs = []
    for _ in range(3):
        t = tokenizers.Tokenizer.from_file(path)
        begin = time.process_time()
        for text in texts:
            t.encode(text)
        theirs.append(size / (time.process_time() - begin))
    mine, again = (max(r[key] for r in rates) for key in ("encode_mb_s", "again_mb_s"))
    print(f"{family}: {size:.1f} MB at {mine:.1f} MB/s ({again:.1f} with all words known); "
          f"tokenizers {tokenizers.__version__} from Python: {max(theirs):.1f} MB/s")
print("OK" if not wrong else "FAILED")
sys.exit(wrong > 0)
PYTHON
