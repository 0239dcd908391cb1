#!/usr/bin/env python3
"""Put eyes before the tiny text model: a LLaVA model with a SigLIP vision tower of random, fixed-seed weights.

Usage: make-vision-model.py TEXT_MODEL OUT_DIR [--seed N] [--blind]

TEXT_MODEL is a folder that make-model.py wrote. Needs only numpy and safetensors (both come with vLLM).

Properties that the proof relies on:
  * an image of any size is 16 prompt tokens, and the greedy text depends on its pixels;
  * with --blind the tower is all zeros and the rest is the same: such an engine sees the same in every image, so its
    text is right only if another engine has encoded the image;
  * same seed -> same bytes, on every machine.
"""
import argparse
import json
import os

import numpy as np
from safetensors.numpy import load_file, save_file

SIDE, PATCH, HIDDEN, LAYERS, HEADS, INTER = 64, 16, 64, 2, 2, 128
IMAGE = "<image>"  # takes the first id after the text model's special tokens

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] or [] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p.get('text', '') }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tower(text_hidden, seed):
    """Return the weights of the vision tower and of the projector to the text model's embeddings."""
    rng = np.random.Generator(np.random.PCG64(seed))
    w = {}

    def linear(name, out, into, gain):
        w[name + ".weight"] = (rng.standard_normal((out, into)) * gain / into**0.5).astype(np.float32)
        w[name + ".bias"] = np.zeros(out, np.float32)

    def norm(name):
        w[name + ".weight"] = np.ones(HIDDEN, np.float32)
        w[name + ".bias"] = np.zeros(HIDDEN, np.float32)

    p = "vision_tower.vision_model."
    linear(p + "embeddings.patch_embedding", HIDDEN, 3 * PATCH * PATCH, 3.0)
    w[p + "embeddings.patch_embedding.weight"] = w[p + "embeddings.patch_embedding.weight"].reshape(
        HIDDEN, 3, PATCH, PATCH)
    w[p + "embeddings.position_embedding.weight"] = rng.standard_normal(
        ((SIDE // PATCH) ** 2, HIDDEN)).astype(np.float32)
    for i in range(LAYERS):
        layer = f"{p}encoder.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{layer}self_attn.{name}", HIDDEN, HIDDEN, 1.5)
        linear(layer + "mlp.fc1", INTER, HIDDEN, 1.5)
        linear(layer + "mlp.fc2", HIDDEN, INTER, 1.5)
        norm(layer + "layer_norm1")
        norm(layer + "layer_norm2")
    norm(p + "post_layernorm")
    linear("multi_modal_projector.linear_1", text_hidden, HIDDEN, 1.0)
    linear("multi_modal_projector.linear_2", text_hidden, text_hidden, 1.5)
    return w


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("text")
    ap.add_argument("out")
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument("--blind", action="store_true")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)

    def read(name):
        with open(os.path.join(a.text, name), encoding="utf-8") as f:
            return json.load(f)

    def dump(name, obj):
        with open(os.path.join(a.out, name), "w", encoding="utf-8") as f:
            json.dump(obj, f, indent=1, ensure_ascii=False)
            f.write("\n")

    text, tokenizer, tokenizer_config = read("config.json"), read("tokenizer.json"), read("tokenizer_config.json")
    image_id = tokenizer["added_tokens"][-1]["id"] + 1
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": image_id, "content": IMAGE})

    w = tower(text["hidden_size"], a.seed)
    if a.blind:
        w = {name: np.zeros_like(value) for name, value in w.items()}
    w.update({"language_model." + name: value
              for name, value in load_file(os.path.join(a.text, "model.safetensors")).items()})
    save_file(w, os.path.join(a.out, "model.safetensors"), metadata={"format": "pt"})

    dump("config.json", {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "dtype": "float32",
        "text_config": text, "image_token_index": image_id, "projector_hidden_act": "gelu",
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": HIDDEN, "intermediate_size": INTER,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "vision_use_head": False,
        },
    })
    dump("generation_config.json", read("generation_config.json"))
    dump("tokenizer.json", tokenizer)
    dump("tokenizer_config.json", {**tokenizer_config, "chat_template": CHAT_TEMPLATE})
    dump("preprocessor_config.json", {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": SIDE, "width": SIDE},
        "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    })
    dump("processor_config.json", {
        "processor_class": "LlavaProcessor", "patch_size": PATCH, "vision_feature_select_strategy": "full",
        "image_token": IMAGE, "num_additional_image_tokens": 0,
    })
    with open(os.path.join(a.out, "chat_template.jinja"), "w", encoding="utf-8") as f:
        f.write(CHAT_TEMPLATE)
    print(f"{a.out}: {sum(v.size for v in w.values())} parameters, an image is token {image_id}")


if __name__ == "__main__":
    main()
