"""Import of fairseq checkpoints: judged by fairseq's own equations, written out here from fairseq's tensor names."""

import argparse
import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_programs import environment, run_program
from imported_models import loaded

from hf_vaswani.foreign_tokenization_vaswani import VaswaniForeignTokenizer
from hf_vaswani.interop.fairseq import OPTIONS, read
from hf_vaswani.interop.fairseq_dictionary import read_dictionary
from hf_vaswani.interop.fairseq_settings import ARCHITECTURES, Settings
from hf_vaswani.interop.foreign import ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.modeling_vaswani import VaswaniForConditionalGeneration

SOURCE_WORDS = [f"s{n}" for n in range(9)]
TARGET_WORDS = [f"t{n}" for n in range(13)]
ARGS = {
    "arch": "transformer", "task": "translation", "source_lang": "xx", "target_lang": "yy", "encoder_embed_dim": 12,
    "decoder_embed_dim": 12, "encoder_ffn_embed_dim": 20, "decoder_ffn_embed_dim": 20, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_layers": 2, "decoder_layers": 1, "encoder_normalize_before": False,
    "decoder_normalize_before": False, "encoder_learned_pos": False, "decoder_learned_pos": False,
    "share_all_embeddings": False, "share_decoder_input_output_embed": False, "no_scale_embedding": False,
    "activation_fn": "relu", "dropout": 0.2, "attention_dropout": 0.05, "activation_dropout": 0.0,
    "max_source_positions": 40, "max_target_positions": 40, "label_smoothing": 0.1,
}  # fmt: skip
# What differs from ARGS, whether both sides have one dictionary, and the layout of the file.
SHAPES = {
    "post, all shared": ({"share_all_embeddings": True}, True, "args"),
    "post, nothing shared": ({"activation_fn": "gelu"}, False, "cfg"),
    "pre, output shared": (
        {"encoder_normalize_before": True, "decoder_normalize_before": True, "share_decoder_input_output_embed": True},
        False,
        "nested",
    ),
    "pre, one dictionary, two matrices": (
        {"encoder_normalize_before": True, "decoder_normalize_before": True, "no_scale_embedding": True},
        True,
        "args",
    ),
    "pre, without last norms": (
        {"encoder_normalize_before": True, "decoder_normalize_before": True, "version": 1.0}, False, "args",
    ),
    "learned": ({"encoder_learned_pos": True, "decoder_learned_pos": True}, False, "cfg"),
    "old names": ({"activation_fn": "tanh"}, False, "old"),
}  # fmt: skip
FAIRSEQ = [
    "torch==2.13.0", "numpy<2", "setuptools<82", "wheel", "cython", "cffi", "hydra-core==1.3.2", "omegaconf==2.3.0",
    "regex", "sacrebleu", "tqdm", "bitarray", "packaging", "subword-nmt", "sacremoses", "sentencepiece",
]  # fmt: skip


