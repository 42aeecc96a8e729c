"""The translation pipeline: what goes in, what comes out, in which order, for our models and the library's."""

import gc
import inspect
import io
import itertools
import os
import random
import re
import subprocess
import sys
import time
import types

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import tqdm
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
    pipelines,
)
from transformers.pipelines.pt_utils import KeyDataset

from hf_vaswani import VaswaniTokenizer, VaswaniTranslationPipeline
from hf_vaswani.pipeline_vaswani import register_translation_task
from hf_vaswani.text_vaswani import split_into_sentences

LINES = ["Ein Mann schläft.", "", "Zwei kleine Hunde rennen über die grüne Wiese.", "Ja.", "31", "Wer kommt da? Ich!"]
FIVE = "Es regnet. Dr. Weiß schläft! Wer kommt um 3.30 Uhr? Am 3. Mai z. B. niemand. „Gut.“ Ende."


# ---------------------------------------------------------------------- small models and tokenizers
def byte_tokenizer(**kwargs):
    """One piece per byte: ids 0 to 2 are pad, end and unknown; then 256 bytes."""
    pieces = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        **kwargs,
    )


SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


def marian(rows=270, **changes):
    torch.manual_seed(0)
    return MarianMTModel(MarianConfig(vocab_size=rows, **{**SIZES, **changes})).eval()


def bart():
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(vocab_size=270, **{**SIZES, "bos_token_id": 1})).eval()


def t5(**changes):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=270, decoder_start_token_id=0, **sizes, **changes)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train(LINES * 3, vocab_size=300, reserved=["{name}", "%1$s"], show_progress=False)


@pytest.fixture
def translate(make_model, tokenizer):
    """A tiny random model of ours, with the paper's search."""
    model = make_model(vocab_size=len(tokenizer))
    with torch.no_grad():  # heed the source, and spread the scores, so that hypotheses differ by more than rounding
        for name, weight in model.named_parameters():
            if "encoder_attn" in name or "cross" in name or "shared" in name:
                weight.mul_(4.0)
    # Single bytes beyond ASCII would all read alike.
    alike = [i for i in range(3, 259) if not tokenizer.decode([i]).isprintable() or tokenizer.decode([i]) == "\ufffd"]
    model.generation_config.update(suppress_tokens=alike, begin_suppress_tokens=[1], max_new_tokens=8)
    return VaswaniTranslationPipeline(model=model, tokenizer=tokenizer)


class Shouting:
    """Stands for `generate`: says everything again in capitals, and remembers what it was given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.seen, self.shapes, self.kwargs = tokenizer, [], [], []

    def __call__(self, input_ids, attention_mask, **kwargs):
        texts = [
            self.tokenizer.decode(row[mask.bool()], skip_special_tokens=True)
            for row, mask in zip(input_ids, attention_mask, strict=True)
        ]
        self.seen += texts
        self.shapes.append(tuple(input_ids.shape))
        self.kwargs.append(kwargs)
        loud = [[2, *self.tokenizer(self.say(text), verbose=False)["input_ids"]] for text in texts]
        longest = max(map(len, loud))
        return torch.tensor([row + [0] * (longest - len(row)) for row in loud])

    def say(self, text):
        return text.upper()


def shouting():
    pipe = VaswaniTranslationPipeline(model=marian(), tokenizer=byte_tokenizer())
    pipe.model.generate = pipe.said = Shouting(pipe.tokenizer)
    return pipe


@pytest.fixture
def shout():
    """A pipeline whose translations are capitals, over one piece per byte and at most 48 of them."""
    return shouting()


def texts_of(results):
    return [one["translation_text"] for one in results]


def by_hand(pipe, text, **kwargs):
    """The same by the library's own two calls."""
    batch = pipe.tokenizer(text, return_tensors="pt")
    batch.pop("token_type_ids", None)
    out = pipe.model.generate(**batch, **kwargs)
    return pipe.tokenizer.decode(out[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------------- shapes of input and output
def test_one_text_gives_a_list_of_one_dict(translate):
    assert translate(LINES[0]) == [{"translation_text": by_hand(translate, LINES[0])}]


def test_a_list_gives_a_list_of_dicts_in_its_order(translate):
    expected = [by_hand(translate, line) if line.strip() and line != "31" else line for line in LINES]
    assert translate(LINES) == [{"translation_text": text} for text in expected]
    assert translate(tuple(LINES)) == translate(LINES)
    assert len(set(expected)) == len(LINES)


def test_nothing_in_nothing_out(translate):
    assert translate([]) == []
    assert list(translate(iter([]))) == []


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batch_size_changes_nothing(translate, batch_size):
    assert translate(LINES * 2, batch_size=batch_size) == translate(LINES * 2)


def test_streams_give_generators(translate):
    import datasets

    class Torch(torch.utils.data.Dataset):
        def __len__(self):
            return len(LINES)

        def __getitem__(self, i):
            return LINES[i % len(LINES)]

    expected = translate(LINES)
    table = datasets.Dataset.from_dict({"text": LINES, "label": list(range(len(LINES)))})
    streams = [
        (line for line in LINES),
        iter(LINES),
        Torch(),
        table,
        table.to_iterable_dataset(),
        KeyDataset(table, "text"),
    ]
    for stream in streams:
        results = translate(stream)
        assert isinstance(results, types.GeneratorType)
        assert list(results) == expected
    assert translate(table["text"]) == expected


def test_an_open_file_keeps_its_line_ends(shout):
    assert texts_of(shout(io.StringIO("\nein Hund\n\nja\n"))) == ["\n", "EIN HUND\n", "\n", "JA\n"]


def test_a_long_stream_is_read_window_by_window(shout):
    taken = itertools.count()
    stream = (f"wort {next(taken)}" for _ in range(10_000))
    results = shout(stream, batch_size=4)
    assert next(taken) == 0
    assert next(results) == {"translation_text": "WORT 1"}
    assert next(taken) <= 4 * 16 + 1
    first = next(shout(("a", "b").__iter__(), batch_size=1))
    assert first == {"translation_text": "A"}
    assert shout.said.seen[-1] == "a"  # with batches of one, an interactive stream is answered at once
    assert sum(1 for _ in results) == 9_999


def test_batches_hold_like_lengths_within_both_budgets(shout):
    lines = ["x" * n for n in (5, 30, 6, 29, 5, 28)]
    assert texts_of(shout(lines, batch_size=3)) == [line.upper() for line in lines]
    assert shout.said.shapes == [(3, 31), (3, 7)]
    shout.said.shapes.clear()
    shout(lines, batch_tokens=62)
    assert shout.said.shapes == [(2, 31), (2, 29), (2, 6)]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"batch_size": 3, "window": 2}, 6),
        ({"batch_size": 1}, 1),
        ({"batch_size": 1, "window": 5}, 5),
        ({"num_beams": 512}, 8),
    ],
)
def test_no_more_than_the_window_is_ever_read_ahead(shout, options, most):
    read, given, ahead = itertools.count(), 0, []
    stream = (f"wort {next(read)}" for _ in range(40))
    for _ in shout(stream, **options):
        ahead.append(int(read.__reduce__()[1][0]) - given)
        given += 1
    assert given == 40
    assert max(ahead) == most


