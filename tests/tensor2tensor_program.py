"""Runs inside an environment that has TensorFlow and Tensor2Tensor: makes models with its code, and asks them.

    python tensor2tensor_program.py FOLDER SHAPE.json OUT.npz

Trains a small Transformer of Tensor2Tensor a little, on saying the source backwards; saves it in FOLDER as a training
run does; asks it in padded batches for logits, and for what its own search answers.

SHAPE.json: {"set": a set of hyper-parameters, "hparams": changes to it, "rows": [source, target], "space": number of
the target's language, "steps": of training, "sources", "targets": ids, "limit": new tokens beyond the source's}.
OUT.npz: `logits_0` ... of each pair, [T, V]; `greedy` and `beam`, ids, padded with 0.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()  # or its layers name their variables in another way
# The package of models imports all of them, and thereby games and robots; one is enough here.
_package = types.ModuleType("tensor2tensor.models")
_package.__path__ = [str(Path(importlib.util.find_spec("tensor2tensor").submodule_search_locations[0]) / "models")]
sys.modules["tensor2tensor.models"] = _package
from tensor2tensor.data_generators import problem_hparams  # noqa: E402
from tensor2tensor.models import transformer  # noqa: E402
from tensor2tensor.utils import registry  # noqa: E402


def hyperparameters(shape):
    hparams = registry.hparams(shape["set"])
    for name, value in shape["hparams"].items():
        hparams.set_hparam(name, value)
    described = problem_hparams.test_problem_hparams(*shape["rows"], model_hparams=hparams)
    hparams.problem_hparams = described
    return hparams, described


def model(shape, mode):
    hparams, described = hyperparameters(shape)
    if mode != tf.estimator.ModeKeys.TRAIN:
        for name in hparams.values():
            if name.endswith("dropout"):
                hparams.set_hparam(name, 0.0)
    return transformer.Transformer(hparams, mode, described)


def features(shape, source, target):
    return {
        "inputs": source[:, :, None, None],
        "targets": target[:, :, None, None],
        "target_space_id": tf.constant(shape["space"], tf.int32),
    }


def padded(rows):
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for n, row in enumerate(rows):
        table[n, : len(row)] = row
    return table


def train(shape, folder):
    rng = np.random.default_rng(5)
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(3)
        source, target = (tf.placeholder(tf.int32, [None, None]) for _ in range(2))
        _, losses = model(shape, tf.estimator.ModeKeys.TRAIN)(features(shape, source, target))
        with tf.variable_scope("training"):
            step = tf.train.AdamOptimizer(3e-3).minimize(sum(losses.values()), tf.train.create_global_step())
        session.run(tf.global_variables_initializer())
        for _ in range(shape["steps"]):
            drawn = rng.integers(2, min(shape["rows"]), (16, rng.integers(2, 10)))
            end = np.ones((16, 1), np.int32)
            labels = np.concatenate([drawn[:, ::-1], end], 1)
            session.run(step, {source: np.concatenate([drawn, end], 1), target: labels})
        tf.train.Saver().save(session, str(folder / "model.ckpt"), global_step=shape["steps"])
    (folder / "hparams.json").write_text(hyperparameters(shape)[0].to_json())
    (folder / "flags.txt").write_text(f"--model=transformer\n--hparams_set={shape['set']}\n")


def ask(shape, folder):
    found = {}
    with tf.Graph().as_default(), tf.Session() as session:
        # The last target column is only predicted, and its own id never read.
        source, target = tf.constant(padded(shape["sources"])), tf.constant(padded(shape["targets"]))
        made = model(shape, tf.estimator.ModeKeys.EVAL)
        logits, _ = made(features(shape, source, target))
        made.set_mode(tf.estimator.ModeKeys.PREDICT)
        asked = {name: value for name, value in features(shape, source, target).items() if name != "targets"}
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            answers = {
                "greedy": made.infer(dict(asked), decode_length=shape["limit"], beam_size=1)["outputs"],
                "beam": made.infer(dict(asked), decode_length=shape["limit"], beam_size=4, top_beams=1, alpha=0.6)[
                    "outputs"
                ],
            }
        tf.train.Saver().restore(session, tf.train.latest_checkpoint(str(folder)))
        for n, (row, ids) in enumerate(zip(session.run(logits), shape["targets"], strict=True)):
            found[f"logits_{n}"] = row[: len(ids), 0, 0]
        for name, answer in answers.items():
            found[name] = session.run(answer).reshape(len(shape["sources"]), -1)
    return found


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    where, told = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    where.mkdir(parents=True)
    train(told, where)
    np.savez(sys.argv[3], **ask(told, where))
