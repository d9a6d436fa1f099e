#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What `trainer.hf_text` compares with: small tokenizers of three families, and what the PyPI package `tokenizers`
makes of mixed text; chat templates, and what Jinja makes of them.

    python3 -m venv build/venv-text; build/venv-text/bin/pip install tokenizers jinja2
    build/venv-text/bin/python scripts/make_bpe_golden.py                    writes tests/trainer/golden/text/
    build/venv-text/bin/python scripts/make_bpe_golden.py --lines N FOLDER   for scripts/test_hf_text.sh: the same
                tokenizers in FOLDER, lines.jsonl of N lines, and what is made of them

The three are trained on this repository's pages, and differ as the models' own do:

    gpt2     ByteLevel with its own pattern; merges as strings; added tokens with every flag
    qwen     NFC; Split by Qwen's pattern; ChatML's added tokens
    llama3   Split by Llama-3's pattern, in which up to three digits are a word; ignore_merges, with words that merges
             do not reach; <|begin_of_text|> by a template
"""
import argparse
import json
import pathlib
import random
import unicodedata

import jinja2
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+")
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")

# Sentences in other scripts, so that vocabularies have parts of them.
WORDS = [
    "Große Öfen heizen früh, sagte sie; naïve café, coöperate, Ångström, Æsir.",
    "Быстрая лиса прыгает через ленивую собаку. Съешь ещё этих мягких булок.",
    "Η γρήγορη αλεπού πηδά πάνω από το τεμπέλικο σκυλί.",
    "הזריז השועל קופץ מעל הכלב העצלן, שלום עולם!",
    "القط السريع يقفز فوق الكلب الكسول، ١٢٣ مرحبا.",
    "敏捷的棕色狐狸跳过了懒狗。今天天气很好，我们去公园吧！１２３",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナとひらがな。",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요 세계.",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
]

# Corners that random text does not meet often enough.
CORNERS = [    "", " ", "  ", "   x", "x   ", "\t", "\t\tx", "x\n", "x\r\n", "\r\n\r\n", "\n\n\n  x", "x \n y", "x\r y",
    "  \r\n  ", " \n", "\n ", "a\u000bb\u000cc", "\0", "a\0b", "\0\0 \0", "\u0001\u001f\u007f\u0080\u009f", "\ufeffx",
    "x\u200bx", "x\u2060x", "\u180e x", "x\u180ex", "a\u0085b", "a\u00a0b", "a \u00a0 b", "\u1680x", "\u2000\u200a x",
    "\u2028x\u2029", "\u202fx", "\u3000x\u3000\u3000y", "I'm you're it's don't we've he'd she'll",
    "I'M YOU'RE IT'S DON'T WE'VE HE'D SHE'LL", "'S 't 'Re'VE 'm'LL'd", "''s '' 's's", "'\u017f it'\u017f",
    "it’s don’t", "can't.won't", "rock 'n' roll", "O'Neill's", "x'sx", "'", "1 12 123 1234 12345 123456789",
    "3.14159e-10", "1,000,000", "x1y22z333", "½ ² ³ Ⅷ ⅻ ① ⑳ ٣٤ ५६ ๑๒ 三", "0x1F 0b10 1_000", " 1  22   333",
    "e\u0301 é", "o\u0308\u0323 ọ̈", "\u0041\u030a \u212b Å", "\u1100\u1161\u11a8 각", "\u0301abc",
    "a\u0301\u0302\u0303\u0304b", "\u0323\u0307s", "ﬁ ﬃ ﬆ", "Ω Ω K K", "\u0958 \u0915\u093c", "\u0344",
    "q\u0307\u0323", "\u1e9b\u0323", "👍", "👍🏽", "👨‍👩‍👧‍👦",
    "🏳️‍🌈 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "🇩🇪🇫🇷", "❤️ ☺︎ 1️⃣", "x👍x", "👍👍👍 👍",
    "\U0001d518\U0001d52b\U0001d526 \U00010400\U00010428", "\U0010ffff", "\ufffd", "\ufffe\uffff", "\ue000",
    "مرحبا\u200fworld\u200e", "שלום, world", "\u202eabc\u202c", "ـــ", "لا إله", "नि क्षि", "ကျွန်", "ཨོཾ", "ไม้เอก",
    "漢字かなカナ", "漢 字", "「引用」、。", "ＡＢＣ１２３", "中文English混合123文字", "한국어English", "𠀀𠀁", "<|im_start|>",
    "<|im_start|>user\nHi<|im_end|>\n", "a<|im_end|>b", " <|im_end|> ", "<|im_end|><|im_end|>", "<|im_end",
    "<|im_end|", "|im_end|>", "<<|im_end|>>", "<think>\n\n</think>\n\n", "x<think>y", "</think", "<|begin_of_text|>x",
    "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "<|endoftext|>", "a <|endoftext|> b",
    "<|endoftext|><|endoftext|>", "<mask>", "a <mask> b", "a\t <mask>\u3000 b", "x<mask>y", " <mask><mask> ",
    "<mask> <mask>", "<left>", "a  <left>  b", "a<left> <left>b", "<right>", "a  <right>  b", "<right> <left> <mask>",
    "word", "a word here", "sword", "words", "word.", "word_", "wordé", "éword", "word\u0301", "-word-",
    "word word wordword", "1word", "Ⓐword", "\u200dword", "word\u203f", "né", "ne\u0301", "née", "[né]", "[ne\u0301]",
    "a[ne\u0301]b", "[NÉ]", "long", "longer", "longest", "longes", "along", "prolonged longerer", "<é>", "x<é>x",
    "<a b>", "x<a b>y", "http://example.com/a?b=c&d=%20#e", "snake_case camelCase PascalCase kebab-case",
    "a+b=c; d/=e; f<<=g;", "{\"k\": [1, 2.5, null]}", "/* c */ // c", "$x_{i,j}^2$", "C:\\dir\\file.txt", "....",
    "!!??", "---", "***bold***", "a--b", "~~~", "#!/bin/sh", "x,y,z", "(a)(b)", "\"q\"'q'", "…", "—", "«»",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababababababababababab",
    " " * 37 + "x", "\n" * 9 + "x", "\t" * 5 + "\n" * 3, "=" * 60, "the" * 20, "theory of the thethe",
]


def pages():
    files = sorted((ROOT / "docs").rglob("*.md")) + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [line for f in files for line in f.read_text(encoding="utf-8").splitlines(keepends=True)]


def trained(pre, normalizer, vocabulary, lines):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre
    t.normalizer = normalizer
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False,
                                                     initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def all_tokenizers():
    """The text of each tokenizer.json."""
    lines = pages()[::8] + WORDS * 20
    gpt2 = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), None, 700, lines)
    gpt2.post_processor = processors.ByteLevel(trim_offsets=False)
    gpt2.add_special_tokens(["<|endoftext|>", AddedToken("<mask>", lstrip=True, rstrip=True)])
    gpt2.add_tokens([AddedToken("<left>", lstrip=True, normalized=False),
                     AddedToken("<right>", rstrip=True, normalized=False), AddedToken("word", single_word=True),
                     "long", "longest", "longer", "<é>", "<a b>"])
    qwen = trained(split(QWEN), normalizers.NFC(), 700, lines)
    qwen.post_processor = processors.ByteLevel(trim_offsets=False)
    qwen.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    qwen.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False),
                     AddedToken("[ne\u0301]", normalized=True)])
    llama3 = trained(split(LLAMA3), None, 700, lines)
    llama3.add_special_tokens(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A",
                                      pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                                      special_tokens=[("<|begin_of_text|>", llama3.token_to_id("<|begin_of_text|>"))])])
    j = {"gpt2": json.loads(gpt2.to_str()), "qwen": json.loads(qwen.to_str()), "llama3": json.loads(llama3.to_str())}
    j["gpt2"]["model"]["merges"] = [" ".join(pair) for pair in j["gpt2"]["model"]["merges"]]
    del j["gpt2"]["model"]["ignore_merges"]  # as old files are
    model = j["llama3"]["model"]
    model["ignore_merges"] = True
    # words that are in the vocabulary and are not reached by merges
    model["merges"] = [pair for i, pair in enumerate(model["merges"]) if i < 40 or i % 5]
    return {name: json.dumps(t, ensure_ascii=False, separators=(",", ":")) for name, t in j.items()}


def unknown_to_normalizer():
    """Characters that are newer than the Unicode of `tokenizers`' normalizer: it does not know that they combine."""
    nfc = normalizers.NFC()
    every = (chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    return {c for c in every if any(nfc.normalize_str(s) != unicodedata.normalize("NFC", s)
                                    for s in (c, "a" + c, "x\u0301" + c, c + "\u0301\u0323", c + "\u0334", "\U00011935" + c))}


def mixed_lines(count):
    """The repository's own lines, corners, and random text of every script."""
    rng = random.Random(20260639)
    own = pages()
    for pattern in ("include/**/*.hpp", "scripts/*", "tests/**/*.cpp", "python/**/*.py"):
        for f in sorted(ROOT.glob(pattern)):
            if f.is_file():
                own += f.read_text(encoding="utf-8").splitlines(keepends=True)
    blocks = [(0x20, 0x7F), (0xA0, 0x250), (0x250, 0x370), (0x370, 0x590), (0x590, 0x700), (0x900, 0xE00),
              (0xE00, 0x1100), (0x1100, 0x1200), (0x1E00, 0x2000), (0x2000, 0x2400), (0x2460, 0x2800), (0x3000, 0x3100),
              (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xF900, 0xFB50), (0xFB50, 0xFE10), (0xFE00, 0xFFFE),
              (0x10400, 0x10450), (0x1D400, 0x1D800), (0x1F300, 0x1F700), (0x20000, 0x20040), (0, 0x20), (0x300, 0x370),
              (0xE0020, 0xE0080)]
    skipped = unknown_to_normalizer()
    glue = [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "\u0301", "\u200d", "\ufe0f", "1", "2024", ".", "_",
            "<|im_end|>", "<mask>", "word", "longer", "a", "The", "\u00a0"]

    def of_blocks():
        text = ""
        for _ in range(rng.randrange(1, 12)):
            low, high = rng.choice(blocks)
            for _ in range(rng.randrange(1, 7)):
                c = chr(rng.randrange(low, high))
                if unicodedata.category(c) not in ("Cs", "Cn") and c not in skipped:
                    text += c
            if rng.random() < 0.7:
                text += rng.choice(glue)
        return text

    lines = [c for c in CORNERS if c]
    while len(lines) < count:
        kind = rng.random()
        if kind < 0.4:
            lines.append("".join(own[rng.randrange(len(own)):][:rng.choice([1, 1, 1, 2, 5])]))
        elif kind < 0.5:
            lines.append(rng.choice(WORDS)[rng.randrange(10):] + rng.choice(CORNERS) + rng.choice(WORDS))
        else:
            lines.append(of_blocks())
        if not lines[-1]:
            lines.pop()
    return lines, len(skipped)


# Templates as models have them, as far as there are no tools.
CHAT = {
    "chatml": r"""{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +
'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "chatml-default": r"""{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{
'<|im_start|>system\nAnswer in verse.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' +
message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- endif %}""",
    "chatml-thinks": r"""{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}""",
    "chatml-always-thinks": r"""{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n<think>\n" }}
{%- endif %}""",
    "llama-3": r"""{% for message in messages %}
{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim +
'<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "llama-3.1": r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
}
TALKS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", "  What is 2 + 2?\n")],
    [("user", "One"), ("assistant", "\u3000Two \x1f"), ("system", "Three"), ("user", "")],
    [("system", ""), ("system", " x"), ("user", "Grüße\n\n<|im_end|>"), ("assistant", "ok"), ("user", "'\"\\n")],
]


def chats():
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    r = []
    for name, template in CHAT.items():
        for talk in TALKS:
            messages = [{"role": role, "content": content} for role, content in talk]
            text = {g: environment.from_string(template).render(messages=messages, bos_token="<|begin_of_text|>",
                                                                add_generation_prompt=g) for g in (True, False)}
            r.append({"template": name, "messages": messages, "text": text[True], "closed": text[False]})
    return r


def unlike(texts, lines):
    """Those that are not their lines, by number."""
    return {i: text for i, (text, line) in enumerate(zip(texts, lines)) if text != line}


def jsonl(path, values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "tests/trainer/golden/text")
    parser.add_argument("--lines", type=int)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    files = all_tokenizers()
    read = {name: Tokenizer.from_str(text) for name, text in files.items()}
    for name, text in files.items():
        (arguments.folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if arguments.lines:
        lines, skipped = mixed_lines(arguments.lines)
        print(f"{len(lines)} lines, {sum(len(s.encode()) for s in lines)} bytes; "
              f"{skipped} characters left out, of which tokenizers' NFC does not know")
        jsonl(arguments.folder / "lines.jsonl", ({"text": s} for s in lines))
        for name, t in read.items():
            ids = [t.encode(s).ids for s in lines]
            jsonl(arguments.folder / f"{name}.ids.jsonl", ({"ids": i} for i in ids))
            jsonl(arguments.folder / f"{name}.text.jsonl",
                  ({"text": t.decode(i, skip_special_tokens=False)} for i in ids))
        return
    lines = CORNERS + [s for s in mixed_lines(len(CORNERS) + 110)[0][len(CORNERS):] if len(s.encode()) < 140]
    rng = random.Random(5)
    out = {"tokenizers": tokenizers.__version__, "lines": lines}
    for name, t in read.items():
        ids = [t.encode(s).ids for s in lines]
        # not text of anybody's, so that bytes do not fit together
        drawn = [[rng.randrange(t.get_vocab_size() + 3) for _ in range(rng.randrange(12))] for _ in range(60)]
        all_of = [t.decode(i, skip_special_tokens=False) for i in ids]
        without = [t.decode(i) for i in ids]
        out[name] = {"ids": ids, "text": unlike(all_of, lines), "without_special": unlike(without, lines),
                     "drawn": drawn, "drawn_text": [t.decode(i, skip_special_tokens=False) for i in drawn]}
    dump(arguments.folder / "encodings.json", out)
    dump(arguments.folder / "chats.json", {"templates": CHAT, "chats": chats()})


if __name__ == "__main__":
    main()