def test_batches_fit_the_device_the_width_of_the_search_and_the_vocabulary(shout, monkeypatch):
    def rows(count=600, **options):
        shout.said.shapes.clear()
        shout(["a"] * count, **options)
        return shout.said.shapes[0][0]

    assert [rows(num_beams=beams) for beams in (1, 4, 5)] == [512, 128, 102]
    assert rows(num_beams=4, batch_size=300) == 300
    shout.said.shapes.clear()
    shout(["x" * 40] * 60, num_beams=1)  # 41 tokens each, of 2,048
    assert shout.said.shapes == [(49, 41), (11, 41)]
    monkeypatch.setattr(shout.model.config, "vocab_size", 2**17)
    assert rows(num_beams=4) == 64
    run = types.SimpleNamespace(beams=4, batch_tokens=None, window=None)
    shout.model = types.SimpleNamespace(device=torch.device("cuda"), config=types.SimpleNamespace(vocab_size=37000))
    shout._settle_batches(run, None)
    assert (run.batch_size, run.batch_tokens, run.window) == (512, 16384, 8)


def test_new_tokens_are_counted_to_the_end_of_each_best_candidate(translate):
    sources = [LINES[0], LINES[2], LINES[3]]
    total = sum(
        translate.model.generate(**translate.tokenizer(one, return_tensors="pt")).shape[1] - 1 for one in sources
    )
    assert translate.new_tokens == 0
    translate(sources)
    assert translate.new_tokens == total
    translate(sources, num_return_sequences=3)
    assert translate.new_tokens == 2 * total


def test_the_bar_moves_with_the_batches_and_not_only_with_the_window(shout, monkeypatch):
    import hf_vaswani.pipeline_vaswani as module

    moved = []

    class Bar(tqdm):
        def update(self, n=1):
            moved.append((n, len(shout.said.shapes)))

    monkeypatch.setattr(module, "tqdm", Bar)
    shout(["ja", "31", "ab\ncdefg", "nein"], batch_size=2, progress=True)
    # "31" needs no batch; the text of two lines is done when the shorter of them is.
    assert moved == [(1, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("row", "kwargs"),
    [
        ({"text": "ja", "id": "7"}, {}),
        ({"id": "nein", "satz": "ja"}, {"column": "satz"}),
        ({"translation": {"de": "ja", "en": "yes"}}, {"src_lang": "de"}),
        ({"translation": {"de": "ja", "en": "yes"}}, {"column": "translation.de"}),
        ({"de": "ja", "en": "yes"}, {"src_lang": "de"}),
        ({"satz": "ja", "id": 7}, {}),
    ],
)
def test_text_is_found_in_rows(shout, row, kwargs):
    assert shout(row, **kwargs) == [{"translation_text": "JA"}]
    assert shout([row], **kwargs) == [{"translation_text": "JA"}]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (["ja", None], "Input 2 .* NoneType"),
        ([["ja"]], "Input 1 .* list"),
        ([{"de": "ja", "en": "yes"}], r"Input 1 .*'de', 'en'.*column"),
        ([{"translation": {"de": "ja", "en": "yes"}}], r"Input 1 .*'de', 'en'.*src_lang"),
        ([b"ja"], "Input 1 .* bytes"),
        ([{"satz": "ja", "id": "7"}], "Input 1 .*'satz', 'id'"),
    ],
)
def test_an_input_without_text_is_named(shout, rows, match):
    with pytest.raises(ValueError, match=match):
        shout(rows)


