"""Runs inside an environment of JoeyNMT: trains a model with its own trainer, and writes down what that model does.

    python joeynmt_program.py FOLDER

FOLDER holds `config.yaml`, `sources.txt` (texts to translate) and the data that the configuration names, paths relative
to FOLDER; a SentencePiece model or BPE codes that it names are learned from the data first, with a vocabulary for both
sides. FOLDER gains the model folder, `answers.json` (ids and texts, by JoeyNMT's own tokenizer, greedy search and beam
search) and `logits.npz` (one array for each sentence, from one padded batch, targets as in the answers).
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from joeynmt.batch import Batch
from joeynmt.config import load_config, parse_global_args
from joeynmt.helpers import make_model_dir
from joeynmt.prediction import prepare
from joeynmt.search import search
from joeynmt.training import train


def learn_pieces(data: dict) -> None:
    """What the configuration names for splitting words, and the vocabulary that goes with it."""
    settings = data["src"].get("tokenizer_cfg", {})
    files = [f"{data['train']}.{data[side]['lang']}" for side in ("src", "trg")]
    if "model_file" in settings:
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            input=files, model_prefix=settings["model_file"].removesuffix(".model"), vocab_size=40, model_type="bpe"
        )
        model = sentencepiece.SentencePieceProcessor(model_file=settings["model_file"])
        pieces = [model.id_to_piece(i) for i in range(model.get_piece_size()) if not model.is_control(i)]
    elif "codes" in settings:
        from subword_nmt import apply_bpe, learn_bpe

        Path("both.txt").write_text("".join(Path(one).read_text(encoding="utf-8") for one in files), encoding="utf-8")
        with open("both.txt", encoding="utf-8") as source, open(settings["codes"], "w", encoding="utf-8") as codes:
            learn_bpe.learn_bpe(source, codes, 30)
        with open(settings["codes"], encoding="utf-8") as codes:
            split = apply_bpe.BPE(codes).process_line(Path("both.txt").read_text(encoding="utf-8"))
        pieces = sorted(set(split.split()))
    else:
        return
    Path(data["src"]["voc_file"]).write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


def main(folder: Path) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    config = load_config(Path("config.yaml"))
    learn_pieces(config["data"])
    make_model_dir(Path(config["model_dir"]), overwrite=True)
    shutil.copy2("config.yaml", Path(config["model_dir"]) / "config.yaml")
    train(rank=0, world_size=None, cfg=config, skip_test=True)

    args = parse_global_args(load_config(Path("config.yaml")), rank=0, mode="translate")
    model, _, _, data = prepare(args, rank=0, mode="translate")
    model.eval()
    tokenizer = data.tokenizer[data.src_lang]
    texts = Path("sources.txt").read_text(encoding="utf-8").splitlines()
    pieces = [tokenizer(tokenizer.pre_process(text)) for text in texts]
    padded, lengths, _ = model.src_vocab.sentences_to_ids(pieces, bos=False, eos=True)
    batch = Batch(
        src=torch.tensor(padded),
        src_length=torch.tensor(lengths),
        src_prompt_mask=None,
        trg=None,
        trg_prompt_mask=None,
        indices=torch.arange(len(texts)),
        device=torch.device("cpu"),
        pad_index=model.pad_index,
        eos_index=model.eos_index,
        is_train=False,
    )
    answers = {"sources": [row[:length] for row, length in zip(padded, lengths, strict=True)]}
    for name, beams in (("greedy", 1), ("beam", 4)):
        found, _, _ = search(
            model=model,
            batch=batch,
            max_output_length=args.test.max_output_length,
            beam_size=beams,
            beam_alpha=args.test.beam_alpha,
            min_output_length=args.test.min_output_length,
        )
        cut = [row[: row.index(model.eos_index) + 1] if model.eos_index in row else row for row in found.tolist()]
        answers[name] = cut
        words = model.trg_vocab.arrays_to_sentences(found, cut_at_eos=True)
        answers[f"{name}_texts"] = [data.tokenizer[data.trg_lang].post_process(one) for one in words]

    chooser = random.Random(3)
    usable = [i for i in range(len(model.trg_vocab)) if i not in (model.pad_index, model.eos_index, model.bos_index)]
    targets = [
        [model.bos_index, *(chooser.choices(usable, k=chooser.randint(1, 12)) if i % 2 else answers["greedy"][i][:-1])]
        for i in range(len(texts))
    ]
    longest = max(map(len, targets))
    trg = torch.tensor([row + [model.pad_index] * (longest - len(row)) for row in targets])
    with torch.no_grad():
        logits, _, _, _ = model._encode_decode(
            src=batch.src,
            trg_input=trg,
            src_mask=batch.src_mask,
            src_length=batch.src_length,
            trg_mask=(trg != model.pad_index).unsqueeze(1),
        )
    answers["targets"] = targets
    np.savez("logits.npz", *[logits[i, : len(row)].numpy() for i, row in enumerate(targets)])
    Path("answers.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
