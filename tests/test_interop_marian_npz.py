"""Models of the Marian toolkit: its own equations over its own tensors against the imported model."""

import gzip
import json
import math
import struct
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from imported_models import loaded, our_logits

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.interop.foreign import UNUSED_ROW_BIAS, ConversionError, ImportOptions
from hf_vaswani.interop.importing import import_model
from hf_vaswani.interop.marian import read
from hf_vaswani.interop.marian_vocabulary import read_vocabulary

SHARED = Path(__file__).parents[2] / "shared" / "data"
WORDS = ["</s>", "<unk>", "&", "no", "12:30", '"#"', "~", "it's", "a: b", "日本", "\\", "'", '"', "null", "1"]
SOURCE_SIZE, TARGET_SIZE = 19, 15
BASE = {
    "type": "transformer",
    "dim-emb": 16,
    "dim-vocabs": [TARGET_SIZE, TARGET_SIZE],
    "enc-depth": 2,
    "dec-depth": 3,
    "transformer-heads": 4,
    "transformer-dim-ffn": 24,
    "transformer-ffn-depth": 2,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": False,
    "transformer-tied-layers": [],
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": True,
    "input-types": [],
    "skip": False,
    "version": "v1.12.42 b7be0e964 2025-05-24 22:34:42 -0700",
}