@pytest.mark.parametrize("bad", [None, 3, b"ja"])
def test_what_is_no_text_at_all_is_refused(shout, bad):
    with pytest.raises(TypeError, match=type(bad).__name__):
        shout(bad)


def test_a_source_language_that_would_change_nothing_is_refused(shout):
    with pytest.raises(ValueError, match=r"`src_lang` is 'de'.*no languages"):
        shout(["ja"], src_lang="de")


def test_many_calls_leave_nothing_behind(shout):
    generator = random.Random(5)
    sizes = {}
    for call in range(1, 1001):
        shout("wort " * generator.randint(1, 12), return_flags=call % 2 == 0, return_scores=False)
        shout.said.seen.clear()
        shout.said.shapes.clear()
        shout.said.kwargs.clear()
        if call in (100, 1000):
            gc.collect()
            sizes[call] = len(gc.get_objects())
    assert sizes[1000] < 1.05 * sizes[100]


# ---------------------------------------------------------------------- what is not translated
def test_blank_lines_come_back_empty_and_unseen(shout):
    for passthrough in (True, False):
        assert texts_of(shout(["", "  ", "\t", "hallo"], passthrough=passthrough)) == ["", "", "", "HALLO"]
    assert shout.said.seen == ["hallo", "hallo"]
    assert texts_of(shout(["", " ", "-", "Hello ."])) == ["", "", "-", "HELLO ."]


UNTOUCHED = [
    *map(str, range(1, 32)),
    "▾",
    "🙂👍🏽",
    "https://example.org/a?b=c",
    "[ˈhaʊs]",
    "/ʃiː/",
    "a.b@example.org",
    "--- 5 %",
]


def test_text_without_words_passes_through(shout):
    assert texts_of(shout(UNTOUCHED)) == UNTOUCHED
    assert shout.said.seen == []
    assert texts_of(shout(UNTOUCHED[-2:], passthrough=False)) == ["A.B@EXAMPLE.ORG", "--- 5 %"]
    assert len(shout.said.seen) == 2


@pytest.mark.parametrize("text", ["5 kg", "[siehe oben]", "siehe https://a.example", "[Gəl]", "他", "и/или", "https:"])
def test_text_with_words_is_translated(shout, text):
    shout(text)
    assert shout.said.seen == [text]


def test_markup_is_text(shout):
    for text in ("a <b>b</b> c", "x<br />y", "1 < 2 & c"):
        shout(text)
    assert shout.said.seen == ["a <b>b</b> c", "x<br />y", "1 < 2 & c"]


def test_blanks_and_directions_survive_decoding(shout):
    shout.said.say = lambda text: text
    for text in ("Ça va ? Oui : « d'accord » !", "מה זה?", "\u200fנכון, USB 3.0", "entstehen ."):
        assert texts_of(shout(text, long_input="error", num_beams=2)) == [text]


# ---------------------------------------------------------------------- lines, sentences, length
def test_lines_of_a_text_are_units(shout):
    assert texts_of(shout("Branch\nCode\r\n  \nStatus\n")) == ["BRANCH\nCODE\r\n\nSTATUS\n"]
    assert sorted(shout.said.seen) == ["Branch", "Code", "Status"]


def test_wrapped_lines_are_joined_to_the_next_blank_line(shout):
    text = "\nein Satz über\n  zwei Zeilen\n\n\nnoch einer\n"
    assert texts_of(shout(text, lines="join")) == ["\nEIN SATZ ÜBER ZWEI ZEILEN\n\n\nNOCH EINER\n"]
    shout.said.seen.clear()
    shout("他在\n睡觉", lines="join")
    assert shout.said.seen == ["他在睡觉"]


