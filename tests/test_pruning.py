"""Heads taken out for good: the smaller model computes what the masked one computes, saved and loaded too."""

import argparse
import json
import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer
from hf_vaswani.analysis.head_importance import head_importance
from hf_vaswani.analysis.head_masks import Head, all_heads, masked_heads, parse_heads
from hf_vaswani.analysis.pruning import least_important, prune_heads
from hf_vaswani.cli import prune as command
from hf_vaswani.cli.output import UserError
from hf_vaswani.decoding_vaswani import FoldedDecoder
from hf_vaswani.interop.foreign import ConversionError

FOUR = {"num_attention_heads": 4, "d_k": 5, "d_v": 3}
SPECS = ["encoder.0.1", "encoder.1.^2,decoder.0.0,decoder.0.3,cross.2.1", "encoder.*.^3,decoder.*.^0,cross.*.^1"]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "norm_position": "pre"}])
def test_a_pruned_model_is_the_masked_one(make_model, batch, spec, changes):
    model = make_model(**FOUR, **changes)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("bias"):
                one.normal_()
    heads = parse_heads(spec, model)
    smaller = prune_heads(model, heads)
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        smaller.set_attn_implementation(implementation)
        found = smaller(**batch)
        with masked_heads(model, heads):
            masked = model(**batch)
        close(found.logits, masked.logits)
        close(found.loss, masked.loss)
        assert (masked.logits - model(**batch).logits).abs().max() > 1e-3
    assert FoldedDecoder.suits(smaller, smaller._plain_classes)  # the fast loop decodes it
    for options in ({}, {"num_beams": 1}, {"num_beams": 3, "num_return_sequences": 2}):
        with masked_heads(model, heads):
            expected = model.generate(**source, max_new_tokens=9, **options)
        assert torch.equal(smaller.generate(**source, max_new_tokens=9, **options), expected)
    assert len(all_heads(smaller)) == len(all_heads(model)) - len(heads)


def test_the_weights_are_gone_and_the_old_model_is_as_it_was(make_model):
    model = make_model(**FOUR)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smaller = prune_heads(model, parse_heads("encoder.0.0,encoder.0.2,cross.1.3", model))
    per_head = 16 * (5 + 5 + 3 + 3)
    assert smaller.num_parameters() == model.num_parameters() - 3 * per_head
    attention = smaller.model.encoder.layers[0].self_attn
    assert (attention.q_proj.weight.shape, attention.out_proj.weight.shape) == ((10, 16), (16, 6))
    assert torch.equal(attention.k_proj.weight, before["model.encoder.layers.0.self_attn.k_proj.weight"][
        [*range(5, 10), *range(15, 20)]])  # fmt: skip
    assert smaller.config.kept_heads == {"encoder.0": [1, 3], "cross.1": [0, 1, 2]}
    assert model.config.kept_heads is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert smaller.lm_head.weight is smaller.model.shared.weight
    assert not smaller.training
    assert prune_heads(model, []).config.kept_heads is None


def test_pruning_twice_counts_heads_anew_and_remembers_their_first_numbers(make_model, batch):
    model = make_model(**FOUR)
    once = prune_heads(model, [Head("cross", 1, 0), Head("cross", 1, 2)])
    twice = prune_heads(once, [Head("cross", 1, 1), Head("encoder", 0, 0)])
    assert twice.config.kept_heads == {"cross.1": [1], "encoder.0": [1, 2, 3]}
    at_once = prune_heads(model, parse_heads("cross.1.^1,encoder.0.0", model))
    assert torch.equal(twice(**batch).logits, at_once(**batch).logits)
    with pytest.raises(ValueError, match=r"no head cross.1.2.*cross layers 0 to 2 with 4, 2, 4 heads"):
        prune_heads(once, [Head("cross", 1, 2)])


def test_an_attention_keeps_a_head(make_model):
    model = make_model(**FOUR)
    with pytest.raises(ValueError, match=r"left of decoder.2, cross.0: an attention keeps at least one head"):
        prune_heads(model, parse_heads("decoder.2.*,cross.0.*,encoder.0.0", model))


@pytest.mark.parametrize("kept", [
    {"encoder.2": [0]}, {"self.0": [0]}, {"cross.0": []}, {"cross.0": [4]}, {"cross.0": [1, 0]}, {"cross.0": [1, 1]},
])  # fmt: skip
def test_a_configuration_with_heads_that_cannot_be_is_refused_by_name(make_model, kept):
    with pytest.raises(StrictDataclassError, match="kept_heads"):
        make_model(**FOUR, kept_heads=kept)


