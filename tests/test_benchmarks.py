"""The benchmarks compare equal things, take turns, and print the figures that they promise; nothing here is timed."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODEL = Path(__file__).parents[1] / "checkpoints" / "tatoeba-de-en"


@pytest.fixture(autouse=True)
def _scripts_in_path(monkeypatch):
    from transformers.utils import logging

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("measuring", "peers", "decode", "corpus", "decode_scaling"):
        sys.modules.pop(name, None)
    logging.disable_progress_bar()


def script(name):
    return importlib.import_module(name)


def run_script(capsys, name, *arguments):
    """Figures of one script, and what it wrote to standard error."""
    assert script(name).main([*arguments, "--quick", "--threads", "1"]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 1
    return json.loads(told.out), told.err


# --------------------------------------------------------------------------- measuring
def fill_in_two_stages(megabytes, factor):
    """For `in_child`: memory before the yield does not count."""
    kept = torch.ones(40 * 2**18)
    yield
    made = torch.ones(megabytes * 2**18)
    return float(made[0]) * factor * len(kept)


def fail_after_its_yield():
    yield
    raise KeyError("the reason")


def yield_twice():
    yield
    yield


def test_systems_take_turns_and_medians_are_of_the_timed_rounds(monkeypatch):
    measuring = script("measuring")
    clock, calls = [0.0], []
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])

    def system(name, durations):
        left = iter(durations)

        def run():
            calls.append(name)
            clock[0] += next(left)
            return f"{name}{len(calls)}"

        return run

    systems = {"a": system("a", [50.0, 1.0, 4.0, 2.0]), "b": system("b", [70.0, 3.0, 20.0, 10.0])}
    timings = measuring.alternate(systems, repeats=3, warmups=1, between=lambda: calls.append("-"))
    assert calls == ["-", "a", "-", "b"] * 4
    assert timings["a"].seconds == pytest.approx([1.0, 4.0, 2.0])
    assert (timings["a"].median, timings["b"].median) == pytest.approx((2.0, 10.0))
    assert timings["a"].result == "a14"
    assert timings["b"].result == "b16"


def test_a_ratio_is_of_medians_and_its_range_of_rounds():
    measuring = script("measuring")
    timings = {
        "ours": measuring.Timing([1.0, 4.0, 2.0], 2.0, None),
        "theirs": measuring.Timing([3.0, 4.0, 10.0], 4.0, None),
    }
    assert measuring.ratio(timings, "ours", "theirs") == {"median": 2.0, "lowest": 1.0, "highest": 5.0}


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="`repeats` must be at least 1"):
        script("measuring").alternate({"a": int}, repeats=0)


def test_a_child_is_measured_from_its_yield_on():
    measuring = script("measuring")
    child = measuring.in_child(fill_in_two_stages, 96, 2)
    assert child.result == 2.0 * 40 * 2**18
    assert 90 < child.peak_mib < 125
    assert child.before_mib > 40
    assert child.seconds > 0
    assert measuring.peak_memory(fill_in_two_stages, 8, 2) < 30


@pytest.mark.parametrize(
    ("function", "reason"), [(fail_after_its_yield, "the reason"), (yield_twice, "more than once")]
)
def test_a_child_that_fails_says_why(function, reason):
    with pytest.raises(RuntimeError, match=reason):
        script("measuring").in_child(function)


def test_a_command_is_measured_by_itself(tmp_path):
    measuring = script("measuring")
    weight = torch.ones(300 * 2**18)  # of this process, so not of the command
    command = [sys.executable, "-S", "-c", "import os; print(os.environ['MARK'])"]
    done = measuring.run_command(command, tmp_path, {"MARK": "seen"})
    assert done.output == b"seen\n"
    assert 1 < done.peak_mib < 100 < weight.nbytes / 2**20
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3.*the reason"):
        measuring.run_command(
            [sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); exit(3)"], tmp_path
        )


def test_a_table_has_every_column_and_figures_are_one_line(capsys, tmp_path):
    measuring = script("measuring")
    measuring.report("Title", [{"name": "a", "n": 12345}, {"name": "bb", "part": 0.123456}])
    measuring.emit({"x": [1, 2]}, tmp_path / "figures.json")
    told = capsys.readouterr()
    assert told.err.splitlines()[1:] == [
        "Title",
        "name       n    part",
        "----  ------  ------",
        "a     12,345       -",
        "bb         -  0.1235",
    ]
    assert told.out == '{"x": [1, 2]}\n' == (tmp_path / "figures.json").read_text()


def test_the_machine_is_described():
    told = script("measuring").machine()
    assert told["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "hf_vaswani"} <= set(told["versions"])
    assert told["threads"] == torch.get_num_threads()
    assert told["cpu"]
    assert told["cores"] >= 1


# --------------------------------------------------------------------------- peers
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sinusoid_layout": "interleaved", "layer_norm_eps": 1e-3},
        {"sinusoid_layout": "interleaved", "attention_bias": True, "output_bias": True},
        {"tie_word_embeddings": False, "attention_bias": True},
    ],
    ids=["halves", "interleaved", "interleaved-biases", "untied"],
)
def test_marian_computes_the_same_logits(changes):
    peers = script("peers")
    model = peers.random_model(peers.quick_config(**changes))
    marian = peers.marian_of(model)
    source = peers.random_sources(model.config, 3, 9)
    mask = torch.ones_like(source)
    source[1, 5:], mask[1, 5:] = model.config.pad_token_id, 0
    target = peers.random_sources(model.config, 3, 7, seed=5)
    with torch.no_grad():
        ours, theirs = (one(source, attention_mask=mask, decoder_input_ids=target).logits for one in (model, marian))
    assert ours.std() > 1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert marian.training is False
    assert peers.marian_of(model.train()).training is True


def test_marian_keeps_the_precision_of_ours():
    peers = script("peers")
    model = peers.random_model(peers.quick_config()).bfloat16()
    assert {one.dtype for one in peers.marian_of(model).parameters()} == {torch.bfloat16}


def test_base_is_the_papers():
    config = script("peers").base_config(vocab_size=100)
    shape = (config.d_model, config.d_ff, config.encoder_layers, config.decoder_layers, config.num_attention_heads)
    assert shape == (512, 2048, 6, 6, 8)
    assert (config.vocab_size, config.norm_position) == (100, "post")


def test_random_models_translate_unlike_sentences_unlike():
    peers = script("peers")
    model = peers.random_model(peers.quick_config())
    sources = peers.random_sources(model.config, 6, 9)
    assert int(sources.min()) > 2
    rows = peers.translate(model, sources, 4, peers.fixed_search(model.config, 3, 11))
    assert [len(row) for row in rows] == [11] * 6
    assert len(set(map(tuple, rows))) == 6
    assert len({token for row in rows for token in row}) > 12
    again = peers.translate(peers.random_model(model.config), sources, 4, peers.fixed_search(model.config, 3, 11))
    assert again == rows


@pytest.mark.parametrize("beams", [1, 4])
def test_all_systems_find_the_same_translations(beams, tmp_path):
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    peers = script("peers")
    model = peers.random_model(peers.quick_config(sinusoid_layout="interleaved", output_bias=True))
    sources = peers.random_sources(model.config, 5, 8)
    settings = peers.fixed_search(model.config, beams, 10)
    rows = peers.translate(model, sources, 5, settings)
    assert peers.translate(peers.marian_of(model), sources, 2, settings) == rows
    translator = peers.ctranslate2_of(model, tmp_path / "out", "float32", threads=1)
    assert translator.compute_type == "float32"
    found = peers.ctranslate2_search(translator, peers.pieces_of(sources.tolist()), 5, beams, 10)
    assert peers.ids_of(found) == rows


def test_a_missing_ctranslate2_is_said(tmp_path, monkeypatch):
    peers = script("peers")
    monkeypatch.setattr(peers, "has_ctranslate2", lambda: False)
    with pytest.raises(ImportError, match="pip install ctranslate2"):
        peers.ctranslate2_of(peers.random_model(peers.quick_config()), tmp_path)


# --------------------------------------------------------------------------- scripts
def test_decode_prints_all_systems(capsys, tmp_path):
    arguments = ["--repeats", "1", "--memory", "--json", str(tmp_path / "out")]
    figures, table = run_script(capsys, "decode", *arguments)
    assert figures == json.loads((tmp_path / "out").read_text())
    assert {"ours float32", "ours bfloat16", "MarianMT float32"} <= set(figures["systems"])
    for name, one in figures["systems"].items():
        assert one["tokens_per_s"] > 0
        assert one["peak_mib_beyond_weights"] > 0
        assert name in table
    assert figures["equal"]["ours float32 = MarianMT float32"] == figures["settings"]["sentences"] == 3
    if script("peers").has_ctranslate2():
        assert figures["equal"]["ours float32 = CTranslate2 float32"] == 3
        assert set(figures["ratios"]["ours bfloat16 / CTranslate2 int8"]) == {"median", "lowest", "highest"}
    assert "aten::" not in table


@pytest.mark.slow
def test_decode_does_without_ctranslate2_one_by_one_and_profiled(capsys, monkeypatch):
    monkeypatch.setattr(script("peers"), "has_ctranslate2", lambda: False)
    arguments = ["--repeats", "2", "--batch", "1", "--biases", "--beams", "2", "--profile"]
    figures, table = run_script(capsys, "decode", *arguments)
    assert set(figures["systems"]) == {"ours float32", "ours bfloat16", "MarianMT float32"}
    assert all(len(one["seconds"]) == 2 for one in figures["systems"].values())
    assert not any("peak_mib_beyond_weights" in one for one in figures["systems"].values())
    assert figures["equal"]["ours float32 = MarianMT float32"] == 3
    told = {name: figures["settings"][name] for name in ("batch", "beams", "biases")}
    assert told == {"batch": 1, "beams": 2, "biases": True}
    assert "CTranslate2 is not installed and was left out" in table
    assert "aten::" in table


@pytest.mark.slow
def test_corpus_compares_whole_commands_line_by_line(capsys, tmp_path):
    lines = ["Zwei Männer stehen am Herd und kochen.", "Ein Hund läuft.", "Wo ist der Bahnhof, bitte?"]
    (tmp_path / "test.de").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    arguments = ["--file", str(tmp_path / "test.de"), "--model", str(MODEL), "--repeats", "1", "--also"]
    figures, table = run_script(capsys, "corpus", *arguments)
    assert list(figures["systems"]) == ["hf-vaswani translate", "MarianMT, plain loop"]
    assert figures["equal"] == {"hf-vaswani translate": 3}
    for one in figures["systems"].values():
        assert one["peak_mib"] > 100
        assert one["lines_per_s"] > 0
        assert one["tokens_per_s"] > one["lines_per_s"]
    assert "median" in figures["ratios"]["hf-vaswani translate / MarianMT, plain loop"]
    assert "equal lines" in table


def test_corpus_names_a_missing_file(capsys):
    with pytest.raises(SystemExit, match="name a text to translate with --file"):
        run_script(capsys, "corpus", "--file", "nowhere.de")


def test_decode_scaling_prints_and_draws_factor_by_factor(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    factors = ["batch", "beams", "vocab_size"]
    arguments = ["--repeats", "1", "--no-memory", "--plot", str(tmp_path / "out.png"), "--factors", *factors]
    figures, _ = run_script(capsys, "decode_scaling", *arguments)
    found = [(row["factor"], row["value"]) for row in figures["points"]]
    module = script("decode_scaling")
    assert found == [(name, value) for name in factors for value in module.QUICK_FACTORS[name]]
    for row in figures["points"]:
        assert row["equal"] == (row["value"] if row["factor"] == "batch" else module.QUICK_FIXED["batch"])
        assert row["ours_tokens_per_s"] > 0
        assert row["MarianMT_tokens_per_s"] > 0
        assert row["ratio"] > 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_decode_scaling_tells_memory_by_shape_and_as_measured(capsys):
    figures, table = run_script(capsys, "decode_scaling", "--repeats", "1", "--factors", "source_tokens", "new_tokens")
    assert all(row["ours_peak_mib"] > 0 and row["MarianMT_peak_mib"] > 0 for row in figures["points"])
    by_shape = {one["one more"]: one["cache_bytes_by_shape"] for one in figures["bytes_a_token"]}
    assert by_shape == {"new_token": 2 * 2 * 32 * 4, "source_token": 2 * 2 * 32 * 4}
    assert "Memory of one more token" in table


def test_cache_bytes_are_those_of_a_real_cache():
    module, peers = script("decode_scaling"), script("peers")
    model = peers.random_model(peers.quick_config(decoder_layers=3, d_k=5, d_v=7))
    source = peers.random_sources(model.config, 2, 9)
    cache = model(source, attention_mask=torch.ones_like(source), decoder_input_ids=source[:, :4], use_cache=True).cache
    new, cross = (
        sum(layer.keys.nbytes + layer.values.nbytes for layer in one.layers)
        for one in (cache.self_attention_cache, cache.cross_attention_cache)
    )
    assert module.cache_bytes(model.config) == {"new_token": new // (2 * 4), "source_token": cross // (2 * 9)}


def test_a_slope_is_that_of_the_line():
    module = script("decode_scaling")
    assert module.slope([(1, 5.0), (2, 8.0), (4, 14.0)]) == pytest.approx(3.0)
    assert module.slope([(7, 5.0)]) == 0.0