def test_sentences_are_translated_one_by_one_on_demand(shout):
    text = "Es regnet. Wer kommt?  Niemand! Gut … Ende."
    assert texts_of(shout(text, split_sentences=True)) == [text.upper()]
    assert sorted(shout.said.seen) == sorted(["Es regnet.", "Wer kommt?", "Niemand!", "Gut …", "Ende."])
    shout.said.seen.clear()
    shout(text)
    assert shout.said.seen == [text]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Es regnet. Es schneit.", ["Es regnet.", "Es schneit."]),
        ("Dr. Weiß schläft. Gut!", ["Dr. Weiß schläft.", "Gut!"]),
        (
            "Am 3. Mai z. B. und z.B. Das kostet 3.5 Euro. Viel.",
            ["Am 3. Mai z. B. und z.B. Das kostet 3.5 Euro.", "Viel."],
        ),
        ("„Komm!“ Er ging. (Nein.) Doch.", ["„Komm!“", "Er ging.", "(Nein.)", "Doch."]),
        ("“Oh!” she said. No. 5 is alive. No. Never.", ["“Oh!” she said.", "No. 5 is alive.", "No.", "Never."]),
        ("今天下雨。“好！”他说？是", ["今天下雨。", "“好！”", "他说？", "是"]),
        ("Oui : « d'accord ! » Elle part ? Non.", ["Oui : « d'accord ! »", "Elle part ?", "Non."]),
        (
            "J. R. R. Tolkien wrote. ¿Qué? ¡Sí! Wait... what",
            ["J. R. R. Tolkien wrote.", "¿Qué?", "¡Sí!", "Wait... what"],
        ),
        ("ما هذا؟ لا أعرف.", ["ما هذا؟", "لا أعرف."]),
        ("", [""]),
        (" Kein Ende ", [" Kein Ende "]),
    ],
)
def test_sentence_rules(text, sentences):
    parts = split_into_sentences(text)
    assert parts[::2] == sentences
    assert "".join(parts) == text


def test_chinese_sentences_get_the_blank_that_other_scripts_need(shout):
    shout.said.say = lambda text: {"今天下雨。": "It rains.", "好。": "Good."}.get(text, text)
    assert texts_of(shout("今天下雨。好。", split_sentences=True)) == ["It rains. Good."]


@pytest.mark.parametrize(
    "text",
    [
        "Ein Satz steht hier. Noch ein Satz steht da. Und ein dritter, der viel länger ist, hat Kommas, sieben Wörter.",
        "kein punkt " * 30,
        "x" * 500,
        "ein, zwei; drei: " + "vier" * 40 + "  fünf",
        "早上好，我们走吧。" * 9,
        "x" * 60 + "，",
        "👩🏽‍🚀" * 12 + "é" * 40 + "e\u0301" * 60,
    ],
)
def test_long_text_is_split_and_nothing_is_lost(shout, text, caplog):
    shout.said.say = lambda piece: piece
    assert texts_of(shout(text)) == [text]
    assert len(shout.said.seen) > 1
    assert max(columns for _, columns in shout.said.shapes) <= 48
    assert "Input 1" in caplog.text
    assert "can take 48" in caplog.text
    assert not any(piece.startswith(("\u0301", "\u200d", "🏽")) for piece in shout.said.seen)


PARROT = shouting()
PARROT.said.say = lambda text: text


FRAGMENTS = [
    *"aB1 .!?,;。，」”»\t\u00a0é🏽\u200d\u0301ü\n(",
    "Ein Satz. ",
    "Wort, ",
    "x" * 50,
    " " * 50,
    "早上好，" * 9,
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join), st.booleans(), st.booleans())
def test_no_character_is_ever_lost(text, split_sentences, passthrough):
    kept = "\n".join(line if line.strip() else "" for line in text.split("\n"))
    found = PARROT(text, split_sentences=split_sentences, passthrough=passthrough)[0]["translation_text"]
    # Sentences that meet without a blank in Chinese get one; nothing else may differ.
    assert found.replace(" ", "") == kept.replace(" ", "")
    if not set(text) & set("。，"):
        assert found == kept


def test_a_line_of_dots_takes_no_time():
    start = time.perf_counter()
    for text in ("." * 100_000, "a" + " " * 100_000 + "b", "," * 100_000, "!”" * 50_000):
        assert "".join(split_into_sentences(text)) == text
    assert time.perf_counter() - start < 2.0


def test_a_split_is_at_sentences_and_reported_once(shout, caplog):
    shout(["ja", "Ein Satz steht ganz allein da. Noch ein Satz steht da.", "Der eine, der andere. " * 4])
    assert "Ein Satz steht ganz allein da." in shout.said.seen
    assert [record.getMessage()[:7] for record in caplog.records] == ["Input 2"]


def test_long_text_is_refused_on_demand(shout):
    with pytest.raises(ValueError, match=r"Input 2 .*61 tokens.*48"):
        shout(["ja", "x" * 60], long_input="error")
    assert texts_of(shout("x" * 47, long_input="error")) == ["X" * 47]


def test_a_prefix_that_leaves_no_room_is_refused(shout):
    with pytest.raises(ValueError, match="no room"):
        shout("x" * 60, prefix="p" * 60)


def test_truncation_cannot_cut_text(shout):
    assert texts_of(shout("ab " * 40, truncation=True)) == ["AB " * 40]


