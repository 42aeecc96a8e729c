"""Runs inside an environment that has Marian's Python package: trains small models with it, and says what they answer.

    python marian_program.py train FOLDER OPTIONS.json    a model, after a few updates on FOLDER/src and FOLDER/trg
    python marian_program.py ask FOLDER ASKED.json OUT.json

ASKED.json: {"vocabs": names, "lines": source lines, "targets": a target line for each}.
OUT.json: `scores`, the log-probability of each word of each target; `greedy` and `beam`, output lines.
"""

import json
import os
import sys
from pathlib import Path

import _pymarian
from pymarian import Trainer, Translator


def train(folder: Path, options: dict) -> None:
    os.chdir(folder)
    fixed = {
        "type": "transformer", "model": "model.npz", "train_sets": ["src", "trg"], "cpu_threads": 1, "mini_batch": 16,
        "maxi_batch": 10, "workspace": 128, "seed": 3, "learn_rate": 0.003, "quiet": "true", "save_freq": "9999u",
        "tempdir": ".", "max_length": 200,
    }  # fmt: skip
    Trainer(**fixed, **options).train()


def ask(folder: Path, asked: dict, out: Path) -> None:
    os.chdir(folder)
    Path("asked.src").write_text("\n".join(asked["lines"]) + "\n", encoding="utf-8")
    Path("asked.trg").write_text("\n".join(asked["targets"]) + "\n", encoding="utf-8")
    common = ["--cpu-threads", "1", "--quiet"]
    _pymarian.main(
        ["score", "-m", "model.npz", "-v", *asked["vocabs"], "-t", "asked.src", "asked.trg", "-o", "scores.txt",
         "--word-scores", *common]
    )  # fmt: skip
    scores = [
        [float(one) for one in line.split("WordScores=")[1].split()]
        for line in Path("scores.txt").read_text(encoding="utf-8").splitlines()
    ]
    found = {"scores": scores}
    for name, beams in (("greedy", 1), ("beam", 4)):
        translator = Translator(
            models=["model.npz"], vocabs=asked["vocabs"], cpu_threads=1, quiet="true", beam_size=beams, mini_batch=1,
            maxi_batch=1, normalize=asked.get("normalize", 0), max_length_factor=3,
        )  # fmt: skip
        answer = translator.translate("\n".join(asked["lines"]))
        found[name] = answer.split("\n") if isinstance(answer, str) else list(answer)
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    command, folder, told = sys.argv[1], Path(sys.argv[2]).resolve(), json.loads(Path(sys.argv[3]).read_text("utf-8"))
    if command == "train":
        train(folder, told)
    else:
        ask(folder, told, Path(sys.argv[4]).resolve())