# ------------------------------------------------------------------ saved
_ELSEWHERE = """
import sys, torch
sys.modules["hf_vaswani"] = None
from transformers import AutoModelForSeq2SeqLM
folder, out = sys.argv[1:]
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
model.save_pretrained(out + "/again")
ids = torch.tensor([[5, 6, 7, 1]])
torch.save({"logits": model(input_ids=ids, labels=ids).logits.detach(), "found": model.generate(ids, max_new_tokens=8)},
           out + "/results.pt")
"""


def test_a_pruned_model_is_saved_and_loaded_by_package_and_by_its_own_code(make_model, tmp_path):
    model = make_model(**FOUR)
    smaller = prune_heads(model, parse_heads(SPECS[1], model))
    smaller.save_pretrained(tmp_path / "pruned")
    assert json.loads((tmp_path / "pruned" / "config.json").read_text())["kept_heads"] == {
        "encoder.1": [2], "decoder.0": [1, 2], "cross.2": [0, 2, 3],
    }  # fmt: skip
    ids = torch.tensor([[5, 6, 7, 1]])
    expected, translation = smaller(input_ids=ids, labels=ids).logits, smaller.generate(ids, max_new_tokens=8)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "pruned")
    assert type(loaded) is VaswaniForConditionalGeneration
    assert torch.equal(loaded(input_ids=ids, labels=ids).logits, expected)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, str(tmp_path / "pruned"), str(tmp_path)],
        env=environment, check=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    elsewhere = torch.load(tmp_path / "results.pt")
    close(elsewhere["logits"], expected)
    assert torch.equal(elsewhere["found"], translation)
    again = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "again")
    assert again.config.kept_heads == smaller.config.kept_heads
    assert torch.equal(again(input_ids=ids, labels=ids).logits, expected)


def test_weights_that_do_not_fit_kept_heads_are_refused(make_model, tmp_path):
    prune_heads(make_model(**FOUR), [Head("encoder", 0, 0)]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "kept_heads": None}))
    with pytest.raises(RuntimeError, match=r"encoder.layers.0.self_attn.*\(15, 16\), not \(20, 16\)"):
        VaswaniForConditionalGeneration.from_pretrained(tmp_path)


def test_training_goes_on_after_pruning(make_model, batch):
    model = make_model(**FOUR, dropout=0.0)
    smaller = prune_heads(model, parse_heads(SPECS[2], model)).train()
    optimizer = torch.optim.Adam(smaller.parameters(), lr=0.01)
    before = {name: one.detach().clone() for name, one in smaller.named_parameters()}
    losses = []
    for _ in range(12):
        loss = smaller(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(one, before[name]) for name, one in smaller.named_parameters())


