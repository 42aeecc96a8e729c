"""Runs where fairseq is installed: makes checkpoints by fairseq's own classes and writes down what they compute.

    python fairseq_program.py FOLDER CASE...

Each case is a folder with a checkpoint as fairseq saves it, its dictionaries, and `expected.json` with `expected.npz`:
logits of padded batches, greedy and beam outputs of `SequenceGenerator`, and how fairseq reads and writes text.
"""

import argparse
import functools
import json
import os
import random
import sys
import unittest.mock

import numpy as np
import torch

# Parts of fairseq on sound and on classes want these large packages at import; none of them is used here.
ABSENT = ("sklearn", "sklearn.metrics", "scipy", "scipy.stats")
sys.modules.update({name: unittest.mock.MagicMock() for name in ABSENT})
# fairseq 0.12 is older than `weights_only`; its own files are what it loads here.
torch.load = functools.partial(torch.load, weights_only=False)

from fairseq import checkpoint_utils, options, tasks  # noqa: E402
from fairseq.data import Dictionary, data_utils  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402
from fairseq.models.transformer import TransformerModel  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

for name in ABSENT:  # torch looks for some of them too, and would take a stand-in for the real one
    del sys.modules[name]

SIZES = {
    "encoder_embed_dim": 32, "decoder_embed_dim": 32, "encoder_ffn_embed_dim": 48, "decoder_ffn_embed_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 3,
}  # fmt: skip
# Architecture, what differs from its defaults, whether both sides have one dictionary, and how settings are saved.
CASES = {
    "post-shared": ("transformer_wmt_en_de", {"share_all_embeddings": True}, True, "args"),
    "post-split": ("transformer_iwslt_de_en", {"activation_fn": "gelu"}, False, "cfg"),
    "pre-split": ("transformer_wmt_en_de_big_t2t", {"share_decoder_input_output_embed": True}, False, "cfg"),
    "pre-joined": ("transformer_wmt_en_de_big_t2t", {"no_scale_embedding": True}, True, "omegaconf"),
    "learned": (
        "transformer_vaswani_wmt_en_de_big",
        {"encoder_learned_pos": True, "decoder_learned_pos": True, "share_decoder_input_output_embed": True,
         "max_source_positions": 60, "max_target_positions": 60},
        False,
        "args",
    ),
    "old-names": ("transformer_tiny", {"share_decoder_input_output_embed": True, "old_names": True}, False, "args"),
    "old-untied": ("transformer", {"old_names": True}, False, "args"),
    "pre-no-final": (
        "transformer", {"encoder_normalize_before": True, "decoder_normalize_before": True, "old_version": True}, True,
        "args",
    ),
}  # fmt: skip
WORDS = ["".join(pair) for pair in zip("abcdefghijklmnopqrstuvwxyz", "ziyxhwvutsgrqponmlkjfedcba", strict=True)]


def flags(values):
    names = {f"--{key.replace('_', '-')}": value for key, value in values.items()}
    return [name if value is True else f"{name}={value}" for name, value in names.items()]


def make_dictionary(folder, language, words):
    dictionary = Dictionary()
    for word in words:
        for _ in range(1 + len(words) - words.index(word)):
            dictionary.add_symbol(word)
    dictionary.finalize(padding_factor=8)
    dictionary.save(os.path.join(folder, f"dict.{language}.txt"))


def random_model(args, task, spread):
    """fairseq's own model with weights wide enough that no two scores are close."""
    model = TransformerModel.build_model(args, task)
    torch.manual_seed(17)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layer_norm" in name and name.endswith("weight"):
                weight.uniform_(0.6, 1.4)
            elif weight.dim() == 1:
                weight.normal_(0.0, 0.2)
            elif "embed" in name or "output_projection" in name:
                weight.normal_(0.0, 0.5)
            else:
                weight.normal_(0.0, spread * weight.shape[-1] ** -0.5)
    return model.eval()


def save(model, args, kind, file):
    """As `Trainer.state_dict` does, or as versions before 0.10 did."""
    state = {
        "args": None,
        "cfg": None,
        "model": model.state_dict(),
        "optimizer_history": [
            {"criterion_name": "X", "optimizer_name": "adam", "lr_scheduler_state": {}, "num_updates": 0}
        ],
        "extra_state": {"train_iterator": {"epoch": 1}, "metrics": {}, "previous_training_time": 0.5},
        "task_state": {},
    }
    if kind == "args":
        state["args"] = args
    else:
        cfg = convert_namespace_to_omegaconf(args)
        state["cfg"] = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True) if kind == "cfg" else cfg
    checkpoint_utils.torch_persistent_save(state, file)