def test_the_limit_is_the_table_or_the_tokenizers(make_model):
    def limit(model, **kwargs):
        tokenizer = byte_tokenizer(**kwargs)
        pipe = VaswaniTranslationPipeline(model=model, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="can take") as caught:
            pipe("x" * 2000, long_input="error")
        return int(re.search(r"can take (\d+)", str(caught.value)).group(1))

    grows, fixed = make_model(vocab_size=270), make_model(vocab_size=270, position_encoding="learned")
    assert limit(grows) == 64
    assert limit(grows, model_max_length=100) == 100  # a sinusoid table grows
    assert limit(fixed, model_max_length=100) == 64
    assert limit(fixed, model_max_length=20) == 20
    assert limit(marian(), model_max_length=100) == 48
    assert limit(t5(), model_max_length=100) == 100


# ---------------------------------------------------------------------- candidates, scores, flags
def test_four_candidates_of_beam_four(translate):
    results = translate(LINES[0], num_return_sequences=4)
    scores = [one["score"] for one in results]
    assert len(set(texts_of(results))) == len(results) == 4
    assert scores == sorted(scores, reverse=True)
    assert results[0]["translation_text"] == translate(LINES[0])[0]["translation_text"]
    batch = translate.tokenizer(LINES[0], return_tensors="pt")
    out = translate.model.generate(**batch, num_return_sequences=4, return_dict_in_generate=True, output_scores=True)
    assert scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-5)


def test_candidates_of_a_list_are_lists(translate):
    results = translate(LINES, num_return_sequences=3)
    assert [len(one) for one in results] == [3, 1, 3, 3, 1, 3]
    assert results[1] == [{"translation_text": "", "score": 0.0}]
    assert results[4] == [{"translation_text": "31", "score": 0.0}]
    assert texts_of(one[0] for one in results) == texts_of(translate(LINES))


def test_candidates_of_split_text_are_joined(translate):
    text = "Ein Mann schläft.\nWer kommt da?"
    first, second = (translate(line, num_return_sequences=3) for line in text.split("\n"))
    joined = translate(text, num_return_sequences=3)
    assert texts_of(joined) == [
        f"{a['translation_text']}\n{b['translation_text']}" for a, b in zip(first, second, strict=True)
    ]
    assert joined[1]["score"] == pytest.approx((first[1]["score"] + second[1]["score"]) / 2, rel=1e-5)


def test_candidates_of_equal_text_are_given_once(shout):
    def twice(**batch):
        sequences = shout.said(batch["input_ids"], batch["attention_mask"]).repeat_interleave(2, 0)
        return types.SimpleNamespace(sequences=sequences, sequences_scores=torch.tensor([-1.0, -2.0]))

    shout.model.generate = twice
    assert shout("ja", num_beams=2, num_return_sequences=2) == [{"translation_text": "JA", "score": -1.0}]


def test_more_candidates_than_beams_are_refused(translate):
    with pytest.raises(ValueError, match=r"`num_return_sequences` \(5\) .* `num_beams` \(4\)"):
        translate("ja", num_return_sequences=5)
    with pytest.raises(ValueError, match=r"\(2\) .* \(1\)"):
        translate("ja", num_return_sequences=2, num_beams=1)


def test_samples_are_sorted_by_score(translate):
    torch.manual_seed(3)
    results = translate(LINES[2], num_beams=1, do_sample=True, num_return_sequences=5)
    scores = [one["score"] for one in results]
    assert len(results) > 1
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("penalty", ["gnmt", "power"])
def test_a_greedy_score_is_what_a_beam_would_say(translate, penalty):
    kwargs = {"length_penalty_type": penalty, "length_penalty": 0.8}
    for result in translate(LINES, num_beams=1, return_scores=True, **kwargs):
        text, score = result["translation_text"], result["score"]
        assert (score == 0.0) == (text in ("", "31"))
    batch = translate.tokenizer(LINES[0], return_tensors="pt")
    row = translate.model.generate(**batch, num_beams=1)
    with torch.no_grad():
        logits = translate.model(**batch, decoder_input_ids=row[:, :-1]).logits.log_softmax(-1)
    total = logits.gather(-1, row[:, 1:, None]).sum().item()
    length = row.shape[1] - 1
    factor = ((5 + length) / 6) ** 0.8 if penalty == "gnmt" else length**0.8
    assert translate(LINES[0], num_beams=1, return_scores=True, **kwargs)[0]["score"] == pytest.approx(
        total / factor, abs=1e-4
    )


def test_scored_batches_are_kept_small_enough_for_their_scores(shout, monkeypatch):
    import hf_vaswani.pipeline_vaswani as module

    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 2 * 270 * (6 + 50))

    def scored(**batch):
        sequences = shout.said(batch["input_ids"], batch["attention_mask"])
        return types.SimpleNamespace(sequences=sequences, sequences_scores=torch.zeros(len(sequences)))

    shout.model.generate = scored
    assert len(shout(["abcde"] * 5, return_scores=True)) == 5
    assert [rows for rows, _ in shout.said.shapes] == [2, 2, 1]