# --------------------------------------------------------------------------- files as fairseq writes them
def weights(args: dict, source_rows: int, target_rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    width, inner = args["encoder_embed_dim"], args["encoder_ffn_embed_dim"]
    found: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = torch.randn(rows, columns) * 0.3, torch.randn(rows) * 0.3

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 1 + 0.3 * torch.randn(width), 0.3 * torch.randn(width)

    found["encoder.version"] = found["decoder.version"] = torch.tensor([args.get("version", 3.0)])
    found["encoder.embed_tokens.weight"] = torch.randn(source_rows, width)
    shared = args["share_all_embeddings"]
    found["decoder.embed_tokens.weight"] = (
        found["encoder.embed_tokens.weight"] if shared else torch.randn(target_rows, width)
    )
    for side, rows in (("encoder", args["max_source_positions"]), ("decoder", args["max_target_positions"])):
        if args[f"{side}_learned_pos"]:
            found[f"{side}.embed_positions.weight"] = torch.randn(rows + 2, width)
        else:
            found[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        for n in range(args[f"{side}_layers"]):
            for part in ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",):
                for letter in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    linear(f"{side}.layers.{n}.{part}.{letter}", width, width)
                norm(f"{side}.layers.{n}.{part}_layer_norm")
            linear(f"{side}.layers.{n}.fc1", inner, width)
            linear(f"{side}.layers.{n}.fc2", width, inner)
            norm(f"{side}.layers.{n}.final_layer_norm")
            if side == "encoder":  # left as they were made by training, and other than the real ones
                for name in ("in_proj", "out_proj", "fc1", "fc2"):
                    found[f"{side}.layers.{n}.{name}_weight"] = torch.zeros(2, 2)
                    found[f"{side}.layers.{n}.{name}_bias"] = torch.zeros(2)
        if args[f"{side}_normalize_before"] and args.get("version", 3.0) == 3.0:
            norm(f"{side}.layer_norm")
    tied = shared or args["share_decoder_input_output_embed"]
    found["decoder.output_projection.weight"] = (
        found["decoder.embed_tokens.weight"] if tied else torch.randn(target_rows, width)
    )
    return found


def old_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if re.fullmatch(r"encoder\.layers\.\d+\.\w+_(weight|bias)", name) or re.search(r"\.[kv]_proj\.", name):
            continue
        if name.endswith("_float_tensor"):
            found[name.replace("_float_tensor", "weights")] = torch.zeros(7, 3)
        elif ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            found[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
        elif name == "decoder.output_projection.weight":
            found["decoder.embed_out"] = tensor
        else:
            last = 2 if name.startswith("decoder") else 1
            for number, part in ((0, "self_attn"), (1, "encoder_attn"), (last, "final")):
                name = name.replace(f"{part}_layer_norm", f"layer_norms.{number}")
            found[name] = tensor
    return found


def write_dictionary(path: Path, words: list[str]) -> None:
    path.write_text("".join(f"{word} {len(words) - n}\n" for n, word in enumerate(words)), encoding="utf-8")


def write(
    folder: Path, changes: dict | None = None, is_joined: bool = False, layout: str = "args", without: tuple = ()
) -> tuple[dict, dict[str, torch.Tensor]]:
    """A folder with a checkpoint and its dictionaries; returns the settings and the tensors by today's names."""
    args = {**ARGS, **(changes or {})}
    folder.mkdir(exist_ok=True)
    write_dictionary(folder / "dict.xx.txt", SOURCE_WORDS)
    write_dictionary(folder / "dict.yy.txt", SOURCE_WORDS if is_joined else TARGET_WORDS)
    rows = 4 + len(SOURCE_WORDS)
    tensors = weights(args, rows, rows if is_joined else 4 + len(TARGET_WORDS))
    said = {name: value for name, value in args.items() if name not in (*without, "version")}
    state: dict = {"args": argparse.Namespace(**said), "model": tensors, "extra_state": {"epoch": 3}}
    if layout == "cfg":
        state["args"] = None
        task = {"_name": "translation", "source_lang": "xx", "target_lang": "yy"}
        criterion = {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}
        state["cfg"] = {"model": state["args"] or argparse.Namespace(**said), "task": task, "criterion": criterion}
    elif layout == "nested":
        model: dict = {"_name": said.pop("arch"), "encoder": {}, "decoder": {}}
        for name, value in said.items():
            side, _, rest = name.partition("_")
            (model[side] if side in ("encoder", "decoder") else model).update({rest if side in model else name: value})
        state = {"cfg": {"model": model, "task": None, "generation": {"beam": 7, "lenpen": 0.6}}, "model": tensors}
    elif layout == "old":
        state["model"] = old_names(tensors)
    torch.save(state, folder / "checkpoint_best.pt", _use_new_zipfile_serialization=layout != "old")
    return args, tensors


# --------------------------------------------------------------------------- fairseq's forward pass
def plain_logits(args: dict, tensors: dict[str, torch.Tensor], source: list[int], target: list[int]) -> torch.Tensor:
    t = {name: tensor.double() for name, tensor in tensors.items()}
    width, heads = args["encoder_embed_dim"], args["encoder_attention_heads"]

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name):
        spread = x.var(-1, unbiased=False, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]

    def attention(x, memory, name, is_causal):
        out = []
        for head in range(heads):
            one = slice(head * width // heads, (head + 1) * width // heads)
            query = linear(x, f"{name}.q_proj")[:, one] * (width // heads) ** -0.5
            scores = query @ linear(memory, f"{name}.k_proj")[:, one].T
            if is_causal:
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
            out.append(scores.softmax(-1) @ linear(memory, f"{name}.v_proj")[:, one])
        return linear(torch.cat(out, -1), f"{name}.out_proj")

    def embed(ids, side):
        scale = 1.0 if args["no_scale_embedding"] else math.sqrt(width)
        x = scale * t[f"{side}.embed_tokens.weight"][ids]
        for column in range(len(ids)):
            position = column + 2  # behind the padding id, which is 1
            if args[f"{side}_learned_pos"]:
                x[column] += t[f"{side}.embed_positions.weight"][position]
                continue
            half = width // 2
            for i in range(half):
                angle = position * math.exp(-i * math.log(10000) / (half - 1))
                x[column, i] += math.sin(angle)
                x[column, half + i] += math.cos(angle)
        return x

    def wrapped(x, name, is_pre, sublayer):
        return x + sublayer(norm(x, name)) if is_pre else norm(x + sublayer(x), name)

    inner = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh}[args["activation_fn"]]

    def stack(ids, side, memory):
        x, is_pre = embed(ids, side), args[f"{side}_normalize_before"]
        for n in range(args[f"{side}_layers"]):
            layer = f"{side}.layers.{n}"
            x = wrapped(
                x, f"{layer}.self_attn_layer_norm", is_pre,
                lambda y, layer=layer: attention(y, y, f"{layer}.self_attn", memory is not None),
            )  # fmt: skip
            if memory is not None:
                x = wrapped(
                    x, f"{layer}.encoder_attn_layer_norm", is_pre,
                    lambda y, layer=layer: attention(y, memory, f"{layer}.encoder_attn", False),
                )  # fmt: skip
            x = wrapped(
                x, f"{layer}.final_layer_norm", is_pre,
                lambda y, layer=layer: linear(inner(linear(y, f"{layer}.fc1")), f"{layer}.fc2"),
            )  # fmt: skip
        return norm(x, f"{side}.layer_norm") if f"{side}.layer_norm.weight" in t else x

    memory = stack(source, "encoder", None)
    return stack(target, "decoder", memory) @ t["decoder.output_projection.weight"].T


def load(folder: Path, options: ImportOptions | None = None):
    found = read(folder, options or ImportOptions())
    return found, loaded(found)


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), 1), torch.zeros(len(rows), longest, dtype=torch.long)
    for row, line in enumerate(rows):
        place = slice(longest - len(line), None) if left else slice(0, len(line))
        ids[row, place], mask[row, place] = torch.tensor(line), 1
    return ids, mask


# --------------------------------------------------------------------------- weights
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_fairseqs_equations(tmp_path, shape):
    changes, is_joined, layout = SHAPES[shape]
    args, tensors = write(tmp_path, changes, is_joined, layout)
    _, model = load(tmp_path)
    sources = [[4, 5, 6, 7, 8, 2], [9, 2], [12, 11, 10, 2]]
    targets = [[2, 4, 5], [2, 6, 7, 8, 9, 10], [2]]
    ids, mask = padded(sources, left=True)
    read_ids, _ = padded(targets, left=False)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=read_ids).logits
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        wanted = plain_logits(args, tensors, source, target)
        assert (logits[row, : len(target)] - wanted).abs().max() < 1e-4