def make_case(folder, name):
    arch, changed, is_joined, kind = CASES[name]
    changed = dict(changed)
    is_old, has_old_names = changed.pop("old_version", False), changed.pop("old_names", False)
    os.makedirs(folder, exist_ok=True)
    make_dictionary(folder, "xx", WORDS)
    make_dictionary(folder, "yy", WORDS if is_joined else list(reversed(WORDS))[:17])
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(
        parser,
        [folder, "--task", "translation", "--arch", arch, "-s", "xx", "-t", "yy", "--criterion",
         "label_smoothed_cross_entropy", "--label-smoothing", "0.1", "--dropout", "0.25", *flags({**SIZES, **changed})],
    )  # fmt: skip
    args.max_len_b, args.beam = 24, 4
    task = tasks.setup_task(args)
    model = random_model(args, task, spread=0.5 if is_old else 1.2)  # nothing norms the output of an old one
    if is_old:  # the oldest pre-norm models had no norm on top, and say so by their version
        for stack in (model.encoder, model.decoder):
            stack.layer_norm = None
            stack.version.fill_(1)
    file = os.path.join(folder, "checkpoint_best.pt")
    save(model, args, kind, file)
    if has_old_names:
        state = torch.load(file)
        state["model"] = old_names(state["model"])
        torch.save(state, file, _use_new_zipfile_serialization=False)


def old_names(tensors):
    """The layout of fairseq 0.6, which today's fairseq still reads: maps in one matrix, norms by number."""
    found = {}
    norms = {
        "encoder": ["self_attn_layer_norm", "final_layer_norm"],
        "decoder": ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
    }
    for name, tensor in tensors.items():
        side, *middle, last = name.split(".")
        if len(middle) == 2 and last in ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias",
                                         "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"):  # fmt: skip
            continue
        if name == "decoder.output_projection.weight":
            if not torch.equal(tensor, tensors["decoder.embed_tokens.weight"]):
                found["decoder.embed_out"] = tensor
        elif name.endswith("_float_tensor"):
            found[name.replace("_float_tensor", "weights")] = torch.zeros(9, 32)
        elif middle and middle[-1] in norms[side]:
            found[f"{side}.layers.{middle[1]}.layer_norms.{norms[side].index(middle[-1])}.{last}"] = tensor
        elif middle and middle[-1] == "q_proj":
            parts = [tensors[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            found[f"{side}.{'.'.join(middle[:-1])}.in_proj_{last}"] = torch.cat(parts)
        elif not (middle and middle[-1] in ("k_proj", "v_proj")):
            found[name] = tensor
    return found


def trained_case(folder):
    """fairseq's own command lines: binarise, train for a few updates on copying, save."""
    from fairseq_cli import preprocess, train

    os.makedirs(folder, exist_ok=True)
    rng = random.Random(5)
    for split, lines in (("train", 400), ("valid", 20)):
        text = [" ".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(lines)]
        for language in ("xx", "yy"):
            with open(os.path.join(folder, f"{split}.{language}"), "w", encoding="utf-8") as file:
                file.write("\n".join(text) + "\n")
    parser = options.get_preprocessing_parser()
    raw = [
        "-s",
        "xx",
        "-t",
        "yy",
        "--trainpref",
        f"{folder}/train",
        "--validpref",
        f"{folder}/valid",
        "--destdir",
        folder,
    ]
    preprocess.main(parser.parse_args([*raw, "--joined-dictionary", "--workers", "1"]))
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(
        parser,
        [folder, "-s", "xx", "-t", "yy", "--arch", "transformer_iwslt_de_en", "--share-all-embeddings", *flags(SIZES),
         "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "0.005", "--lr-scheduler", "inverse_sqrt",
         "--warmup-updates", "30", "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1",
         "--max-tokens", "600", "--max-update", "120", "--save-dir", folder, "--no-epoch-checkpoints", "--cpu",
         "--num-workers", "0", "--log-format", "none", "--seed", "3", "--eval-bleu", "--eval-bleu-detok", "space",
         "--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"],
    )  # fmt: skip
    train.main(convert_namespace_to_omegaconf(args))


def text_case(folder, kind):
    """Text in and out through fairseq's own hub interface: Moses and BPE, or SentencePiece."""
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(11)
    words = [
        a + b + c for a in ("Haus", "well-", "co", "it's", "über") for b in ("en", "ly", "") for c in ("s", "er", "")
    ]
    text = [" ".join(rng.choices(words, k=6)) + rng.choice([".", " & so on", "?", ' "yes".']) for _ in range(60)]
    if kind == "bpe":
        from sacremoses import MosesTokenizer
        from subword_nmt import apply_bpe, learn_bpe

        tokenizer = MosesTokenizer("en")
        tokenized = [tokenizer.tokenize(line, aggressive_dash_splits=True, return_str=True) for line in text]
        with open(os.path.join(folder, "bpecodes"), "w", encoding="utf-8") as out:
            learn_bpe.learn_bpe(tokenized, out, 40)
        with open(os.path.join(folder, "bpecodes"), encoding="utf-8") as codes:
            bpe = apply_bpe.BPE(codes)
        pieces = [bpe.process_line(line) for line in tokenized]
        hub = {"tokenizer": "moses", "bpe": "subword_nmt", "bpe_codes": os.path.join(folder, "bpecodes"),
               "source_lang": "xx", "target_lang": "yy"}  # fmt: skip
    else:
        import sentencepiece

        prefix = os.path.join(folder, "spm")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_prefix=prefix, vocab_size=50, minloglevel=2
        )
        processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
        pieces = [" ".join(processor.encode(line, out_type=str)) for line in text]
        hub = {"bpe": "sentencepiece", "sentencepiece_model": f"{prefix}.model"}
    vocabulary = sorted({piece for line in pieces[:40] for piece in line.split()})
    make_dictionary(folder, "xx", vocabulary)
    make_dictionary(folder, "yy", vocabulary)
    args = options.parse_args_and_arch(
        options.get_training_parser(),
        [folder, "--task", "translation", "--arch", "transformer", "-s", "xx", "-t", "yy", "--share-all-embeddings",
         *flags(SIZES)],
    )  # fmt: skip
    args.max_len_b, args.beam = 24, 4
    for name in ("tokenizer", "bpe"):
        setattr(args, name, hub.get(name))
    model = random_model(args, tasks.setup_task(args), spread=1.2)
    save(model, args, "args" if kind == "bpe" else "cfg", os.path.join(folder, "checkpoint_best.pt"))
    found = TransformerModel.from_pretrained(folder, "checkpoint_best.pt", data_name_or_path=".", **hub)
    lines = [*text[40:], "Ünknown wörd's <here>", ""]
    return {"texts": lines, "text_ids": [found.encode(line).tolist() for line in lines], "hub": found}


def generate(generator, model, sources, pad, keep_all=False):
    out = []
    for begin in range(0, len(sources), 10):
        rows = [torch.tensor(one) for one in sources[begin : begin + 10]]
        tokens = data_utils.collate_tokens(rows, pad, left_pad=True)
        sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([len(one) for one in rows])}}
        out += [[hypo[0]["tokens"].tolist(), float(hypo[0]["score"])] for hypo in generator.generate([model], sample)]
    return out


