#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A model of a checkpoint of opd-train as a GGUF file, which llama.cpp's server loads: the trainer's models have the
Qwen3 shape, so the server computes the same function, in its own order of sums.

    python3 to_gguf.py runs/base/checkpoints/student.ckpt teacher.gguf            # --student: the student

Needs numpy and gguf (PyPI). The vocabulary has no begin, end and unknown tokens: to the server the task's own end is a
token as any other, where it does not stop.
"""
import argparse
import json
import struct
import sys

import gguf
import numpy as np


def sections_of(path):
    data = open(path, "rb").read()
    if data[:8] != b"OPDTRAIN":
        sys.exit(f"{path}: not a checkpoint of opd-train")
    at, end, sections = 12, len(data) - 32, {}
    while at < end:
        (n,) = struct.unpack_from("<I", data, at)
        name = data[at + 4:at + 4 + n].decode()
        (size,) = struct.unpack_from("<Q", data, at + 4 + n)
        at += 12 + n
        sections[name] = data[at:at + size]
        at += size
    return sections


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--student", action="store_true")
    arguments = parser.parse_args()
    who = "student" if arguments.student else "teacher"

    sections = sections_of(arguments.checkpoint)
    settings = json.loads(sections["settings"])
    shape, task = settings[f"{who}_model"], settings["task"]
    weights = np.frombuffer(sections[f"{who}.weights"], "<f4")
    if task.get("kind", "gcd") != "gcd":
        sys.exit("only runs of --task gcd: of other tasks the words are not in the checkpoint")
    symbols = "0123456789,=;#$"
    vocabulary = task.get("vocabulary", 0) or len(symbols)
    width, layers, heads, kv_heads = (shape[k] for k in ("width", "layers", "heads", "kv_heads"))
    head_dim, ffn = shape["head_dim"], shape["ffn"]
    q, kv = heads * head_dim, kv_heads * head_dim

    place = 0

    def tensor(rows, columns=None):
        nonlocal place
        size = rows * (columns or 1)
        part = weights[place:place + size]
        if len(part) != size:
            sys.exit(f"{arguments.checkpoint}: too few weights of the {who}")
        place += -(-size // 16) * 16
        return np.ascontiguousarray(part.reshape(rows, columns) if columns else part)

    out = gguf.GGUFWriter(arguments.out, "qwen3")
    out.add_context_length(4096)
    out.add_embedding_length(width)
    out.add_block_count(layers)
    out.add_feed_forward_length(ffn)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(vocabulary)
    out.add_tokenizer_model("rwkv")  # of llama.cpp's vocabularies the one without special ids
    out.add_token_list(list(symbols) + [f"<pad{i}>" for i in range(len(symbols), vocabulary)])
    out.add_token_types([gguf.TokenType.NORMAL] * vocabulary)

    out.add_tensor("token_embd.weight", tensor(vocabulary, width))
    for layer in range(layers):
        name = f"blk.{layer}."
        out.add_tensor(name + "attn_norm.weight", tensor(width))
        qkv = tensor(q + 2 * kv, width)
        for part, rows in (("q", qkv[:q]), ("k", qkv[q:q + kv]), ("v", qkv[q + kv:])):
            out.add_tensor(name + f"attn_{part}.weight", np.ascontiguousarray(rows))
        out.add_tensor(name + "attn_q_norm.weight", tensor(head_dim))
        out.add_tensor(name + "attn_k_norm.weight", tensor(head_dim))
        out.add_tensor(name + "attn_output.weight", tensor(width, q))
        out.add_tensor(name + "ffn_norm.weight", tensor(width))
        gate_up = tensor(2 * ffn, width)
        out.add_tensor(name + "ffn_gate.weight", np.ascontiguousarray(gate_up[:ffn]))
        out.add_tensor(name + "ffn_up.weight", np.ascontiguousarray(gate_up[ffn:]))
        out.add_tensor(name + "ffn_down.weight", tensor(width, ffn))
    out.add_tensor("output_norm.weight", tensor(width))
    if not shape["tied"]:
        out.add_tensor("output.weight", tensor(vocabulary, width))
    if place != len(weights):
        sys.exit(f"{arguments.checkpoint}: {len(weights)} weights of the {who}, expected {place}")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


main()