@pytest.mark.parametrize("kind", ["ctranslate2", "onnx", "marian"])
def test_programs_with_one_number_of_heads_are_not_given_a_pruned_model(make_model, tmp_path, kind):
    import importlib

    model = prune_heads(make_model(), [Head("cross", 1, 0)])
    tokenizer = VaswaniTokenizer.train(["a"], vocab_size=259, allow_fewer=True)
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
    module = importlib.import_module(f"hf_vaswani.interop.{kind}_export")
    with pytest.raises(ConversionError, match=r"Heads were pruned from cross.1 \(`kept_heads`\)"):
        module.export(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


# ------------------------------------------------------------------ which heads go
def test_the_least_important_go_but_the_last_of_an_attention_stays():
    importance = {
        Head("encoder", 0, 0): 0.1, Head("encoder", 0, 1): 0.2, Head("encoder", 0, 2): 0.3,
        Head("cross", 0, 0): 5.0, Head("cross", 0, 1): 4.0, Head("cross", 0, 2): 6.0,
    }  # fmt: skip
    assert least_important(importance, 6) == []
    assert least_important(importance, 4) == [Head("encoder", 0, 0), Head("encoder", 0, 1)]
    assert least_important(importance, 3) == [Head("encoder", 0, 0), Head("encoder", 0, 1), Head("cross", 0, 1)]
    for keep in (1, 7):
        with pytest.raises(ValueError, match=f"{keep} heads cannot be kept: the model has 6, and each of its 2"):
            least_important(importance, keep)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from hf_vaswani.data.corpus import bundled_pairs

    path = tmp_path_factory.mktemp("model")
    pairs = bundled_pairs("test")[:6]
    tokenizer = VaswaniTokenizer.train([text for pair in pairs for text in pair], vocab_size=300, allow_fewer=True)
    torch.manual_seed(0)
    model = VaswaniForConditionalGeneration(
        VaswaniConfig(vocab_size=len(tokenizer), d_model=16, encoder_layers=2, decoder_layers=1, d_ff=24,
                      num_attention_heads=4, d_k=5, d_v=3)
    )  # fmt: skip
    model.generation_config.max_new_tokens = 5
    model.half().save_pretrained(path / "model")
    config = json.loads((path / "model" / "config.json").read_text())
    (path / "model" / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    tokenizer.save_pretrained(path / "model")
    for side, name in enumerate(("src", "tgt")):
        (path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return path


def call(*words):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["prune", *map(str, words)])
    return args.run(args)


def load(path):
    return VaswaniForConditionalGeneration.from_pretrained(path), VaswaniTokenizer.from_pretrained(path)


def test_the_command_takes_named_heads_out(folder, tmp_path, capsys):
    assert call(folder / "model", tmp_path / "out", "--heads", "encoder.0.1,cross.0.^3") == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out'}\n"
    assert "12 of 16 heads are left" in err
    model, tokenizer = load(folder / "model")
    smaller = load(tmp_path / "out")[0]
    assert smaller.config.kept_heads == {"encoder.0": [0, 2, 3], "cross.0": [3]}
    batch = tokenizer("Ein Hund", text_target="A dog", return_tensors="pt")
    with masked_heads(model, parse_heads("encoder.0.1,cross.0.^3", model)):
        expected = model(**batch).logits
    close(smaller(**batch).logits, expected)
    # The file stays in half precision, and what it is loaded as stays too.
    assert smaller.dtype == torch.float32
    sizes = [(path / "model.safetensors").stat().st_size for path in (folder / "model", tmp_path / "out")]
    assert sizes[1] < sizes[0]
    call(folder / "model", tmp_path / "full", "--heads", "encoder.0.1", "--store-as", "float32")
    assert (tmp_path / "full" / "model.safetensors").stat().st_size > 1.8 * sizes[1]


@pytest.mark.parametrize(("by", "files"), [([], 2), (["--by", "layer-importance"], 2), ([], 1)])
def test_the_command_keeps_the_most_important_heads(folder, tmp_path, by, files, capsys):
    from hf_vaswani.evaluation import translate_lines

    data = [folder / "src", folder / "tgt"][:files]
    assert call(folder / "model", tmp_path / "out", "--keep", "7", "--data", *data, *by) == 0
    model, tokenizer = load(folder / "model")
    sources = data[0].read_text(encoding="utf-8").splitlines()
    targets = (folder / "tgt").read_text(encoding="utf-8").splitlines()
    targets = targets if files == 2 else translate_lines(model, tokenizer, sources)
    importance = head_importance(model, tokenizer, list(zip(sources, targets, strict=True)), per_layer=bool(by))
    expected = prune_heads(model, least_important(importance, 7)).config.kept_heads
    assert load(tmp_path / "out")[0].config.kept_heads == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "cross.3.0"], "no head cross.3.0"),
        (["--heads", "cross.0.*"], "at least one head"),
        (["--heads", "cross.0.0", "--by", "importance"], "are for --keep"),
        (["--keep", "7"], "--data SRC"),
        (["--keep", "3", "--data", "SRC"], "3 heads cannot be kept: the model has 16, and each of its 4"),
        (["--keep", "7", "--data", "SRC", "SRC", "SRC"], "SRC and TGT"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(folder, tmp_path, words, message):
    words = [folder / "src" if word == "SRC" else word for word in words]
    with pytest.raises(UserError, match=message):
        call(folder / "model", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_replaced_only_when_asked_and_never_the_model_itself(folder, tmp_path, capsys):
    out = tmp_path / "out"
    call(folder / "model", out, "--heads", "encoder.0.1")
    with pytest.raises(UserError, match="name another folder, or pass --overwrite"):
        call(folder / "model", out, "--heads", "encoder.0.0")
    call(folder / "model", out, "--heads", "encoder.0.0", "--overwrite")
    assert load(out)[0].config.kept_heads == {"encoder.0": [1, 2, 3]}
    with pytest.raises(UserError, match="is MODEL itself"):
        call(out, out, "--heads", "encoder.0.0", "--overwrite")