def describe(folder, more):
    """What fairseq computes with the checkpoint of a folder, loaded by fairseq's own loader."""
    hub = more.pop("hub", None)
    file = os.path.join(folder, "checkpoint_best.pt")
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([file], arg_overrides={"data": folder})
    model = models[0].eval()
    rng = random.Random(29)
    size, target_size = len(task.source_dictionary), len(task.target_dictionary)
    sources = [[rng.randrange(4, size) for _ in range(rng.randint(1, 12))] + [2] for _ in range(50)]
    targets = [[2] + [rng.randrange(4, target_size) for _ in range(rng.randint(1, 11))] for _ in range(50)]
    arrays = {}
    with torch.no_grad():
        for side in ("left", "right"):
            rows = data_utils.collate_tokens([torch.tensor(s) for s in sources[:8]], 1, left_pad=side == "left")
            read = data_utils.collate_tokens([torch.tensor(t) for t in targets[:8]], 1, left_pad=False)
            arrays[f"logits_{side}"] = model(rows, torch.tensor([len(s) for s in sources[:8]]), read)[0].numpy()
        long = [[rng.randrange(4, size) for _ in range(49)] + [2]]
        arrays["logits_long"] = model(torch.tensor(long), torch.tensor([50]), torch.tensor([targets[0]]))[0].numpy()
        settings = (
            OmegaConf.to_container(cfg.generation) if OmegaConf.is_config(cfg.generation) else vars(cfg.generation)
        )
        outputs = {}
        for beam in (1, 4):
            generator = task.build_generator([model], argparse.Namespace(**{**settings, "beam": beam}))
            outputs[str(beam)] = generate(generator, model, sources, 1)
    lines = [" ".join(rng.choices([*WORDS, "zzz", "<unk>"], k=4)) for _ in range(12)]
    encoded = [task.source_dictionary.encode_line(line, add_if_not_exist=False).tolist() for line in lines]
    decode = hub.decode if hub is not None else task.target_dictionary.string
    written = [decode(torch.tensor(ids)) for ids, _ in outputs["1"]]
    with open(os.path.join(folder, "expected.json"), "w", encoding="utf-8") as out:
        json.dump(
            {
                "sources": sources, "targets": targets, "outputs": outputs, "long": long, "lines": lines,
                "encoded": encoded, "written": written, **more,
                "symbols": [task.source_dictionary.symbols, task.target_dictionary.symbols],
            },
            out,
        )  # fmt: skip
    np.savez(os.path.join(folder, "expected.npz"), **arrays)


def main():
    root, names = os.path.abspath(sys.argv[1]), sys.argv[2:] or [*CASES, "bpe", "spm", "trained"]
    torch.set_num_threads(1)
    for name in names:
        folder = os.path.join(root, name)
        more = {}
        if name == "trained":
            trained_case(folder)
        elif name in CASES:
            make_case(folder, name)
        else:
            more = text_case(folder, name)
        describe(folder, more)
        print("made", name, flush=True)


if __name__ == "__main__":
    main()