def test_results_that_look_wrong_are_flagged(shout):
    shout.said.say = {
        "kurz": "eine sehr lange übersetzung",
        "ha": "ab ab ab ab ab",
        "nein nein nein nein": "no no no no",
        "gut": "good",
    }.get
    results = shout(["kurz", "ha", "nein nein nein nein", "gut", "31"], return_flags=True)
    assert [one["flags"] for one in results] == [["length_ratio"], ["length_ratio", "repetition"], [], [], []]
    assert shout("kurz") == [{"translation_text": "eine sehr lange übersetzung"}]


def test_a_lost_code_is_named(translate, caplog):
    result = translate("Hallo {name}, %1$s", return_flags=True)[0]
    kept = [code for code in ("{name}", "%1$s") if result["translation_text"].count(code) == 1]
    lost = [code for code in ("{name}", "%1$s") if code not in kept]
    assert lost
    reserved = [flag for flag in result["flags"] if flag.startswith("reserved: ")]
    assert len(reserved) == 1
    assert all(code in reserved[0] for code in lost)
    assert not caplog.records
    translate(["Hallo {name}, %1$s"] * 2)
    assert [lost[0] in record.getMessage() for record in caplog.records] == [True]


# ---------------------------------------------------------------------- arguments of generate
def test_generate_arguments_work_at_construction_and_per_call(translate, tokenizer):
    text = LINES[2]
    greedy = VaswaniTranslationPipeline(model=translate.model, tokenizer=tokenizer, num_beams=1, max_new_tokens=5)
    assert greedy(text)[0]["translation_text"] == tokenizer.decode(
        translate.model.generate(**tokenizer(text, return_tensors="pt"), num_beams=1, max_new_tokens=5)[0],
        skip_special_tokens=True,
    )
    assert translate(text, num_beams=1, max_new_tokens=5) == greedy(text)
    assert greedy(text, num_beams=4, max_new_tokens=8) == translate(text)
    assert greedy(text, generation_config=GenerationConfig(max_new_tokens=1, num_beams=1)) == translate(
        text, num_beams=1, max_new_tokens=1
    )
    both = ({"no_repeat_ngram_size": 1}, {})
    once, often = (tokenizer(translate(text, **one)[0]["translation_text"])["input_ids"] for one in both)
    assert len(set(once)) == len(once)
    assert len(set(often)) < len(often)


def test_our_own_generation_fields_reach_generate(shout):
    pipe = VaswaniTranslationPipeline(
        model=shout.model, tokenizer=shout.tokenizer, length_penalty_type="power", max_length_offset=3
    )
    pipe("ja", max_length_offset=9, forced_prefix_ids=[17, 18])
    pipe("ja", generation_config=GenerationConfig(num_beams=2))
    first, second = shout.said.kwargs
    assert (first["length_penalty_type"], first["max_length_offset"], first["forced_prefix_ids"]) == (
        "power",
        9,
        [17, 18],
    )
    assert "length_penalty_type" not in second
    assert second["generation_config"].num_beams == 2


def test_a_forced_beginning_is_kept(translate, tokenizer):
    text = "ja e"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for result in translate(LINES[0], forced_prefix_ids=ids, num_return_sequences=4):
        assert result["translation_text"].startswith(text)
    forced = tokenizer("j", add_special_tokens=False)["input_ids"][0]
    assert translate(LINES[0], forced_bos_token_id=forced)[0]["translation_text"].startswith("j")
    assert not translate(LINES[0])[0]["translation_text"].startswith("j")


def test_a_model_in_training_mode_translates_without_dropout(translate):
    expected = translate(LINES)
    translate.model.train()
    assert translate(LINES) == expected
    assert translate.model.training


def test_an_unknown_argument_is_named_with_its_neighbour(translate):
    with pytest.raises(TypeError, match=r"`num_beam`.*`num_beams`"):
        translate("ja", num_beam=2)
    with pytest.raises(TypeError, match=r"`pass_through`.*`passthrough`"):
        VaswaniTranslationPipeline(model=translate.model, tokenizer=translate.tokenizer, pass_through=True)
    with pytest.raises(TypeError, match=r"`xyzzy`.*batch_size, .*split_sentences"):
        translate("ja", xyzzy=2)


@pytest.mark.parametrize(
    "bad",
    [
        {"lines": "wrap"},
        {"long_input": "cut"},
        {"batch_tokens": 0},
        {"batch_size": 0},
        {"window": 0},
        {"tgt_lang": "en"},
    ],
)
def test_impossible_options_are_refused(translate, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        translate(["ja"], **bad)
    with pytest.raises(TypeError, match="positional"):
        translate("ja", "nein")


# ---------------------------------------------------------------------- construction and saving
def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"up to 258, .* 200 pieces"):
        VaswaniTranslationPipeline(model=marian(rows=200), tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="needs a tokenizer"):
        VaswaniTranslationPipeline(model=marian())