# ---------------------------------------------------------------------- Marian's own terms
def marian_tensors(options, generator, untransposed=False):
    """Random parameters by the names and in the shapes that Marian gives them."""
    width, inner = options["dim-emb"], options["transformer-dim-ffn"]
    source, target = options["dim-vocabs"]
    is_pre = "n" in options["transformer-preprocess"]
    shapes = {}
    if options["tied-embeddings-all"] or options["tied-embeddings-src"]:
        shapes["Wemb"] = (target, width)
    else:
        shapes |= {"encoder_Wemb": (source, width), "decoder_Wemb": (target, width)}
    if not (options["tied-embeddings-all"] or options["tied-embeddings"]):
        name, shape = ("W", (width, target)) if untransposed else ("Wt", (target, width))
        shapes[f"decoder_ff_logit_out_{name}"] = shape
    if not options.get("output-omit-bias"):
        shapes["decoder_ff_logit_out_b"] = (1, target)
    layers = [f"encoder_l{n + 1}" for n in range(options["enc-depth"])]
    tied = options["transformer-tied-layers"]
    layers += [f"decoder_l{n}" for n in sorted(set(tied)) or range(1, options["dec-depth"] + 1)]
    norms = []
    for layer in layers:
        for kind in ("self", "context") if layer.startswith("decoder") else ("self",):
            for letter in "qkv" if options["transformer-no-projection"] else "qkvo":
                shapes[f"{layer}_{kind}_W{letter}"] = (width, width)
                shapes[f"{layer}_{kind}_b{letter}"] = (1, width)
            norms.append(f"{layer}_{kind}_Wo")
        shapes |= {f"{layer}_ffn_W1": (width, inner), f"{layer}_ffn_b1": (1, inner)}
        shapes |= {f"{layer}_ffn_W2": (inner, width), f"{layer}_ffn_b2": (1, width)}
        norms.append(f"{layer}_ffn_ffn")
    named = [(norm, "_pre" if is_pre else "") for norm in norms]
    if "n" in options.get("transformer-postprocess-top", ""):
        named += [("encoder_top", ""), ("decoder_top", "")]
    for norm, suffix in named:
        shapes |= {f"{norm}_ln_scale{suffix}": (1, width), f"{norm}_ln_bias{suffix}": (1, width)}
    return {
        name: (generator.normal(size=shape) * 0.3 + ("_ln_scale" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def save_marian(path, options, tensors):
    """An .npz as Marian's own code lays it out, with its options as a string that ends in NUL."""
    text = yaml.safe_dump(options).encode() + b"\0"
    np.savez(path, **tensors, **{"special:model.yml": np.frombuffer(text, dtype=np.int8)})


def write_vocabulary(path, words):
    """A dictionary as Marian writes it: quoted only where yaml-cpp finds that it has to."""

    def quoted(word):
        if word[0] in "\"&~'#!%@`[]{}|>*?,-" or ": " in word or word == "null":
            return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return word

    path.write_text("".join(f"{quoted(word)}: {n}\n" for n, word in enumerate(words)), encoding="utf-8")


def write_model(folder, changes=None, settings=None, untransposed=False, seed=0):
    """A small random model with its settings and dictionaries; returns its path, options and tensors."""
    options = {**BASE, **(changes or {})}
    tensors = marian_tensors(options, np.random.default_rng(seed), untransposed)
    path = folder / "model.npz"
    save_marian(path, options, tensors)
    source, target = options["dim-vocabs"]
    write_vocabulary(folder / "trg.yml", [*WORDS, *(f"t{n}" for n in range(99))][:target])
    one = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    names = ["trg.yml", "trg.yml"]
    if not one:
        write_vocabulary(folder / "src.yml", [*WORDS[:2], *(f"s{n}" for n in range(99))][:source])
        names[0] = "src.yml"
    decoder = {"relative-paths": True, "models": ["model.npz"], "vocabs": names, "beam-size": 6, "normalize": 0.6}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump({**decoder, **(settings or {})}))
    return path, options, tensors


class PlainMarian:
    """The equations of Marian's transformer.h in float64, one sentence at a time."""

    def __init__(self, options, tensors):
        self.o = options
        self.t = {name: array.astype(np.float64) for name, array in tensors.items()}
        self.is_pre = "n" in options["transformer-preprocess"]

    def norm(self, x, name, suffix=""):
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return centred / spread * self.t[f"{name}_ln_scale{suffix}"] + self.t[f"{name}_ln_bias{suffix}"]

    def around(self, x, name, sublayer):
        if self.is_pre:
            return x + sublayer(self.norm(x, name, "_pre"))
        return self.norm(x + sublayer(x), name)

    def affine(self, x, name, letter):
        return x @ self.t[f"{name}_W{letter}"] + self.t[f"{name}_b{letter}"]

    def attention(self, name, queries, keys, causal=False):
        q, k, v = (self.affine(x, name, letter) for x, letter in ((queries, "q"), (keys, "k"), (keys, "v")))
        count = self.o["transformer-heads"]
        size = q.shape[1] // count
        heads = []
        for n in range(count):
            part = slice(n * size, (n + 1) * size)
            scores = q[:, part] @ k[:, part].T / math.sqrt(size)
            if causal:
                scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
        joined = np.concatenate(heads, axis=-1)
        return joined if self.o["transformer-no-projection"] else self.affine(joined, name, "o")

    def feed_forward(self, x, name):
        inner = self.affine(x, name, "1")
        kind = self.o["transformer-ffn-activation"]
        if kind == "relu":
            inner = np.maximum(inner, 0)
        elif kind == "swish":
            inner = inner / (1 + np.exp(-inner))
        else:
            inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        return self.affine(inner, name, "2")

    def placed(self, embeddings):
        length, width = embeddings.shape
        half = width // 2
        angles = np.arange(length)[:, None] * np.exp(-np.arange(half) * math.log(10000.0) / (half - 1))
        return embeddings * math.sqrt(width) + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    def stack(self, x, side, layers, memory=None):
        for n in layers:
            name = f"{side}_l{n}"
            x = self.around(
                x, f"{name}_self_Wo", lambda y, name=name: self.attention(f"{name}_self", y, y, memory is not None)
            )
            if memory is not None:
                x = self.around(
                    x, f"{name}_context_Wo", lambda y, name=name: self.attention(f"{name}_context", y, memory)
                )
            x = self.around(x, f"{name}_ffn_ffn", lambda y, name=name: self.feed_forward(y, f"{name}_ffn"))
        return self.norm(x, f"{side}_top") if "n" in self.o.get("transformer-postprocess-top", "") else x

    def embeddings(self, side):
        return self.t["Wemb"] if "Wemb" in self.t else self.t[f"{side}_Wemb"]

    def encode(self, source):
        return self.stack(self.placed(self.embeddings("encoder")[source]), "encoder", range(1, self.o["enc-depth"] + 1))

    def logits(self, memory, words):
        """A row for each word that is there, and one for the next; the first is predicted from a zero vector."""
        table = self.embeddings("decoder")
        x = np.concatenate([np.zeros((1, table.shape[1])), table[list(words)].reshape(-1, table.shape[1])])
        layers = self.o["transformer-tied-layers"] or range(1, self.o["dec-depth"] + 1)
        x = self.stack(self.placed(x), "decoder", layers, memory)
        if self.o["tied-embeddings-all"] or self.o["tied-embeddings"]:
            out = x @ table.T
        elif "decoder_ff_logit_out_W" in self.t:
            out = x @ self.t["decoder_ff_logit_out_W"]
        else:
            out = x @ self.t["decoder_ff_logit_out_Wt"].T
        return out if self.o.get("output-omit-bias") else out + self.t["decoder_ff_logit_out_b"]

    def greedy(self, source, limit):
        memory, words = self.encode(source), []
        while len(words) < limit and (not words or words[-1] != 0):
            row = self.logits(memory, words)[-1]
            row[1] = -np.inf  # the unknown word is never chosen
            words.append(int(row.argmax()))
        return words


def random_pairs(options, count, seed=5):
    generator = np.random.default_rng(seed)
    sizes = options["dim-vocabs"]
    return [
        tuple([*generator.integers(1, size, generator.integers(1, 9)).tolist(), 0] for size in sizes)
        for _ in range(count)
    ]


def imported_logits(model, pairs):
    """Of all pairs in one padded batch."""
    sources, targets = zip(*pairs, strict=True)
    starts = [[model.config.decoder_start_token_id, *target[:-1]] for target in targets]
    return our_logits(model, [list(source) for source in sources], starts)


SHAPES = {
    "tied-all": {},
    "tied target": {"tied-embeddings-all": False, "tied-embeddings": True},
    "tied target, sizes": {
        "tied-embeddings-all": False, "tied-embeddings": True, "dim-vocabs": [SOURCE_SIZE, TARGET_SIZE],
    },
    "smaller source": {"tied-embeddings-all": False, "dim-vocabs": [TARGET_SIZE, SOURCE_SIZE]},
    "three matrices": {"tied-embeddings-all": False},
    "tied inputs": {"tied-embeddings-all": False, "tied-embeddings-src": True},
    "relu": {"transformer-ffn-activation": "relu"},
    "gelu": {"transformer-ffn-activation": "gelu"},
    "top norm": {"transformer-postprocess-top": "n"},
    "pre-norm": {
        "transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n",
    },
    "pre-norm without top": {"transformer-preprocess": "n", "transformer-postprocess": "da"},
    "no projection": {"transformer-no-projection": True},
    "tied layers": {"transformer-tied-layers": [1, 2, 1]},
    "no output bias": {"output-omit-bias": True},
}  # fmt: skip


# ---------------------------------------------------------------------- the function
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_a_padded_batch_are_marians(tmp_path, shape):
    path, options, tensors = write_model(tmp_path, SHAPES[shape])
    foreign = read(path, ImportOptions())
    model = loaded(foreign)
    plain = PlainMarian(options, tensors)
    pairs = random_pairs(options, 7)
    for (source, target), found in zip(pairs, imported_logits(model, pairs), strict=True):
        wanted = plain.logits(plain.encode(source), target[:-1])
        known = options["dim-vocabs"][1]
        np.testing.assert_allclose(found[:, :known], wanted, atol=1e-4, rtol=0)
        assert np.all(found[:, known:] == UNUSED_ROW_BIAS)
    assert foreign.tensors_read == len(tensors)


def test_output_matrix_of_old_models_is_stored_the_other_way_round(tmp_path):
    path, options, tensors = write_model(tmp_path, SHAPES["three matrices"], untransposed=True)
    model, plain = loaded(read(path, ImportOptions())), PlainMarian(options, tensors)
    source, target = random_pairs(options, 1)[0]
    wanted = plain.logits(plain.encode(source), target[:-1])
    np.testing.assert_allclose(imported_logits(model, [(source, target)])[0][:, :TARGET_SIZE], wanted, atol=1e-4)


def test_greedy_output_of_fifty_random_sources_is_marians(tmp_path):
    path, options, tensors = write_model(tmp_path, seed=3)
    tensors["decoder_ff_logit_out_b"][0, 0] += 3  # so that some outputs end
    save_marian(path, options, tensors)
    import_model("marian", path, tmp_path / "out", count=4)
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    plain = PlainMarian(options, tensors)
    lengths = set()
    for source, _ in random_pairs(options, 50):
        wanted = plain.greedy(source, 12)
        found = model.generate(torch.tensor([source]), num_beams=1, early_stopping=False, max_length=13)
        assert found[0, 1:].tolist() == wanted
        lengths.add(len(wanted))
    assert len(lengths) > 1


def test_whole_import_gives_a_folder_that_translates_text(tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    path, _, _ = write_model(tmp_path, settings={"word-penalty": 0.5})
    report = import_model("marian", path, tmp_path / "out", count=6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    ids = tokenizer("no 12:30 unheard-of \\ 日本", return_tensors="pt").input_ids
    assert ids.tolist() == [[3, 4, 1, 10, 9, 0]]
    assert tokenizer.decode([3, 4, 10, 9, 0], skip_special_tokens=True) == "no 12:30 \\ 日本"
    assert tokenizer.pad_token_id == model.config.pad_token_id == TARGET_SIZE
    settings = model.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.length_penalty_type) == (6, 0.6, "power")
    assert settings.suppress_tokens == [1, TARGET_SIZE]
    output = model.generate(ids, max_new_tokens=9)[0, 1:].tolist()
    assert 1 not in output
    assert any("<pad>" in line for line in report.choices)
    assert any("word-penalty" in line for line in report.losses)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["kind"] == "marian"


def test_the_zero_start_vector_does_not_depend_on_the_padding_row(tmp_path):
    path, options, tensors = write_model(tmp_path)
    model = loaded(read(path, ImportOptions()))
    with torch.no_grad():
        model.model.shared.weight[-1] = 3.0  # the output's last column changes, nothing else
    source, target = random_pairs(options, 1)[0]
    plain = PlainMarian(options, tensors)
    found = imported_logits(model, [(source, target)])[0][:, :TARGET_SIZE]
    np.testing.assert_allclose(found, plain.logits(plain.encode(source), target[:-1]), atol=1e-4)


# ---------------------------------------------------------------------- refusals
REFUSED = {
    "type": "s2s",
    "transformer-decoder-autoreg": "average-attention",
    "transformer-ffn-depth": 3,
    "transformer-decoder-ffn-depth": 1,
    "transformer-decoder-dim-ffn": 48,
    "transformer-pool": True,
    "transformer-disable-position-embeddings": True,
    "transformer-alibi-shift": True,
    "transformer-alibi-trainable": True,
    "transformer-attention-mask": "alibi",
    "transformer-no-bias": True,
    "transformer-no-affine": True,
    "transformer-ffn-activation": "silly",
    "transformer-postprocess-emb": "n",
    "transformer-postprocess": "dhn",
    "transformer-preprocess": "r",
    "transformer-postprocess-top": "an",
    "right-left": True,
    "input-reorder": [1, 0],
    "input-join-fields": True,
    "input-types": ["sequence", "class"],
    "dim-vocabs": [15, 15, 15],
    "ulr": True,
    "lemma-dim-emb": 8,
    "lemma-dependency": "re-embedding",
    "factors-dim-emb": 4,
    "special-vocab": [3],
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_change_the_function_are_refused_by_name(tmp_path, option):
    path, options, tensors = write_model(tmp_path)
    save_marian(path, {**options, option: REFUSED[option]}, tensors)
    with pytest.raises(ConversionError, match=f"`{option}`"):
        import_model("marian", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", ["v1.12.0 65bf82ffc 2023-02-21", "v1.9.0", None])
@pytest.mark.parametrize("shape", ["pre-norm", "gelu"])
def test_what_older_versions_computed_otherwise_is_refused(tmp_path, version, shape):
    path, options, tensors = write_model(tmp_path, SHAPES[shape])
    save_marian(path, {**options, "version": version}, tensors)
    with pytest.raises(ConversionError, match=r"before Marian 1\.12\.1"):
        read(path, ImportOptions())


def test_missing_options_of_old_models_have_the_common_meaning(tmp_path):
    path, options, tensors = write_model(tmp_path)
    kept = {"type", "dim-emb", "dim-vocabs", "enc-depth", "dec-depth", "transformer-heads", "transformer-dim-ffn",
            "transformer-postprocess", "tied-embeddings-all"}  # fmt: skip
    wanted = read(path, ImportOptions())
    save_marian(path, {name: value for name, value in options.items() if name in kept}, tensors)
    found = read(path, ImportOptions())
    assert found.config == wanted.config
    save_marian(path, {name: value for name, value in options.items() if name != "enc-depth"}, tensors)
    with pytest.raises(ConversionError, match="`enc-depth` is missing"):
        read(path, ImportOptions())


def test_trained_positions_are_refused_only_where_there_are_some(tmp_path):
    path, options, tensors = write_model(tmp_path, {"transformer-train-position-embeddings": True})
    assert any("sinusoid is used" in line for line in read(path, ImportOptions()).choices)
    save_marian(path, options, {**tensors, "Wpos": np.zeros((50, 16), np.float32)})
    with pytest.raises(ConversionError, match="transformer-train-position-embeddings"):
        read(path, ImportOptions())


def test_other_files_of_marian_are_refused_with_the_way_round(tmp_path):
    path, _, tensors = write_model(tmp_path)
    binary = tmp_path / "other" / "model.intgemm.alphas.bin"
    binary.parent.mkdir()
    binary.write_bytes(b"\1\0\0\0")
    for given in (binary, binary.parent):
        with pytest.raises(ConversionError, match="marian-conv"):
            read(given, ImportOptions())
    optimizer = tmp_path / "model.npz.optimizer.npz"
    np.savez(optimizer, adam_mt=np.zeros(3, np.float32))
    with pytest.raises(ConversionError, match="optimizer's state"):
        read(optimizer, ImportOptions())
    assert read(tmp_path, ImportOptions()).tensors_read == len(tensors)  # the optimizer's file does not count
    np.savez(tmp_path / "model.iter20.npz", a=np.zeros(3, np.float32))
    with pytest.raises(ConversionError, match=r"model\.iter20\.npz, model\.npz"):
        read(tmp_path, ImportOptions())
    assert path.exists()


# ---------------------------------------------------------------------- damage
def test_a_file_that_was_cut_off_is_one_plain_error(tmp_path):
    path, _, _ = write_model(tmp_path)
    whole = path.read_bytes()
    for part in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:part])
        with pytest.raises(ConversionError, match="damaged or cut off"):
            import_model("marian", path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_byte_that_changed_inside_is_noticed(tmp_path):
    path, _, _ = write_model(tmp_path)
    content = bytearray(path.read_bytes())
    where = content.index(b"NUMPY") + 400
    content[where] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(ConversionError, match="damaged or cut off"):
        read(path, ImportOptions())


def test_tensors_left_over_missing_or_of_another_shape_are_errors(tmp_path):
    path, options, tensors = write_model(tmp_path)
    save_marian(path, options, {**tensors, "decoder_l1_rnn_W": np.zeros((2, 2), np.float32)})
    with pytest.raises(ConversionError, match="decoder_l1_rnn_W"):
        read(path, ImportOptions())
    save_marian(path, options, {name: array for name, array in tensors.items() if name != "encoder_l2_ffn_b1"})
    with pytest.raises(ConversionError, match="encoder_l2_ffn_b1"):
        read(path, ImportOptions())
    save_marian(path, {**options, "transformer-dim-ffn": 32}, tensors)
    with pytest.raises(ConversionError, match=r"\(16, 24\), the hyper-parameters ask for \(16, 32\)"):
        read(path, ImportOptions())
    save_marian(path, {**options, "dim-vocabs": [15, 14]}, tensors)
    with pytest.raises(ConversionError, match=r"Wemb|dim-vocabs"):
        read(path, ImportOptions())


def test_quantized_numbers_and_foreign_archives_are_refused(tmp_path):
    path, options, tensors = write_model(tmp_path)
    save_marian(path, options, {**tensors, "Wemb": tensors["Wemb"].astype(np.int8)})
    with pytest.raises(ConversionError, match="quantized"):
        read(path, ImportOptions())
    np.savez(path, weights=np.zeros(3, np.float32))
    with pytest.raises(ConversionError, match=r"special:model\.yml"):
        read(path, ImportOptions())
    path.write_bytes(b"not an archive at all")
    with pytest.raises(ConversionError, match=r"not an \.npz of Marian"):
        read(path, ImportOptions())


def test_options_in_a_file_of_their_own_serve_a_model_without_them(tmp_path):
    path, options, tensors = write_model(tmp_path)
    wanted = read(path, ImportOptions())
    np.savez(path, **tensors)
    path.with_name("model.npz.yml").write_text(yaml.safe_dump(options))
    assert read(path, ImportOptions()).config == wanted.config


# ---------------------------------------------------------------------- vocabularies
def test_dictionary_lines_are_read_as_they_stand(tmp_path):
    file = tmp_path / "vocab.yml"
    lines = [
        '</s>: 0', '<unk>: 1', '"#": 5', '&: 6', 'no: 7', '12:30: 8', '~: 9', "'it''s': 2", r'"a\"b\\c\u00e9\x41\t": 3',
        '"a: b": 4', "a: c: 10", "::: 11", '"\\"#\\"": 12', "null: 13", "\\: 14", "\u3000: 15", "1: 16", '": 17',
        f"? {'x' * 1100}", ": 18",
    ]  # fmt: skip
    file.write_text("# a remark\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    wanted = ["</s>", "<unk>", "it's", 'a"b\\cé' + "A\t", "a: b", "#", "&", "no", "12:30", "~", "a: c", "::", '"#"',
              "null", "\\", "\u3000", "1", '"', "x" * 1100]  # fmt: skip
    assert read_vocabulary(file) == wanted


def test_dictionaries_in_json_and_plain_lists_are_read(tmp_path):
    as_json, as_list = tmp_path / "vocab.json", tmp_path / "vocab.txt"
    as_json.write_text(json.dumps({word: n for n, word in enumerate(WORDS)}, indent=2))
    as_list.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    assert read_vocabulary(as_json) == read_vocabulary(as_list) == WORDS
    renamed = tmp_path / "vocab.yml"
    renamed.write_text(as_json.read_text())
    assert read_vocabulary(renamed) == WORDS


BAD_DICTIONARIES = {
    "a: 0\nb: 1\na: 2\n": r"line 3: the word 'a' comes twice \(first on line 1\)",
    "a: 0\nb: 0\n": r"line 2: 'b' and 'a' have the same id 0",
    "a: 0\nb: 2\n": "none with id 1",
    "a: 0\nb\n": "line 2: 'b' is not a word and its id",
    "a: 0\nb: -1\n": "line 2",
    '"a\\q": 0\n': r"line 1: \\q is no escape",
    "": "is empty",
    '{"a": 0, "a": 1}': "the word 'a' comes twice",
    '{"a": 0, "b": "c"}': "must hold words and their ids",
    '{"a": 0,\n "b" 1}': "line 2",
}


@pytest.mark.parametrize("text", BAD_DICTIONARIES)
def test_damaged_dictionaries_are_refused_with_file_and_line(tmp_path, text):
    file = tmp_path / "vocab.yml"
    file.write_text(text)
    with pytest.raises(ConversionError, match=BAD_DICTIONARIES[text]) as caught:
        read_vocabulary(file)
    assert str(file) in str(caught.value)


def test_vocabularies_that_are_none_are_refused(tmp_path):
    file = tmp_path / "vocab.yml"
    file.write_bytes(b"</s>: 0\n\xff\xfe: 1\n")
    with pytest.raises(ConversionError, match="line 2: not UTF-8"):
        read_vocabulary(file)
    with pytest.raises(ConversionError, match="cannot be read"):
        read_vocabulary(tmp_path / "absent.yml")
    with pytest.raises(ConversionError, match="factored"):
        read_vocabulary(tmp_path / "vocab.fsv")


def test_special_words_follow_marians_rule(tmp_path):
    path, _, _ = write_model(tmp_path)
    file = tmp_path / "trg.yml"
    words = read_vocabulary(file)
    write_vocabulary(file, ["eos", "UNK", *words[2:]])  # the names that Nematus used
    foreign = read(path, ImportOptions())
    assert foreign.tokenizer.eos_token == "eos"
    assert (foreign.config["eos_token_id"], foreign.config["unk_token_id"]) == (0, 1)
    write_vocabulary(file, [words[1], *words[2:], words[0]])  # at any other place, by name
    assert read(path, ImportOptions()).config["eos_token_id"] == TARGET_SIZE - 1
    write_vocabulary(file, ["x", *words[1:]])
    with pytest.raises(ConversionError, match="no entry '</s>'"):
        read(path, ImportOptions())


def test_rows_without_a_piece_are_never_decoded_and_pieces_without_a_row_are_errors(tmp_path):
    path, _, _ = write_model(tmp_path)
    words = read_vocabulary(tmp_path / "trg.yml")
    write_vocabulary(tmp_path / "trg.yml", words[:-3])
    foreign = read(path, ImportOptions())
    assert foreign.generation["suppress_tokens"] == [1, 12, 13, 14, 15]
    write_vocabulary(tmp_path / "trg.yml", [*words, "one more"])
    with pytest.raises(ConversionError, match=r"16 pieces, its matrix 15 rows(.|\n)*`dim-vocabs` 15"):
        read(path, ImportOptions())


def test_sides_of_unlike_size_share_one_padding_id(tmp_path):
    path, _, tensors = write_model(tmp_path, SHAPES["tied target, sizes"])
    foreign = read(path, ImportOptions())
    assert foreign.config["pad_token_id"] == foreign.tokenizer.pad_token_id == SOURCE_SIZE
    assert foreign.config["vocab_size"] == SOURCE_SIZE + 1
    assert foreign.generation["suppress_tokens"] == [1, *range(TARGET_SIZE, SOURCE_SIZE + 1)]
    target = foreign.tensors["model.shared.weight"]
    np.testing.assert_array_equal(target[:TARGET_SIZE].numpy(), tensors["decoder_Wemb"])
    assert not target[TARGET_SIZE:].any()
    assert foreign.tokenizer("s3 s4")["input_ids"] == [5, 6, 0]
    assert foreign.tokenizer(text_target="no 12:30")["input_ids"] == [3, 4, 0]


def test_vocabularies_are_found_where_the_settings_say_or_beside_them(tmp_path):
    path, _, _ = write_model(tmp_path)
    settings = tmp_path / "model.npz.decoder.yml"
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    (tmp_path / "trg.yml").rename(elsewhere / "trg.yml")
    with pytest.raises(
        ConversionError, match=r"names the vocabulary trg\.yml, which is not there; give `source_vocab`"
    ):
        read(path, ImportOptions())
    settings.write_text(yaml.safe_dump({"vocabs": ["data/trg.yml", str(elsewhere / "trg.yml")]}))
    assert read(path, ImportOptions()).config["eos_token_id"] == 0
    (elsewhere / "trg.yml").rename(tmp_path / "trg.yml")  # as a folder that was moved from another machine
    settings.write_text(yaml.safe_dump({"vocabs": ["/where/it/was/trained/trg.yml"] * 2}))
    assert read(path, ImportOptions()).config["eos_token_id"] == 0
    settings.unlink()
    with pytest.raises(ConversionError, match="`source_vocab` and `target_vocab`"):
        read(path, ImportOptions())
    foreign = read(path, ImportOptions(source_vocab=tmp_path / "trg.yml"))
    assert foreign.generation["num_beams"] == 12
    assert foreign.generation["length_penalty"] == 0.0
    (tmp_path / "mine.yml").write_text(yaml.safe_dump({"vocabs": ["trg.yml"] * 2, "beam-size": 2, "allow-unk": True}))
    foreign = read(path, ImportOptions(config=tmp_path / "mine.yml"))
    assert foreign.generation["num_beams"] == 2
    assert foreign.generation["suppress_tokens"] == [TARGET_SIZE]


def test_words_cut_by_subword_codes_are_cut_again(tmp_path):
    words = ["</s>", "<unk>", "lo@@", "low", "wer", "er", "l@@", "o@@", "w@@", "e@@", "r", "w", "o", "e", "l"]
    path, _, _ = write_model(tmp_path)
    write_vocabulary(tmp_path / "trg.yml", words)
    codes = tmp_path / "bpe.codes"
    codes.write_text("#version: 0.2\nl o\nw e\nlo w</w>\nwe r</w>\n")
    tokenizer = read(path, ImportOptions(codes=codes)).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("lower low")["input_ids"]) == ["lo@@", "wer", "low", "</s>"]
    assert tokenizer.decode(tokenizer("lower low")["input_ids"], skip_special_tokens=True) == "lower low"


# ---------------------------------------------------------------------- SentencePiece
def train_spm(folder, name, lines, size):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece (pip install sentencepiece)")
    (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / f"{name}.txt"), model_prefix=str(folder / name), vocab_size=size, bos_id=-1, eos_id=0,
        unk_id=1, pad_id=-1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / f"{name}.model").rename(folder / f"{name}.spm")
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))


