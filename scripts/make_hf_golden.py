#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random models of transformers, and what transformers computes with them in float64.

    scripts/make_hf_golden.py                     writes tests/trainer/hf_golden
    scripts/make_hf_golden.py --check             compares what is there with what this transformers computes
    scripts/make_hf_golden.py --random 24 DIR     as many random configurations, in DIR
    scripts/make_hf_golden.py --loads DIR MODELS  DIR/NAME-float32 and -bfloat16, which the trainer wrote of MODELS/NAME
    scripts/make_hf_golden.py --adapters DIR      DIR/NAME-lora, merged, and its adapter/ on hf_golden/NAME by peft

Beside each model directory NAME stands NAME.expected.safetensors: `tokens` (S,L), `teacher` (S,L,V), `logits` (S,L,V),
`log_probs` (S,L,V), and `gradient.TENSOR` of the loss

    mean over all S L rows of KL(softmax(logits) || softmax(teacher))

transformers computes norms, angles and softmax in float32 even in a model of float64: its modelling code is run from a
copy in which float32 is float64, and held to the original to 1e-5.

Needs torch and transformers (and safetensors, which transformers brings); prints SKIPPED where they are not.
"""
import argparse
import inspect
import json
import pathlib
import random
import re
import shutil
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/trainer/hf_golden"

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers import modeling_rope_utils
except ImportError as missing:
    print(f"SKIPPED make_hf_golden: {missing}")
    sys.exit(0)

CLASSES = {"qwen3": ("Qwen3Config", "Qwen3ForCausalLM"), "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
           "llama": ("LlamaConfig", "LlamaForCausalLM")}
SMALL = dict(vocab_size=40, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=6, max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=0.5, high_freq_factor=4.0,
              original_max_position_embeddings=32)


def in_double(module, **names):
    """The module's own code, with float64 wherever it says float32."""
    source = re.sub(r"torch\.float32\b|torch\.float\b", "torch.float64", inspect.getsource(module))
    copy = types.ModuleType(module.__name__ + "_in_double")
    copy.__package__ = module.__package__
    copy.__file__ = module.__file__
    sys.modules[copy.__name__] = copy
    code = compile(source.replace(".float()", ".double()"), module.__file__, "exec")
    exec(code, copy.__dict__)  # noqa: S102
    copy.__dict__.update(names)
    return copy


def class_in_double(kind):
    if not hasattr(class_in_double, "rope"):
        class_in_double.rope = in_double(modeling_rope_utils)
    module = sys.modules[getattr(transformers, CLASSES[kind][1]).__module__]
    copy = in_double(module, ROPE_INIT_FUNCTIONS=class_in_double.rope.ROPE_INIT_FUNCTIONS)
    return getattr(copy, CLASSES[kind][1])


def computed(kind, config, weights, tokens, teacher, dtype):
    """Logits, log-probs and gradients of the loss by tensor name."""
    cls = class_in_double(kind) if dtype == torch.float64 else getattr(transformers, CLASSES[kind][1])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    model = cls._from_config(config, attn_implementation="eager").to(dtype).eval()
    torch.set_default_dtype(before)
    rotary = model.model.rotary_emb
    if dtype == torch.float64 and rotary.rope_type != "default":  # initialising the model made them in float32 again
        rotary.inv_freq.copy_(class_in_double.rope.ROPE_INIT_FUNCTIONS[rotary.rope_type](config)[0])
    said = model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, strict=False)
    assert not said.unexpected_keys and set(said.missing_keys) <= {"lm_head.weight"}, said
    model.tie_weights()
    logits = model(input_ids=tokens).logits.to(dtype)
    log_p = torch.log_softmax(logits, -1)
    log_q = torch.log_softmax(teacher.to(dtype), -1)
    loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    loss.backward()
    gradients = {"gradient." + name: p.grad.detach().clone() for name, p in model.named_parameters()}
    assert set(gradients) == {"gradient." + name for name in weights}, "parameters and weights have other names"
    return {"logits": logits.detach(), "log_probs": log_p.detach(), **gradients}