def test_the_import_passes_its_own_proof_and_counts_the_tensors(tmp_path):
    write(tmp_path / "model", {"share_all_embeddings": True}, is_joined=True)
    report = import_model("fairseq", tmp_path / "model", tmp_path / "out", count=3)
    assert report.tensors == 3 + 2 * 16 + 26  # three names of one matrix, two encoder layers, one decoder layer
    assert VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out").config.position_offset == 2


def test_half_precision_weights_become_float32(tmp_path):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    state["model"] = {name: tensor.half() for name, tensor in state["model"].items()}
    torch.save(state, tmp_path / "checkpoint_best.pt")
    assert {tensor.dtype for tensor in read(tmp_path, ImportOptions()).tensors.values()} == {torch.float32}


def test_learned_positions_end_where_the_shorter_table_does(tmp_path):
    write(tmp_path, {"encoder_learned_pos": True, "decoder_learned_pos": True, "max_target_positions": 17})
    found = read(tmp_path, ImportOptions())
    assert found.config["max_position_embeddings"] == 17
    assert found.generation["max_length"] == 17
    assert found.tokenizer.model_max_length == 17
    assert any("it had 40" in loss for loss in found.losses)


@pytest.mark.parametrize("name", ["decoder.layers.0.fc1.bias", "decoder.embed_tokens.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    del state["model"][name]
    torch.save(state, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match=re.escape(name)):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize("name", ["encoder.layers.2.fc1.weight", "decoder.layers.0.self_attn.bias_k"])
def test_a_tensor_left_over_is_named(tmp_path, name):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    state["model"][name] = torch.zeros(3)
    torch.save(state, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match=re.escape(name)):
        read(tmp_path, ImportOptions())


def test_matrices_that_should_be_one_and_differ_are_an_error(tmp_path):
    write(tmp_path, {"share_decoder_input_output_embed": True})
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    state["model"]["decoder.output_projection.weight"] = state["model"]["decoder.output_projection.weight"] + 1
    torch.save(state, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match="should be one matrix"):
        read(tmp_path, ImportOptions())


# --------------------------------------------------------------------------- hyper-parameters
def test_an_architecture_name_gives_what_the_checkpoint_leaves_out(tmp_path):
    args = {"encoder_embed_dim": 64, "decoder_embed_dim": 64, "encoder_ffn_embed_dim": 64, "decoder_ffn_embed_dim": 64}
    changes = {**args, "arch": "transformer_tiny", "decoder_layers": 2}
    unsaid = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", *args)
    write(tmp_path, changes, without=unsaid)
    found = read(tmp_path, ImportOptions()).config
    assert (found["d_model"], found["encoder_layers"], found["num_attention_heads"], found["d_ff"]) == (64, 2, 2, 64)


def test_default_sizes_of_the_papers_architectures():
    big = Settings({"arch": "transformer_vaswani_wmt_en_de_big"})
    assert (big["decoder_embed_dim"], big["encoder_ffn_embed_dim"], big["dropout"]) == (1024, 4096, 0.3)
    assert Settings({"arch": "transformer_vaswani_wmt_en_fr_big"})["dropout"] == 0.1
    assert Settings({"arch": "transformer_wmt_en_de_big_t2t"})["encoder_normalize_before"] is True
    iwslt = Settings({"arch": "transformer_iwslt_de_en"})
    assert (iwslt["encoder_attention_heads"], iwslt["decoder_ffn_embed_dim"], iwslt["encoder_embed_dim"]) == (
        4,
        1024,
        512,
    )
    # The decoder takes the encoder's width, unless a name or the checkpoint gives it its own.
    assert Settings({"arch": "transformer", "encoder_embed_dim": 96})["decoder_embed_dim"] == 96
    assert Settings({"arch": "transformer_iwslt_de_en", "encoder_layers": None})["encoder_layers"] == 6
    assert all(Settings({"arch": name})["encoder_layers"] in (2, 6) for name in ARCHITECTURES)


def test_training_settings_are_carried(tmp_path):
    write(tmp_path, {"relu_dropout": 0.3})
    found = read(tmp_path, ImportOptions()).config
    rates = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
    assert [found[name] for name in rates] == [0.2, 0.05, 0.3, 0.1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layernorm_embedding", True), ("no_token_positional_embeddings", True), ("adaptive_input", True),
        ("adaptive_softmax_cutoff", "10,20"), ("cross_self_attention", True), ("no_cross_attention", True),
        ("encoder_layers_to_keep", "0,2"), ("decoder_layers_to_keep", "0"), ("quant_noise_pq", 0.1),
        ("quant_noise_scalar", 0.5), ("base_layers", 1), ("char_inputs", True), ("scale_heads", True),
        ("encoder_xformers_att_config", "{'name': 'scaled_dot_product'}"), ("activation_fn", "swish"),
        ("decoder_output_dim", 10), ("decoder_input_dim", 10), ("decoder_attention_heads", 4),
        ("decoder_ffn_embed_dim", 24), ("decoder_normalize_before", True), ("encoder_learned_pos", True),
        ("moe_freq", 2), ("task", "translation_moe"), ("task", "multilingual_translation"),
        ("task", "translation_multi_simple_epoch"), ("tokenizer", "nltk"), ("bpe", "gpt2"),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, name, value):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    setattr(state["args"], name, value)
    torch.save(state, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match=f"`{name}`.*{re.escape(repr(value))}"):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("lstm_wiseman_iwslt_de_en", "recurrent"), ("fconv_wmt_en_de", "convolutional"),
        ("lightconv_wmt_en_de_big", "convolutions"), ("levenshtein_transformer_wmt_en_de", "edits"),
        ("bart_large", "embeddings"), ("transformer_lm_gpt", "language model"), ("mbart_large", "embeddings"),
        ("multilingual_transformer_iwslt_de_en", "each language"), ("transformer_pointer", "not known"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused_by_name(tmp_path, arch, kind):
    write(tmp_path, {"arch": arch})
    with pytest.raises(ConversionError, match=f"`arch` is '{arch}'.*{kind}"):
        read(tmp_path, ImportOptions())


def test_a_name_of_the_users_own_is_taken_where_a_file_says_what_it_is(tmp_path):
    write(tmp_path, {"arch": "my_transformer", "task": "my_task"})
    (tmp_path / "known.json").write_text('{"arch": "transformer", "task": "translation"}')
    found = read(tmp_path, ImportOptions(config=tmp_path / "known.json"))
    assert found.config["d_model"] == 12
    (tmp_path / "known.json").write_text("[]")
    with pytest.raises(ConversionError, match="object of hyper-parameters"):
        read(tmp_path, ImportOptions(config=tmp_path / "known.json"))


def test_a_checkpoint_without_a_name_is_asked_about(tmp_path):
    write(tmp_path, without=("arch",))
    with pytest.raises(ConversionError, match="does not say its `arch`"):
        read(tmp_path, ImportOptions())


def test_a_norm_on_top_of_the_encoder_alone_is_refused(tmp_path):
    write(tmp_path, {"encoder_normalize_before": True, "decoder_normalize_before": True, "no_decoder_final_norm": True})
    with pytest.raises(ConversionError, match="no_decoder_final_norm"):
        read(tmp_path, ImportOptions())


def test_layer_drop_is_a_loss_not_a_refusal(tmp_path):
    write(tmp_path, {"encoder_layerdrop": 0.2})
    assert any("encoder_layerdrop" in loss for loss in read(tmp_path, ImportOptions()).losses)


# --------------------------------------------------------------------------- the search
def test_fairseqs_search_defaults_are_carried(tmp_path):
    write(tmp_path)
    found = read(tmp_path, ImportOptions()).generation
    assert (found["num_beams"], found["early_stopping"], found["min_new_tokens"]) == (5, True, 1)
    assert (found["length_penalty"], found["length_penalty_type"]) == (1.0, "power")
    assert found["suppress_tokens"] == [1]
    assert found["max_length"] == 40  # the start, and what `max_target_positions` leaves of 200


def test_search_settings_of_the_checkpoint_go_first(tmp_path):
    changes = {"encoder_normalize_before": True, "decoder_normalize_before": True}
    write(tmp_path, changes, layout="nested")
    found = read(tmp_path, ImportOptions(source_language="xx", target_language="yy")).generation
    assert (found["num_beams"], found["length_penalty"]) == (7, 0.6)


def test_a_length_by_the_source_is_carried_and_its_factor_said(tmp_path):
    write(tmp_path, {"max_len_a": 1.2, "max_len_b": 10, "unkpen": 2.0, "no_repeat_ngram_size": 3})
    found = read(tmp_path, ImportOptions())
    assert (found.generation["max_length_offset"], found.generation.get("max_length")) == (11, None)
    assert found.generation["no_repeat_ngram_size"] == 3
    assert [any(name in loss for loss in found.losses) for name in ("max_len_a", "unkpen")] == [True, True]


# --------------------------------------------------------------------------- dictionaries
def test_ids_of_the_dictionary_follow_the_four_fixed_ones(tmp_path):
    write(tmp_path)
    found = read(tmp_path, ImportOptions())
    assert found.tokenizer("s0 s8 nobody").input_ids == [4, 12, 3, 2]
    assert found.tokenizer(text_target="t0 t12").input_ids == [4, 16, 2]
    assert found.tokenizer.decode([4, 16, 2], skip_special_tokens=True) == "t0 t12"
    ids = [found.config[f"{name}_token_id"] for name in ("bos", "pad", "eos", "unk", "decoder_start")]
    assert ids == [0, 1, 2, 3, 2]


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "dict.xx.txt"
    path.write_bytes("a\u2028b 3\n\x85 2\nx\x0by 1\nmadeupword0000 0\n".encode())
    assert read_dictionary(path).pieces[4:] == ["a\u2028b", "\x85", "x\x0by", "madeupword0000"]


def test_a_repeated_word_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "dict.xx.txt"
    path.write_text("one 5\ntwo 4\none 3\n")
    with pytest.raises(ConversionError, match=r"dict\.xx\.txt, line 3: the word 'one'.*line 1"):
        read_dictionary(path)
    path.write_text("one 5\n</s> 4\n")
    with pytest.raises(ConversionError, match="line 2: the word '</s>'"):
        read_dictionary(path)


def test_a_word_that_overwrites_gets_the_later_id(tmp_path):
    write(tmp_path)
    path = tmp_path / "dict.xx.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], "s1 1 #fairseq:overwrite"]) + "\n")
    found = read(tmp_path, ImportOptions())
    assert found.tokenizer("s0 s1").input_ids == [4, 12, 2]
    assert any("'s1'" in choice and "id 12" in choice for choice in found.choices)


@pytest.mark.parametrize("line", ["word", "word many", ": 5"])
def test_a_line_without_a_count_is_an_error_with_its_line(tmp_path, line):
    path = tmp_path / "dict.xx.txt"
    path.write_text(f"one 5\n{line.replace(': 5', 'two: five')}\n")
    with pytest.raises(ConversionError, match="line 2"):
        read_dictionary(path)


def test_bytes_that_are_not_utf8_are_an_error(tmp_path):
    (tmp_path / "dict.xx.txt").write_bytes("größe 3\n".encode("latin-1"))
    with pytest.raises(ConversionError, match="not UTF-8"):
        read_dictionary(tmp_path / "dict.xx.txt")


def test_more_words_than_rows_are_an_error(tmp_path):
    write(tmp_path)
    write_dictionary(tmp_path / "dict.yy.txt", [*TARGET_WORDS, "more"])
    with pytest.raises(ConversionError, match=r"dict\.yy\.txt.*18 pieces.*17 rows"):
        read(tmp_path, ImportOptions())


def test_rows_without_a_word_are_never_decoded(tmp_path):
    write(tmp_path)
    write_dictionary(tmp_path / "dict.yy.txt", TARGET_WORDS[:-2])
    assert read(tmp_path, ImportOptions()).generation["suppress_tokens"] == [1, 15, 16]


def test_shared_embeddings_with_two_dictionaries_are_an_error(tmp_path):
    write(tmp_path, {"share_all_embeddings": True}, is_joined=True)
    write_dictionary(tmp_path / "dict.yy.txt", SOURCE_WORDS[::-1])
    with pytest.raises(ConversionError, match="share_all_embeddings"):
        read(tmp_path, ImportOptions())


def test_dictionaries_are_named_by_options_or_asked_for(tmp_path):
    write(tmp_path, {"source_lang": None, "target_lang": None})
    with pytest.raises(ConversionError, match="--source-vocab"):
        read(tmp_path, ImportOptions())
    assert read(tmp_path, ImportOptions(source_language="xx", target_language="yy")).config["source_vocab_size"] == 13
    with pytest.raises(ConversionError, match=r"no dict\.zz\.txt"):
        read(tmp_path, ImportOptions(source_language="zz", target_language="yy"))
    (tmp_path / "dict.xx.txt").rename(tmp_path / "words")
    (tmp_path / "dict.yy.txt").rename(tmp_path / "others")
    named = ImportOptions(source_vocab=tmp_path / "words", target_vocab=tmp_path / "others")
    assert read(tmp_path, named).tokenizer("s8").input_ids == [12, 2]
    with pytest.raises(ConversionError, match="nobody knows"):
        read(tmp_path, ImportOptions())


# --------------------------------------------------------------------------- how words are split
PIECES = ["l@@", "o@@", "w@@", "lo@@", "low", "w", "er", "e@@", "r"]


def write_pieces(folder: Path, **changes) -> None:
    write(folder, {"share_all_embeddings": True, **changes}, is_joined=True)
    for language in ("xx", "yy"):
        write_dictionary(folder / f"dict.{language}.txt", PIECES)


@pytest.mark.parametrize("text", ["#version: 0.2\nl o\nlo w</w>\ne r</w>\n", "l o 9\nlo w</w> 7\ne r</w> 5\n"])
def test_bpe_codes_of_subword_nmt_and_of_fastbpe_split_words(tmp_path, text):
    write_pieces(tmp_path)
    (tmp_path / "bpecodes").write_text(text)
    found = read(tmp_path, ImportOptions())
    assert found.tokenizer("low lower").input_ids == [8, 7, 6, 10, 2]  # low lo@@ w@@ er
    assert found.tokenizer.decode([8, 7, 6, 10, 2], skip_special_tokens=True) == "low lower"
    assert any("bpecodes" in choice for choice in found.choices)


def test_pieces_without_codes_are_an_error_that_names_the_option(tmp_path):
    write_pieces(tmp_path)
    with pytest.raises(ConversionError, match=r"end in '@@'.*--codes"):
        read(tmp_path, ImportOptions())
    for language in ("xx", "yy"):
        write_dictionary(tmp_path / f"dict.{language}.txt", ["▁a", "b", "▁c", "d", "e", "f", "g", "h", "i"])
    with pytest.raises(ConversionError, match="--source-spm"):
        read(tmp_path, ImportOptions())


def test_two_files_of_codes_are_asked_about(tmp_path):
    write_pieces(tmp_path)
    (tmp_path / "a.codes").write_text("#version: 0.2\nl o\n")
    (tmp_path / "b.codes").write_text("#version: 0.2\no w</w>\n")
    with pytest.raises(ConversionError, match=r"a\.codes, b\.codes.*--codes"):
        read(tmp_path, ImportOptions())
    assert read(tmp_path, ImportOptions(codes=tmp_path / "a.codes")).tokenizer("lo").input_ids == [4, 3, 2]


def test_moses_needs_languages_and_is_said(tmp_path):
    pytest.importorskip("sacremoses")
    write(tmp_path)
    found = read(tmp_path, ImportOptions(moses=True))
    assert any("Moses tokenisation for xx" in choice for choice in found.choices)
    assert found.tokenizer("s0, s1-s2").input_ids == [4, 3, 5, 3, 6, 2]  # , and @-@ are words of their own
    write(tmp_path, {"tokenizer": "moses", "source_lang": None, "target_lang": None}, is_joined=True)
    (tmp_path / "dict.yy.txt").unlink()
    with pytest.raises(ConversionError, match="--source-language"):
        read(tmp_path, ImportOptions())


# --------------------------------------------------------------------------- files
def test_a_folder_with_several_checkpoints_is_asked_about(tmp_path):
    write(tmp_path)
    (tmp_path / "checkpoint_best.pt").rename(tmp_path / "model1.pt")
    assert read(tmp_path, ImportOptions()).config["d_model"] == 12
    (tmp_path / "model2.pt").write_bytes((tmp_path / "model1.pt").read_bytes())
    with pytest.raises(ConversionError, match=r"model1\.pt, model2\.pt.*average_checkpoints"):
        read(tmp_path, ImportOptions())
    assert read(tmp_path / "model2.pt", ImportOptions()).config["d_model"] == 12


def test_a_checkpoint_cut_off_is_an_error_with_its_name(tmp_path):
    write(tmp_path)
    file = tmp_path / "checkpoint_best.pt"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ConversionError, match=r"checkpoint_best\.pt"):
        read(tmp_path, ImportOptions())


@pytest.mark.parametrize(
    "state", [{"model_state": {}}, {"model": {}, "opt": 1, "vocab": 2}, {"a.weight": torch.zeros(2)}, [1, 2]]
)
def test_a_checkpoint_of_another_toolkit_is_refused(tmp_path, state):
    write(tmp_path)
    torch.save(state, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match=r"no fairseq checkpoint|neither `args` nor `cfg`"):
        read(tmp_path, ImportOptions())


def test_one_shard_of_a_model_is_refused(tmp_path):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    torch.save({**state, "fsdp_metadata": {"x": 1}}, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match="fsdp_metadata"):
        read(tmp_path, ImportOptions())


class _Meter:
    """Stands for a class of fairseq's in a file."""


def test_a_pickle_that_needs_code_is_refused_with_a_command(tmp_path):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    torch.save({**state, "extra_state": {"train_meters": _Meter()}}, tmp_path / "checkpoint_best.pt")
    with pytest.raises(ConversionError, match=r"python -c .*checkpoint_best\.plain\.pt"):
        read(tmp_path, ImportOptions())


def test_numpys_numbers_among_the_metrics_are_no_hindrance(tmp_path):
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    metrics = {"counts": np.array([3, 2, 1]), "best": np.float64(27.3), "flag": np.array([True])}
    torch.save({**state, "extra_state": {"metrics": metrics}}, tmp_path / "checkpoint_best.pt")
    assert read(tmp_path, ImportOptions()).config["d_model"] == 12


def test_settings_as_a_plain_object_are_read_too(tmp_path):
    """What the command of the refusal writes."""
    write(tmp_path)
    state = torch.load(tmp_path / "checkpoint_best.pt", weights_only=False)
    torch.save({"args": vars(state["args"]), "cfg": None, "model": state["model"]}, tmp_path / "checkpoint_best.pt")
    assert read(tmp_path, ImportOptions()).config["num_attention_heads"] == 3


def test_the_options_are_those_that_are_read():
    assert set(vars(ImportOptions())) - {"mapping"} == OPTIONS


# --------------------------------------------------------------------------- the real program
@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints that fairseq itself made, with what it computes with them."""
    python = environment("fairseq", FAIRSEQ, ["--no-build-isolation", "fairseq-fixed==0.12.3.1"])
    folder = tmp_path_factory.mktemp("fairseq")
    run_program(python, "fairseq_program.py", folder)
    return python, folder


def without_code(python: Path, folder: Path) -> None:
    """Follow the refusal's own advice."""
    with pytest.raises(ConversionError, match=r"omegaconf\.dictconfig\.DictConfig") as caught:
        read(folder, ImportOptions())
    command = shlex.split(str(caught.value).partition("settings as plain values: ")[2].rpartition(". Then import")[0])
    assert command[0] == "python"
    subprocess.run([str(python), *command[1:]], cwd=folder, check=True, capture_output=True)
    (folder / "checkpoint_best.plain.pt").replace(folder / "checkpoint_best.pt")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first makes an environment, which compiles
@pytest.mark.parametrize(
    "case",
    ["post-shared", "post-split", "pre-split", "pre-joined", "learned", "old-names", "old-untied", "pre-no-final",
     "bpe", "spm", "trained"],
)  # fmt: skip
def test_fairseq_itself_agrees(made, tmp_path, case, capsys):
    python, folder = made[0], made[1] / case
    if case == "pre-joined":
        without_code(python, folder)
    import_model("fairseq", folder, tmp_path / "out", count=4)
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    tokenizer = VaswaniForeignTokenizer.from_pretrained(tmp_path / "out")
    expected, arrays = json.loads((folder / "expected.json").read_text()), np.load(folder / "expected.npz")
    sources, targets = expected["sources"], expected["targets"]
    worst = 0.0
    with torch.no_grad():
        read_ids, read_mask = padded(targets[:8], left=False)
        for side in ("left", "right"):
            ids, mask = padded(sources[:8], left=side == "left")
            ours = model(input_ids=ids, attention_mask=mask, decoder_input_ids=read_ids).logits.numpy()
            worst = max(worst, float(np.abs(ours - arrays[f"logits_{side}"])[read_mask.numpy() == 1].max()))
        ids, mask = padded(expected["long"], left=False)
        ours = model(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor([targets[0]])).logits.numpy()
        worst = max(worst, float(np.abs(ours - arrays["logits_long"]).max()))
        equal, written = {}, []
        for beams in (1, 4):
            found = []
            for begin in range(0, 50, 10):
                ids, mask = padded(sources[begin : begin + 10], left=False)
                rows = model.generate(input_ids=ids, attention_mask=mask, num_beams=beams)[:, 1:]
                found += [[token for token in row if token != 1] for row in rows.tolist()]
            limit = model.generation_config.max_length
            theirs = [ids[: limit - 1] for ids, _ in expected["outputs"][str(beams)]]
            equal[beams] = sum(a == b for a, b in zip(found, theirs, strict=True))
            written = written or [tokenizer.decode(row, skip_special_tokens=True) for row in found]
    with capsys.disabled():
        print(f"\n{case}: logits {worst:.2g}, greedy {equal[1]} of 50, beam 4 {equal[4]} of 50")
    assert worst < 1e-4
    assert equal[1] == 50
    assert written == expected["written"]
    key, wanted = ("texts", "text_ids") if "texts" in expected else ("lines", "encoded")
    assert [tokenizer(line).input_ids for line in expected[key]] == expected[wanted]