LINES = [f"The {a} {b} is {c}er than one of the {a}s." for a in ("cat", "dog", "bird", "fish", "horse", "mouse")
         for b in ("house", "garden", "river", "street") for c in ("small", "quick", "strong", "old")]  # fmt: skip
OTHER = [f"Das {a} {b} ist {c}er als eines der {a}." for a in ("Katzen", "Hunde", "Vogel", "Fisch", "Pferde")
         for b in ("haus", "garten", "fluss", "wasser") for c in ("klein", "schnell", "stark", "alt")]  # fmt: skip


def test_one_sentencepiece_model_serves_both_sides(tmp_path):
    from transformers import AutoTokenizer

    spm = train_spm(tmp_path, "joint", [*LINES, *OTHER], 90)
    size = spm.get_piece_size()
    path, _, _ = write_model(
        tmp_path, {"dim-vocabs": [size, size]}, settings={"vocabs": ["joint.spm", "joint.spm"]}
    )  # fmt: skip
    import_model("marian", path, tmp_path / "out", count=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(tokenizer).__name__ == "MarianTokenizer"
    for line in [*LINES[::7], *OTHER[::7], "Zebra & 12:30 日本"]:
        assert tokenizer(line)["input_ids"] == [*spm.encode(line), 0]
        assert tokenizer(text_target=line)["input_ids"] == [*spm.encode(line), 0]
    for line in [*LINES[::7], *OTHER[::7]]:
        assert tokenizer.decode(spm.encode(line), skip_special_tokens=True) == line
    assert (tmp_path / "out" / "source.spm").read_bytes() == (tmp_path / "joint.spm").read_bytes()
    assert tokenizer.pad_token_id == size


def test_two_sentencepiece_models_keep_their_own_ids(tmp_path):
    from transformers import AutoTokenizer

    source, target = train_spm(tmp_path, "source", LINES, 60), train_spm(tmp_path, "target", OTHER, 75)
    sizes = [source.get_piece_size(), target.get_piece_size()]
    assert sizes[0] != sizes[1]
    path, _, _ = write_model(
        tmp_path,
        {"dim-vocabs": sizes, "tied-embeddings-all": False, "tied-embeddings": True},
        settings={"vocabs": ["source.spm", "target.spm"]},
    )
    import_model("marian", path, tmp_path / "out", count=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for line, other in zip(LINES[::9], OTHER[::9], strict=False):
        assert tokenizer(line)["input_ids"] == [*source.encode(line), 0]
        assert tokenizer(text_target=other)["input_ids"] == [*target.encode(other), 0]
        assert tokenizer.decode([*target.encode(other), 0, max(sizes)], skip_special_tokens=True) == other
    assert tokenizer.pad_token_id == max(sizes)
    assert "/" not in (tmp_path / "out" / "tokenizer_config.json").read_text().replace("</s>", "")


def test_dictionary_with_sentencepiece_models_beside_it_is_read_as_opus_models_are(tmp_path):
    spm = train_spm(tmp_path, "source", [*LINES, *OTHER], 80)
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    pieces = [spm.id_to_piece(n) for n in range(spm.get_piece_size())]
    words = ["</s>", "<unk>", *sorted(pieces[2:])]  # the dictionary has an order of its own
    size = len(words)
    path, _, _ = write_model(tmp_path, {"dim-vocabs": [size, size]}, settings={"vocabs": ["v.yml", "v.yml"]})
    (tmp_path / "v.yml").write_text("".join(f"{json.dumps(w)}: {n}\n" for n, w in enumerate(words)), encoding="utf-8")
    foreign = read(path, ImportOptions())
    wanted = [words.index(piece) for piece in spm.encode(LINES[3], out_type=str)]
    assert foreign.tokenizer(LINES[3])["input_ids"] == [*wanted, 0]
    with pytest.raises(ConversionError, match="`moses`, `lowercase` and `codes`"):
        read(path, ImportOptions(source_spm=tmp_path / "source.spm", lowercase=True))


def test_control_characters_among_the_pieces_are_never_generated(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece (pip install sentencepiece)")
    (tmp_path / "t.txt").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"), model_prefix=str(tmp_path / "b"), vocab_size=330, bos_id=-1, eos_id=0, unk_id=1,
        byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (tmp_path / "b.model").rename(tmp_path / "b.spm")
    size = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "b.spm")).get_piece_size()
    path, _, _ = write_model(tmp_path, {"dim-vocabs": [size, size]}, settings={"vocabs": ["b.spm", "b.spm"]})
    foreign = read(path, ImportOptions())
    assert len(foreign.generation["suppress_tokens"]) == 32 + 2
    text = "The cat \u4e2d."
    assert foreign.tokenizer.decode(foreign.tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_a_damaged_sentencepiece_model_is_named(tmp_path):
    pytest.importorskip("sentencepiece", reason="needs sentencepiece (pip install sentencepiece)")
    path, _, _ = write_model(tmp_path, settings={"vocabs": ["x.spm", "x.spm"]})
    (tmp_path / "x.spm").write_bytes(b"nothing of the kind")
    with pytest.raises(ConversionError, match=r"x\.spm is not a SentencePiece model"):
        read(path, ImportOptions())


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    path, _, _ = write_model(tmp_path, settings={"vocabs": ["x.spm", "x.spm"]})
    (tmp_path / "x.spm").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ConversionError, match="pip install sentencepiece"):
        read(path, ImportOptions())


def test_ids_of_a_real_vocabulary_are_sentencepieces_own(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece (pip install sentencepiece)")
    from hf_vaswani.interop.marian_vocabulary import marian_tokenizer, sentencepiece_words

    file = SHARED / "tokenizers" / "bergamot_enru" / "vocab.enru.spm"
    texts = SHARED / "tatoeba_mini" / "en-de.train.tsv.gz"
    if not file.is_file() or not texts.is_file():
        pytest.skip("the real vocabulary and texts are not in shared/data")
    with gzip.open(texts, "rt", encoding="utf-8") as stream:
        lines = [column for line in islice(stream, 250) for column in line.rstrip("\n").split("\t")[:2]]
    assert len(lines) == 500
    spm = sentencepiece.SentencePieceProcessor(model_file=str(file))
    words = sentencepiece_words(file)
    tokenizer = marian_tokenizer(words, None, (file, file), len(words), (words[0], words[1]))
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    for line in lines:
        assert again(line)["input_ids"] == [*spm.encode(line), spm.eos_id()]


# ---------------------------------------------------------------------- Marian itself
REAL = {
    "tied-all": {"tied_embeddings_all": "true"},
    "relu, sizes": {"tied_embeddings": "true", "transformer_ffn_activation": "relu"},
    "three matrices": {"transformer_postprocess_top": "n", "transformer_ffn_activation": "gelu"},
    "tied layers": {"tied_embeddings_all": "true", "dec_depth": 3, "transformer_tied_layers": [1, 2, 1]},
    "options": {"tied_embeddings_all": "true", "transformer_no_projection": "true", "output_omit_bias": "true",
                "transformer_train_position_embeddings": "true"},
    "pre-norm": {"tied_embeddings_all": "true", "transformer_preprocess": "n", "transformer_postprocess": "da",
                 "transformer_postprocess_top": "n"},
    "SentencePiece": {"tied_embeddings_all": "true"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", REAL)
def test_models_that_marian_trained_answer_as_in_marian(tmp_path, shape, capsys):
    from foreign_programs import environment, run_program
    from transformers import AutoTokenizer

    python = environment("marian", ["pymarian==1.12.42"])
    generator = np.random.default_rng(7)
    is_text = shape == "SentencePiece"
    words = [*WORDS[2:], *(f"w{n}" for n in range(8)), "[", "{", "- y", "#", "x:", "%", "é"]
    words = [word for word in words if " " not in word]

    def lines(count):
        if is_text:
            return [LINES[n] for n in generator.integers(0, len(LINES), count)]
        return [" ".join(generator.choice(words, generator.integers(1, 9))) for _ in range(count)]

    sources = lines(400)
    if is_text:
        targets = [" ".join(reversed(line.split())) for line in sources]
    else:  # learnable, and with words of its own where the vocabularies are two
        targets = [
            " ".join(f"{word}!" if "sizes" in shape else word for word in line.split()[::-1]) for line in sources
        ]
        targets = [line + " end" if n % 3 else line for n, line in enumerate(targets)]
    (tmp_path / "src").write_text("\n".join(sources) + "\n", encoding="utf-8")
    (tmp_path / "trg").write_text("\n".join(targets) + "\n", encoding="utf-8")
    is_one = "tied_embeddings_all" in REAL[shape]
    vocabularies = ["v.spm", "v.spm"] if is_text else ["v.yml", "v.yml"] if is_one else ["src.yml", "trg.yml"]
    options = {"vocabs": vocabularies, "dim_emb": 32, "enc_depth": 2, "dec_depth": 2, "transformer_heads": 4,
               "transformer_dim_ffn": 48, "after": "150u", **REAL[shape]}  # fmt: skip
    if is_text:
        options |= {"dim_vocabs": [120, 120], "sentencepiece_options": "--hard_vocab_limit=false"}
    (tmp_path / "options.json").write_text(json.dumps(options))
    run_program(python, "marian_program.py", "train", tmp_path, tmp_path / "options.json")
    asked_sources = lines(50)
    asked = {"vocabs": vocabularies, "lines": asked_sources, "targets": [targets[n] for n in range(50)]}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    run_program(python, "marian_program.py", "ask", tmp_path, tmp_path / "asked.json", tmp_path / "answer.json")
    answer = json.loads((tmp_path / "answer.json").read_text())

    report = import_model("marian", tmp_path / "model.npz", tmp_path / "out", count=10)
    model = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    pairs = [
        (tokenizer(source)["input_ids"], tokenizer(text_target=target)["input_ids"])
        for source, target in zip(asked["lines"], asked["targets"], strict=True)
    ]
    worst = 0.0
    for (_, target), logits, wanted in zip(pairs, imported_logits(model, pairs), answer["scores"], strict=True):
        log_probs = torch.from_numpy(logits).log_softmax(-1)[torch.arange(len(target)), torch.tensor(target)]
        assert len(wanted) == len(target)
        worst = max(worst, float((log_probs - torch.tensor(wanted)).abs().max()))
    equal = {}
    for name, beams in (("greedy", 1), ("beam", 4)):
        found = []
        for source, _ in pairs:
            row = model.generate(
                torch.tensor([source]), num_beams=beams, length_penalty=0.0, max_length=3 * len(source) + 1
            )
            found.append(tokenizer.decode(row[0], skip_special_tokens=True))
        equal[name] = sum(a == b for a, b in zip(found, answer[name], strict=True))
    with capsys.disabled():
        print(f"\nMarian 1.12.42, {shape}: log-probabilities within {worst:.2g}; greedy {equal['greedy']} of 50 equal, "
              f"beam 4 {equal['beam']} of 50, {len(set(answer['greedy']))} different outputs")  # fmt: skip
    assert report.parities
    assert worst < 1e-4
    assert len(set(answer["greedy"])) > 10
    if shape != "pre-norm":  # there, Marian's decoder departs from its trainer and scorer
        assert equal["greedy"] == 50


@pytest.mark.parametrize("kind", ["<f2", "<f8", ">f4", ">f8"])
def test_weights_of_any_float_type_become_float32(tmp_path, kind):
    path, options, tensors = write_model(tmp_path)
    save_marian(path, options, {name: tensor.astype(kind) for name, tensor in tensors.items()})
    found = read(path, ImportOptions())
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}
    expected = torch.from_numpy(tensors["encoder_l1_ffn_W1"].astype(kind).astype(np.float32)).t()
    assert torch.equal(found.tensors["model.encoder.layers.0.feed_forward.fc1.weight"], expected)
    assert any("became float32" in choice for choice in found.choices) == (kind != ">f4")


def test_a_size_that_does_not_fit_into_memory_is_one_plain_error(tmp_path):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**15},), }}"
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117).encode() + b"\n"
        archive.writestr("Wemb.npy", content)
    with pytest.raises(ConversionError, match=r"is not an .npz of Marian, or is damaged or cut off"):
        read(tmp_path / "model.npz", ImportOptions())