def expected_of(directory, tokens, teacher):
    config = transformers.AutoConfig.from_pretrained(directory)
    weights = {}
    for file in sorted(pathlib.Path(directory).glob("model*.safetensors")):
        weights.update(load_file(file))
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    kind = config.model_type
    exact = computed(kind, config, weights, tokens, teacher, torch.float64)
    plain = computed(kind, config, weights, tokens, teacher, torch.float32)
    for name, value in exact.items():
        error = (value - plain[name].double()).abs().max().item()
        limit = 1e-5 * max(1.0, value.abs().max().item())
        assert error <= limit, f"{directory}: {name} of float64 is {error} off transformers' own"
    return {"tokens": tokens, "teacher": teacher, **exact}


def make(directory, kind, settings, dtype, seed, shards=0, length=12, tie_twice=False):
    """Writes a model directory, and what is expected of it beside it."""
    torch.manual_seed(seed)
    directory = pathlib.Path(directory)
    shutil.rmtree(directory, ignore_errors=True)
    config = getattr(transformers, CLASSES[kind][0])(**settings)
    model = getattr(transformers, CLASSES[kind][1])(config).to(dtype)
    with torch.no_grad():  # norms start at 1, biases at 0, all else at .02: nothing of it would show
        for name, p in model.named_parameters():
            scale = 1.0 if name.endswith("embed_tokens.weight") and not config.tie_word_embeddings else 0.3
            p.copy_((torch.randn(p.shape) * scale + ("norm" in name)).to(dtype))
    size = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    model.save_pretrained(directory, max_shard_size=size // shards + 1 if shards else "5GB")
    if tie_twice:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file, metadata={"format": "pt"})
    # a tokenizer's files go along as they are, whatever they say
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64, "note": "kept as it is"}')
    for file in directory.iterdir():
        file.chmod(0o644)
    tokens = torch.randint(config.vocab_size, (2, length))
    teacher = torch.randn(2, length, config.vocab_size)
    expected = pathlib.Path(f"{directory}.expected.safetensors")
    save_file({k: v.contiguous() for k, v in expected_of(directory, tokens, teacher).items()}, expected)
    expected.chmod(0o644)


def golden():
    GOLDEN.mkdir(parents=True, exist_ok=True)
    make(GOLDEN / "qwen3", "qwen3", dict(SMALL, rope_theta=1e4, rms_norm_eps=1e-6), torch.bfloat16, 1, shards=3)
    make(GOLDEN / "qwen2", "qwen2", dict(SMALL, tie_word_embeddings=True, rms_norm_eps=1e-5), torch.float32, 2)
    make(GOLDEN / "llama", "llama", dict(SMALL, rope_parameters=LLAMA3, rms_norm_eps=1e-5, attention_bias=True),
         torch.float16, 3)
    size = sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file())
    print(f"{GOLDEN}: {size} bytes")
    assert size < 400_000


def check():
    found = sorted(GOLDEN.glob("*.expected.safetensors"))
    assert len(found) == 3, found
    for file in found:
        had = load_file(file)
        name = file.name.split(".")[0]
        for tensor, value in expected_of(GOLDEN / name, had["tokens"], had["teacher"]).items():
            error = (value.double() - had[tensor].double()).abs().max().item()
            assert error <= 1e-11 * max(1.0, value.abs().max().item()), f"{name}: {tensor} is {error} off"
        print(f"{name}: {len(had)} tensors as transformers {transformers.__version__} computes them")


def random_models(count, directory, seed):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for i in range(count):
        kind = draw.choice(["qwen3", "qwen2", "llama"])
        heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
        s = dict(vocab_size=draw.randint(20, 90), hidden_size=heads * group * draw.randint(2, 9),
                 intermediate_size=draw.randint(10, 70), num_hidden_layers=draw.randint(1, 4),
                 num_attention_heads=heads * group, num_key_value_heads=heads, head_dim=2 * draw.randint(1, 9),
                 max_position_embeddings=256, rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-3]),
                 tie_word_embeddings=draw.random() < 0.5)
        theta = draw.choice([1e4, 5e5, 1e6])
        s["rope_parameters"] = draw.choice([
            dict(rope_type="default", rope_theta=theta),
            dict(rope_type="linear", rope_theta=theta, factor=draw.choice([2.0, 4.0])),
            dict(LLAMA3, rope_theta=theta, original_max_position_embeddings=draw.choice([16, 64, 128])),
        ])
        if kind != "qwen2":
            s["attention_bias"] = draw.random() < 0.5
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        shards = draw.choice([0, 0, 2, 5])
        make(directory / f"{i:02}-{kind}", kind, s, dtype, seed + i, shards, length=draw.randint(2, 40),
             tie_twice=not shards and s["tie_word_embeddings"] and draw.random() < 0.5)
    print(f"{count} random models in {directory}")


