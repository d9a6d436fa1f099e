#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The trained model in the PyPI package glassllm as a Hugging Face directory, of all layers or of some.

    from_glassllm.py --out glass                   # the package's model (--lang en or pt), 4 layers
    from_glassllm.py --out half --layers 0,2       # every other layer
    from_glassllm.py --prompts DIR FILE...         # DIR/text.jsonl and DIR/ids.jsonl, of sentences in FILEs

Exact as a Llama: RMSNorm, grouped-query attention and SwiGLU without biases, a tied head. Matrices are (in, out) there
and (out, in) here; its rope turns neighbours (2i, 2i+1), Llama's (i, i + d/2), so rows of q and k change places within
a head. Its tokenizer merges characters: as byte-level BPE, those beyond ASCII are merged from bytes first. Characters
that the package calls <unk> become ids that the model does not have.
"""
import argparse
import json
import pathlib
import re
import struct

import glassllm
import numpy as np


def byte_letters():
    """GPT-2's alphabet: the character that stands for each byte."""
    itself = [b for b in range(256) if 33 <= b <= 126 or (b >= 161 and b != 173)]
    others = [b for b in range(256) if b not in itself]
    return {**{b: chr(b) for b in itself}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def tokenizer_json(tokenizer):
    letters = byte_letters()
    spelt = lambda piece: "".join(letters[b] for b in piece.replace("▁", " ").encode())  # noqa: E731
    specials = tokenizer.vocab[: len(tokenizer.vocab) - len(tokenizer.alphabet) - len(tokenizer.merges)]
    vocab = {token if i < len(specials) else spelt(token): i for token, i in tokenizer.token_to_id.items()}
    merges = []
    for character in tokenizer.alphabet:
        whole = spelt(character)
        for n in range(1, len(whole)):
            vocab.setdefault(whole[: n + 1], len(vocab))
            if (pair := [whole[:n], whole[n]]) not in merges:
                merges.append(pair)
    vocab.update({letter: len(vocab) + i for i, letter in enumerate(c for c in letters.values() if c not in vocab)})
    merges += [[spelt(a), spelt(b)] for a, b in tokenizer.merges]
    split = {"type": "Split", "pattern": {"Regex": "\\n| *[^ \\n]+| +"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(specials)],
            "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocab, "merges": merges}}


def tensors(model, layers):
    c, named = model.cfg, {name: p.data for name, p in model.named_parameters().items()}

    def halves(w, heads):  # rows 0 2 4 … 1 3 5 … of each head
        return w.reshape(heads, -1, 2, c.d_model).transpose(0, 2, 1, 3).reshape(w.shape)

    yield "model.embed_tokens.weight", named["E"]
    yield "model.norm.weight", named["norm_f.gamma"]
    for to, layer in enumerate(layers):
        old, new = f"blocks.{layer}.", f"model.layers.{to}."
        yield new + "self_attn.q_proj.weight", halves(named[old + "attn.W_Q"].T, c.n_heads)
        yield new + "self_attn.k_proj.weight", halves(named[old + "attn.W_K"].T, c.n_kv_heads)
        for theirs, ours in {"attn.W_V": "self_attn.v_proj", "attn.W_O": "self_attn.o_proj", "ffn.W1": "mlp.gate_proj",
                             "ffn.W3": "mlp.up_proj", "ffn.W2": "mlp.down_proj"}.items():
            yield f"{new}{ours}.weight", named[old + theirs].T
        yield new + "input_layernorm.weight", named[old + "norm1.gamma"]
        yield new + "post_attention_layernorm.weight", named[old + "norm2.gamma"]


def write_model(model, tokenizer, layers, out):
    c, header, data = model.cfg, {}, b""
    for name, w in tensors(model, layers):
        w = w.astype("<f2")  # as the package stores them: nothing is lost
        header[name] = {"dtype": "F16", "shape": w.shape, "data_offsets": [len(data), len(data) + w.nbytes]}
        data += w.tobytes()
    head = json.dumps(header).encode()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
              "vocab_size": c.vocab_size, "hidden_size": c.d_model, "num_hidden_layers": len(layers),
              "intermediate_size": model.blocks[0].ffn.W1.shape[1], "num_attention_heads": c.n_heads,
              "num_key_value_heads": c.n_kv_heads, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
              "max_position_embeddings": c.max_len, "rms_norm_eps": c.eps, "rope_theta": c.rope_base,
              "tie_word_embeddings": True, "torch_dtype": "float16"}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer), ensure_ascii=False))
    (out / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_prompts(tokenizer, folder, files):
    """The first words of sentences, 2 to 7 of them, in the alphabet of either language."""
    prose = " ".join(" ".join(pathlib.Path(file).read_text() for file in files).split())
    texts = list(dict.fromkeys(re.findall(r"(?<=[.:] )[A-Z][a-z]*(?: [a-z][a-z,']*){1,6}", prose)))
    for name, line in ("text", lambda t: t), ("ids", tokenizer.encode):
        lines = [json.dumps({name: line(t)}, separators=(",", ":")) + "\n" for t in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    print(f"{len(texts)} prompts")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lang", choices=("en", "pt"), default="en")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--layers")
    parser.add_argument("--prompts", nargs="+", type=pathlib.Path, metavar=("DIR", "FILE"))
    args = parser.parse_args()
    model, tokenizer = glassllm.load_pretrained(args.lang)
    if args.out:
        layers = [int(i) for i in args.layers.split(",")] if args.layers else range(model.cfg.n_layers)
        write_model(model, tokenizer, layers, args.out)
    if args.prompts:
        write_prompts(tokenizer, args.prompts[0], args.prompts[1:])


if __name__ == "__main__":
    main()