def test_a_model_that_cannot_translate_is_refused():
    config = transformers.GPT2Config(vocab_size=270, n_embd=8, n_layer=1, n_head=1)
    with pytest.raises(TypeError, match="GPT2LMHeadModel"):
        VaswaniTranslationPipeline(model=transformers.GPT2LMHeadModel(config), tokenizer=byte_tokenizer())


def test_a_saved_pipeline_translates_the_same(translate, tmp_path):
    expected = translate(LINES)
    translate.save_pretrained(tmp_path)
    again = pipeline("translation", model=str(tmp_path))
    assert isinstance(again, VaswaniTranslationPipeline)
    assert again(LINES) == expected
    assert (tmp_path / "pipeline_vaswani.py").exists()
    assert pipeline("translation", model=str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16
    assert pipeline("translation", model=str(tmp_path), device="cpu").device.type == "cpu"


def test_a_folder_works_where_the_package_is_missing(translate, tmp_path):
    translate.save_pretrained(tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    expected = translate(LINES[0])
    code = (
        "import sys; sys.modules['hf_vaswani'] = None\n"
        "from transformers import pipeline\n"
        f"pipe = pipeline('translation', model={str(tmp_path / 'model')!r}, trust_remote_code=True)\n"
        f"assert pipe({LINES[0]!r}) == {expected!r}, pipe({LINES[0]!r})\n"
        "assert type(pipe).__module__.startswith('transformers_modules')\n"
        f"pipe.save_pretrained({str(tmp_path / 'again')!r})\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert pipeline("translation", model=str(tmp_path / "again"))(LINES[0]) == expected


# ---------------------------------------------------------------------- the task, for every seq2seq model
@pytest.mark.parametrize("make", [marian, bart, t5])
@pytest.mark.parametrize("task", ["translation", "translation_en_to_de"])
def test_any_seq2seq_model_translates(make, task, tmp_path):
    model, tokenizer = make(), byte_tokenizer()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # small random weights hardly heed their source
            weight.mul_(1.0 if weight.dim() == 1 or "embed_positions" in name else 60.0)
    model.generation_config.update(max_new_tokens=8, suppress_tokens=[0, 1, 2, *range(97, 270)])
    pipe = pipeline(task, model=model, tokenizer=tokenizer)
    lines = ["A man sleeps.", "Two dogs", "Who is there? Me!"]
    expected = [by_hand(pipe, line) for line in lines]
    assert len(set(expected)) == len(lines)
    assert texts_of(pipe(lines, batch_size=2)) == expected
    pipe.save_pretrained(tmp_path)
    again = pipeline(task, model=str(tmp_path))  # a plain folder of the library: no trust needed
    assert type(again.model) is type(model)
    assert texts_of(again(lines)) == expected


def test_registering_twice_changes_nothing():
    before = dict(pipelines.PIPELINE_REGISTRY.supported_tasks)
    check = pipelines.PIPELINE_REGISTRY.check_task
    register_translation_task()
    assert before == pipelines.PIPELINE_REGISTRY.supported_tasks
    assert pipelines.PIPELINE_REGISTRY.check_task is check
    task, found, direction = pipelines.check_task("translation_en_to_de")
    assert (task, found["impl"], direction) == ("translation", VaswaniTranslationPipeline, ("en", "de"))


def test_registering_leaves_other_tasks_and_another_pipeline_alone(monkeypatch):
    tasks = pipelines.PIPELINE_REGISTRY.supported_tasks
    monkeypatch.setitem(tasks, "translation", {"impl": object, "pt": ()})
    monkeypatch.delattr(pipelines, "REMOVED_TASKS")
    register_translation_task()
    assert tasks["translation"]["impl"] is object
    monkeypatch.undo()
    with pytest.raises(KeyError, match="has been removed"):
        pipelines.check_task("summarization")
    with pytest.raises(KeyError, match="Unknown task"):
        pipelines.check_task("translation_en")


def test_importing_the_file_alone_registers_nothing():
    code = (
        "import sys, types, transformers.pipelines as p\n"
        "alone = sys.modules['alone'] = types.ModuleType('alone')\n"  # as the files travel: siblings, not this package
        f"alone.__path__ = [{os.path.dirname(inspect.getsourcefile(register_translation_task))!r}]\n"
        "import alone.pipeline_vaswani\n"
        "assert 'hf_vaswani' not in sys.modules\n"
        "assert 'translation' in p.REMOVED_TASKS and 'translation' not in p.PIPELINE_REGISTRY.supported_tasks\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_t5_gets_the_prefix_and_settings_of_its_task():
    specific = {
        "translation_en_to_de": {"prefix": "translate English to German: ", "num_beams": 2, "max_length": 30},
        "translation_en_to_fr": {"prefix": "translate English to French: "},
    }
    model = t5(task_specific_params=specific)
    pipe = pipeline("translation_en_to_de", model=model, tokenizer=byte_tokenizer())
    pipe.model.generate = said = Shouting(pipe.tokenizer)
    pipe("a dog")
    pipe("a dog", num_beams=3, max_new_tokens=5)
    pipe("a dog", src_lang="en", tgt_lang="fr")
    pipe("a dog", prefix="")
    assert [text.partition("a dog")[0] for text in said.seen] == [
        "translate English to German: ",
        "translate English to German: ",
        "translate English to French: ",
        "",
    ]
    assert (said.kwargs[0]["num_beams"], said.kwargs[0]["max_length"]) == (2, 30)
    assert (said.kwargs[1]["num_beams"], said.kwargs[1].get("max_length")) == (3, None)
    assert "num_beams" not in said.kwargs[2]
    assert texts_of(pipe("5", passthrough=True)) == ["5"]


@pytest.fixture
def many_languages():
    letters = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz\u2581"]
    return transformers.NllbTokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])


def test_languages_are_set_per_call_and_by_the_task(many_languages):
    pipe = pipeline("translation_eng_Latn_to_deu_Latn", model=marian(), tokenizer=many_languages)
    code = many_languages.convert_tokens_to_ids
    seen = []
    pipe.model.generate = lambda input_ids, **kwargs: seen.append((input_ids[0, 0].item(), kwargs)) or input_ids
    pipe("a dog")
    pipe("un chien", src_lang="fra_Latn", tgt_lang="eng_Latn")
    pipe("a dog", forced_bos_token_id=17)
    pipe("a dog", tgt_lang="fra_Latn")
    assert [(first, kwargs["forced_bos_token_id"]) for first, kwargs in seen] == [
        (code("eng_Latn"), code("deu_Latn")),
        (code("fra_Latn"), code("eng_Latn")),
        (code("eng_Latn"), 17),
        (code("eng_Latn"), code("fra_Latn")),
    ]
    assert many_languages.src_lang == "eng_Latn"
    assert texts_of(pipe("a dog")) == ["a dog"]  # the code in front is no text
    with pytest.raises(ValueError, match=r"no language 'deu'.*deu_Latn"):
        pipe("a dog", tgt_lang="deu")
    with pytest.raises(ValueError, match="no language 'xx'"):
        pipe("a dog", src_lang="xx")


def test_the_first_generated_token_is_the_target_language(many_languages):
    pipe = pipeline("translation", model=marian(), tokenizer=many_languages, num_beams=2, max_new_tokens=4)
    rows = []
    generate = pipe.model.generate
    pipe.model.generate = lambda **kwargs: rows.append(generate(**kwargs)) or rows[-1]
    pipe(["a dog", "two dogs"], src_lang="eng_Latn", tgt_lang="fra_Latn")
    assert rows[0][:, 1].tolist() == [many_languages.convert_tokens_to_ids("fra_Latn")] * 2


# ---------------------------------------------------------------------- evaluate, progress
def test_the_evaluator_of_evaluate_takes_the_pipeline(shout):
    pytest.importorskip("scipy", reason="the evaluators of `evaluate` need scipy")
    import datasets
    import evaluate

    class Exact(evaluate.Metric):
        def _info(self):
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description="",
                citation="",
                inputs_description="",
                features=datasets.Features({"predictions": text, "references": text}),
            )

        def _compute(self, predictions, references):
            return {"exact": sum(a == b for a, b in zip(predictions, references, strict=True)) / len(references)}

    lines = ["ein hund", "ja " * 30, "nein", ""]
    table = datasets.Dataset.from_dict({"de": lines, "en": ["EIN HUND", "JA " * 30, "falsch", ""]})
    evaluator = evaluate.evaluator("translation")
    settings = {"data": table, "metric": Exact(), "input_column": "de", "label_column": "en"}
    found = evaluator.compute(model_or_pipeline=shout, **settings)
    assert found["exact"] == 0.75
    found = evaluator.compute(model_or_pipeline=shout.model, tokenizer=shout.tokenizer, **settings)
    assert found["exact"] == 0.75


def test_progress_goes_to_standard_error_when_asked_for(shout, capsys):
    shout(["ja"] * 3, progress=True)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""
    shout(["ja"] * 3)  # no terminal here
    shout(["ja"] * 3, progress=False)
    shout("ja", progress=True)  # one text needs no bar
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("is_terminal", "is_wanted"), [(True, True), (True, False), (False, True)])
def test_progress_is_automatic_on_a_terminal(shout, monkeypatch, is_terminal, is_wanted):
    import hf_vaswani.pipeline_vaswani as module

    bars = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(module.library_logging, "is_progress_bar_enabled", lambda: is_wanted)
    monkeypatch.setattr(module, "tqdm", lambda **kwargs: bars.append(kwargs) or tqdm(**{**kwargs, "disable": True}))
    shout(["ja"] * 3)
    assert [bar["disable"] for bar in bars] == [not (is_terminal and is_wanted)]
    assert (bars[0]["delay"], bars[0]["total"], bars[0]["file"]) == (2, 3, sys.stderr)