def test_nobody_is_told_to_open_a_file_unsafely(tmp_path):
    (tmp_path / "model.npz").write_text("some text")
    with pytest.raises(ConversionError, match="is no archive") as caught:
        read(tmp_path / "model.npz", ImportOptions())
    assert "pickle" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dim-vocabs", ["a", "b"]), ("enc-depth", "six"), ("dim-emb", True), ("transformer-tied-layers", [[1]]),
     ("input-types", 5), ("tied-embeddings-all", "x")],
)  # fmt: skip
def test_an_option_of_another_kind_is_refused_by_name(tmp_path, name, value):
    path, options, tensors = write_model(tmp_path)
    save_marian(path, {**options, name: value}, tensors)
    with pytest.raises(ConversionError, match=f"`{name}` is"):
        read(path, ImportOptions())


@pytest.mark.parametrize(
    ("name", "value"), [("beam-size", [6]), ("normalize", "x"), ("vocabs", 5), ("allow-unk", "no way")]
)
def test_a_search_setting_of_another_kind_is_refused_by_name(tmp_path, name, value):
    path, *_ = write_model(tmp_path, settings={name: value})
    with pytest.raises(ConversionError, match=f"decoder.yml: `{name}` is"):
        read(path, ImportOptions())


def test_search_settings_that_have_no_place_here_are_said(tmp_path):
    more = {"shortlist": ["lex.s2t", 50, 50], "output-sampling": ["topk", 10], "models": ["a.npz", "b.npz"]}
    losses = " ".join(read(write_model(tmp_path, settings=more)[0], ImportOptions()).losses)
    for word in ("shortlist", "output-sampling", "2 models"):
        assert word in losses
    assert "Search:" not in " ".join(read(write_model(tmp_path)[0], ImportOptions()).losses)


def test_a_byte_order_mark_belongs_to_no_word(tmp_path):
    _path, *_ = write_model(tmp_path)
    file = tmp_path / "trg.yml"
    expected = read_vocabulary(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_vocabulary(file) == expected
    (tmp_path / "words.txt").write_bytes(b"</s>\n<unk>\na\rb\n")
    assert read_vocabulary(tmp_path / "words.txt") == ["</s>", "<unk>", "a\rb"]


@pytest.mark.parametrize(
    "text", ['"\\UFFFFFFFF": 0', '"\\uD800": 0', "a: " + "9" * 5000, '{"a": true}', '{"a":' * 50_000]
)
def test_dictionaries_with_impossible_words_and_ids_are_refused(tmp_path, text):
    (tmp_path / "bad.yml").write_text(text + "\n")
    with pytest.raises(ConversionError, match=r"bad.yml"):
        read_vocabulary(tmp_path / "bad.yml")


def test_moses_without_languages_is_asked_about(tmp_path):
    path, *_ = write_model(tmp_path)
    with pytest.raises(ConversionError, match="`moses` needs `source_language` and `target_language`"):
        read(path, ImportOptions(moses=True))
