"""Runs inside an environment that has Sockeye: makes models with its own code, and says what they answer.

    python sockeye_program.py make FOLDER SHAPE.json      a small model, trained a little, saved by Sockeye
    python sockeye_program.py ask FOLDER ASKED.json OUT.npz

ASKED.json: {"lines": source lines, "targets": lists of target ids that begin with <s>, "limit": most new tokens}.
OUT.npz: `logits_0` ... of each pair, [T, V], from one padded batch; `greedy` and `beam`, lines of target words.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from sockeye import data_io, encoder, inference, model, transformer, vocab


def make(folder: Path, shape: dict) -> None:
    folder.mkdir(parents=True)
    torch.manual_seed(shape["seed"])
    words = {
        side: ["<pad>", "<unk>", "<s>", "</s>"]
        + [f"{shape[f'{side}_word']}{n}" for n in range(shape[f"{side}_rows"] - 4)]
        for side in ("source", "target")
    }
    longest = {f"max_seq_len_{side}": shape["longest"] for side in ("source", "target")}
    sizes = {f"size_vocab_{side}": len(words[side]) for side in words}
    counts = dict.fromkeys(
        ("num_discarded", "num_unks_source", "num_unks_target", "num_tokens_source", "num_tokens_target", "num_sents"),
        0,
    )
    data = data_io.DataConfig(
        data_statistics=data_io.DataStatistics(
            **counts, **sizes, max_observed_len_source=8, max_observed_len_target=8, length_ratio_mean=1.0,
            length_ratio_std=0.25, buckets=[(8, 8)], num_sents_per_bucket=[0], average_len_target_per_bucket=[None],
            length_ratio_stats_per_bucket=[(None, None)],
        ),
        **longest, num_source_factors=1, num_target_factors=1,
    )  # fmt: skip
    stack = dict(
        model_size=shape["width"], attention_heads=shape["heads"], feed_forward_num_hidden=shape["inner"],
        act_type=shape["activation"], dropout_attention=0.1, dropout_act=0.1, dropout_prepost=0.2,
        positional_embedding_type=shape["positions"], preprocess_sequence=shape["pre"],
        postprocess_sequence=shape["post"], depth_key_value=shape["width"], **longest,
    )  # fmt: skip
    embedding = {
        side: encoder.EmbeddingConfig(vocab_size=len(words[side]), num_embed=shape["width"], dropout=0.0)
        for side in words
    }
    config = model.ModelConfig(
        config_data=data, vocab_source_size=len(words["source"]), vocab_target_size=len(words["target"]),
        config_embed_source=embedding["source"], config_embed_target=embedding["target"],
        config_encoder=transformer.TransformerConfig(num_layers=shape["encoder_layers"], **stack),
        config_decoder=transformer.TransformerConfig(num_layers=shape["decoder_layers"], **stack),
        weight_tying_type=shape["tying"],
    )  # fmt: skip
    made = model.SockeyeModel(config)
    made.apply(model.initialize_parameters)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "layer_norm" in name or (name.endswith("pos_embedding.weight") and shape["positions"] == "learned"):
                parameter.copy_(1.0 * ("norm.weight" in name) + 0.3 * torch.randn_like(parameter))
    train(made, shape)
    made.save_config(str(folder))
    made.save_version(str(folder))
    made.save_parameters(str(folder / "params.best"))
    for side, save in (("source", vocab.save_source_vocabs), ("target", vocab.save_target_vocabs)):
        save([{word: n for n, word in enumerate(words[side])}], str(folder))


def train(made: model.SockeyeModel, shape: dict) -> None:
    """A few steps on saying the source backwards, so that outputs differ by source and come to an end."""
    parameters = [one for name, one in made.named_parameters() if "pos_embedding" not in name]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    made.train()
    for _ in range(shape["steps"]):
        size = int(torch.randint(2, 12, ()))
        drawn = torch.randint(4, min(shape["source_rows"], shape["target_rows"]), (16, size))
        start, end = torch.full((16, 1), 2), torch.full((16, 1), 3)
        source, labels = torch.cat([drawn, end], 1), torch.cat([drawn.flip(1), end], 1)
        target = torch.cat([start, labels[:, :-1]], 1)
        lengths = torch.tensor([[size + 1, 0]] * 16)
        logits = made(source[..., None], lengths, target[..., None], lengths[:, 0])["logits"]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


def _logits(folder: Path, lines: list, targets: list) -> list:
    loaded, sources, _ = model.load_model(str(folder), inference_only=False)
    loaded.eval()
    rows = [[sources[0].get(word, 1) for word in line.split()] + [3] for line in lines]
    source = torch.zeros(len(rows), max(map(len, rows)), 1, dtype=torch.int32)
    target = torch.zeros(len(rows), max(map(len, targets)), 1, dtype=torch.int32)
    for n, (row, ids) in enumerate(zip(rows, targets, strict=True)):
        source[n, : len(row), 0], target[n, : len(ids), 0] = torch.tensor(row), torch.tensor(ids)
    lengths = torch.tensor([[len(row), 0] for row in rows], dtype=torch.int32)
    target_lengths = torch.tensor([len(ids) for ids in targets], dtype=torch.int32)
    with torch.inference_mode():
        found = loaded(source, lengths, target, target_lengths)["logits"]
    return [found[n, : len(ids)].numpy() for n, ids in enumerate(targets)]


def _translations(folder: Path, lines: list, limit: int, beams: int) -> list:
    loaded, sources, targets = model.load_model(str(folder), inference_only=True)
    loaded.eval()
    translator = inference.Translator(
        device=torch.device("cpu"), ensemble_mode="linear", scorer=inference.CandidateScorer(1.0, 0.0),
        batch_size=1 if beams == 1 else 8, beam_search_stop="all", models=[loaded], source_vocabs=sources,
        target_vocabs=targets, beam_size=beams, greedy=beams == 1, max_output_length=limit - 1,
        constant_length_ratio=-1.0 if beams == 1 else 0.0,
    )  # fmt: skip
    asked = [inference.make_input_from_plain_string(n, line) for n, line in enumerate(lines)]
    return [" ".join(output.tokens) for output in translator.translate(asked)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, where, told = sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    if command == "make":
        make(where, told)
    else:
        found = {f"logits_{n}": one for n, one in enumerate(_logits(where, told["lines"], told["targets"]))}
        for name, beams in (("greedy", 1), ("beam", 5)):
            found[name] = np.array(_translations(where, told["lines"], told["limit"], beams))
        np.savez(sys.argv[4], **found)