def loads(directory, golden_directory):
    """What the trainer wrote, as transformers' own classes load it."""
    worst = {"float32": 0.0, "bfloat16": 0.0}
    for file in sorted(pathlib.Path(golden_directory).glob("*.expected.safetensors")):
        had = load_file(file)
        name = file.name.split(".")[0]
        source = pathlib.Path(golden_directory) / name
        for kind in worst:
            written = pathlib.Path(directory) / f"{name}-{kind}"
            model = transformers.AutoModelForCausalLM.from_pretrained(written, dtype="auto").eval()
            assert str(model.dtype) == "torch." + kind, f"{written} is loaded as {model.dtype}"
            given = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="float32").to(model.dtype)
            for (parameter, a), (other, b) in zip(model.named_parameters(), given.named_parameters(), strict=True):
                assert parameter == other and torch.equal(a, b), f"{written}: {parameter} is not as torch rounds it"
            with torch.no_grad():
                logits = model.float()(input_ids=had["tokens"]).logits.double()
            error = ((logits - had["logits"]).norm() / had["logits"].norm()).item()
            # as far as bfloat16 takes it: these weights are 15 times a trained model's
            assert error <= (1e-5 if kind == "float32" else 1e-1), f"{written}: logits are {error} off"
            worst[kind] = max(worst[kind], error)
            for kept in ["generation_config.json", "tokenizer_config.json"]:
                assert (written / kept).read_bytes() == (source / kept).read_bytes(), f"{written}: {kept} is another"
            a, b = (json.loads((d / "config.json").read_text()) for d in (written, source))
            for keys in (a, b):
                for key in ("dtype", "torch_dtype"):
                    keys.pop(key, None)
            assert a == b, f"{written}: its config.json says other things"
    print("written here, loaded there: every weight as torch rounds it; logits, by their norm, {float32:.1e} off in "
          "float32, {bfloat16:.1e} in bfloat16".format(**worst))


def adapters(directory):
    """A merged model and its base with the adapter beside it, as peft loads that."""
    try:
        import peft
    except ImportError as absent:
        print(f"SKIPPED adapters: {absent}")
        return
    worst, count = 0.0, 0
    for merged in sorted(pathlib.Path(directory).glob("*-lora")):
        def load(path):
            return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()

        base = load(GOLDEN / merged.name.removesuffix("-lora"))
        tokens = torch.arange(24).reshape(2, 12)
        with torch.no_grad():
            before = base(input_ids=tokens).logits
            adapted = peft.PeftModel.from_pretrained(base, merged / "adapter").eval()
            logits, expected = adapted(input_ids=tokens).logits, load(merged)(input_ids=tokens).logits
        error, moved = ((x - expected).abs().max().item() for x in (logits, before))
        assert moved > 1e-2, f"{merged}: the adapter moves logits by {moved} alone"
        assert error <= 1e-4, f"{merged}: base and adapter are {error} off the merged model"
        worst, count = max(worst, error), count + 1
    assert count > 0, f"no NAME-lora in {directory}"
    print(f"{count} adapters: peft's logits are those of the merged models to {worst:.1e}")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--check", action="store_true")
    p.add_argument("--random", type=int, metavar="N")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--loads", metavar="DIR")
    p.add_argument("--adapters", metavar="DIR")
    p.add_argument("directory", nargs="?")
    a = p.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if a.check:
        check()
    elif a.random:
        random_models(a.random, a.directory, a.seed)
    elif a.loads:
        loads(a.loads, a.directory)
    elif a.adapters:
        adapters(a.adapters)
    else:
        golden()


if __name__ == "__main__":
    main()
