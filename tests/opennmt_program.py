"""Runs inside an environment of OpenNMT-py 1, 2 or 3: trains with its own trainer, and writes down what the model does.

    python opennmt_program.py FOLDER

FOLDER holds `config.yaml` of its train program, with paths relative to FOLDER and `save_model: model`, the data and the
vocabularies that it names, and `sources.txt` (texts of words to translate). It gains a checkpoint, `answers.json`
(ids, by the translate program's own greedy and beam search) and `logits.npz` (one array for each sentence, from one
padded batch, targets as in the answers).
"""

import importlib.abc
import importlib.machinery
import json
import os
import random
import sys
import types
from pathlib import Path

LIMIT = 40  # new tokens
# Packages that OpenNMT-py imports for steps on text that are not used here.
_UNUSED = ("spacy", "fasttext", "ctranslate2", "sentencepiece", "subword_nmt")


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for a package that is not installed; whatever is asked of it is a class without anything."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in _UNUSED else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__file__ = f"{spec.name}.py"
        module.__getattr__ = lambda name: type(name, (), {})
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Unused())

import numpy as np  # noqa: E402
import torch  # noqa: E402

# These versions are older than the rule that a checkpoint holds weights only.
_load = torch.load
torch.load = lambda *args, **kwargs: _load(*args, **{"weights_only": False, **kwargs})

import onmt  # noqa: E402


def run(program, *arguments):
    """One of the command-line programs, in this process."""
    sys.argv = [program, *arguments]
    module = __import__(f"onmt.bin.{program}", fromlist=["main"])
    module.main()


def prepared():
    """What version 1 does before training, from a configuration of version 2; the configuration of version 1."""
    import yaml

    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    for key in ("src_vocab", "tgt_vocab", "num_workers", "save_data"):
        config.pop(key)
    files = {name: config["data"][part] for name, part in (("train", "corpus_1"), ("valid", "valid"))}
    named = [
        part
        for name, one in files.items()
        for side in ("src", "tgt")
        for part in (f"-{name}_{side}", one[f"path_{side}"])
    ]
    run("preprocess", *named, "-save_data", "data", *(["-share_vocab"] if config.pop("share_vocab", False) else []))
    Path("config_1.yaml").write_text(yaml.safe_dump({**config, "data": "data"}), encoding="utf-8")
    return "config_1.yaml"


def main(folder):
    os.chdir(folder)
    torch.set_num_threads(1)
    third = onmt.__version__.startswith("3")
    config = "config.yaml" if not onmt.__version__.startswith("1") else prepared()
    run("train", "-config", config)
    checkpoint = sorted(Path().glob("model_step_*.pt"), key=lambda one: int(one.stem.rsplit("_", 1)[1]))[-1]

    for weights in Path().glob("model_step_*.safetensors"):
        if weights.suffixes == [".safetensors"]:  # it saves one file, and looks for numbered ones
            weights.rename(f"{weights.stem}.00.safetensors")

    from onmt.model_builder import load_test_model
    from onmt.opts import translate_opts
    from onmt.utils.parse import ArgumentParser

    parser = ArgumentParser()
    translate_opts(parser)
    common = ["-model", str(checkpoint), "-src", "sources.txt", "-max_length", str(LIMIT)]
    common += ["-max_length_ratio", "0"] if third else []
    opt = parser.parse_args(common)
    vocabulary, model, _ = load_test_model(opt)
    if third:
        itos = {side: vocabulary[side].ids_to_tokens for side in ("src", "tgt")}
    else:
        itos = {side: vocabulary[side].base_field.vocab.itos for side in ("src", "tgt")}
    ids = {side: {piece: i for i, piece in enumerate(pieces)} for side, pieces in itos.items()}
    texts = Path("sources.txt").read_text(encoding="utf-8").splitlines()
    answers = {"sources": [[ids["src"].get(w, ids["src"]["<unk>"]) for w in text.split()] for text in texts]}
    for name, beams in (("greedy", "1"), ("beam", "4")):
        # Version 2 turns a beam of one into a beam search of one, which is greedy as well.
        run("translate", *common, "-beam_size", beams, "-output", f"{name}.txt", "-length_penalty", "none")
        lines = Path(f"{name}.txt").read_text(encoding="utf-8").split("\n")[: len(texts)]
        answers[f"{name}_texts"] = lines
        # At the limit there is no end token.
        answers[name] = [[*(ids["tgt"][w] for w in line.split()), ids["tgt"]["</s>"]][:LIMIT] for line in lines]

    chooser = random.Random(3)
    start, pad = ids["tgt"]["<s>"], ids["tgt"]["<blank>"]
    usable = [i for i in range(len(itos["tgt"])) if i not in (pad, start, ids["tgt"]["</s>"])]
    targets = [
        [start, *(chooser.choices(usable, k=chooser.randint(1, 12)) if i % 2 else answers["greedy"][i][:-1])]
        for i in range(len(texts))
    ]
    answers["targets"] = targets

    def padded(rows, value):
        longest = max(map(len, rows))
        table = torch.tensor([row + [value] * (longest - len(row)) for row in rows])
        return table[:, :, None] if third else table.t()[:, :, None]

    src, tgt = padded(answers["sources"], ids["src"]["<blank>"]), padded(targets, pad)
    lengths = torch.tensor([len(row) for row in answers["sources"]])
    with torch.no_grad():
        # The model itself drops the last column of the target, so one more is given.
        more = torch.cat([tgt, tgt[:, :1] if third else tgt[:1]], dim=1 if third else 0)
        hidden, _ = model(src, more, lengths)
        logits = (model.generator if third else model.generator[0])(hidden)
    logits = logits if third else logits.transpose(0, 1)
    np.savez("logits.npz", *[logits[i, : len(row)].numpy() for i, row in enumerate(targets)])
    Path("answers.json").write_text(json.dumps({**answers, "checkpoint": str(checkpoint)}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
