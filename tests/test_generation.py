"""The paper's search, against loops that know nothing of it."""

import functools
import random

import pytest
import torch
from reference_search import beam_search, exhaustive
from transformers import GenerationConfig, StoppingCriteria

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.generation_vaswani import LengthPenalty, length_penalty_factor


def source_of(batch):
    return {k: batch[k] for k in ("input_ids", "attention_mask")}


def stepper(model, input_ids):
    """The model's next-token log-probabilities after any prefix, for a search written elsewhere."""
    with torch.no_grad():
        encoder_outputs = model.get_encoder()(input_ids=input_ids)

    @functools.cache
    def step(prefix):
        decoder_input_ids = torch.tensor([[model.config.decoder_start_token_id, *prefix]])
        with torch.no_grad():
            logits = model(encoder_outputs=encoder_outputs, decoder_input_ids=decoder_input_ids).logits[0, -1]
        return torch.log_softmax(logits.float(), -1).tolist()

    return step


def tokens_of(row, end=1):
    """What was generated, up to and with the end token, or up to the filling of a row without one."""
    tokens = row.tolist()[1:]
    if end in tokens:
        return tuple(tokens[: tokens.index(end) + 1])
    while tokens and tokens[-1] == 0:
        tokens.pop()
    return tuple(tokens)


def is_row_of(row, tokens):
    """Whether a returned row is the start token, these tokens, and the pad id 0 behind them."""
    return row.tolist() == [2, *tokens, *[0] * (len(row) - 1 - len(tokens))]


def sharpened(make_model, seed, **changes):
    """A random model whose distributions are far from flat, so that searches differ from one another."""
    model = make_model(seed=seed, **changes)
    with torch.no_grad():
        model.model.shared.weight *= 3.0
    return model


# ------------------------------------------------------------------ the length penalty
def test_the_two_penalties_choose_the_two_hypotheses_of_the_known_example():
    short, long = (-3.0, 4), (-3.6, 6)
    gnmt = [total / length_penalty_factor(n, 0.6, "gnmt") for total, n in (short, long)]
    power = [total / length_penalty_factor(n, 0.6, "power") for total, n in (short, long)]
    assert gnmt == pytest.approx([-2.352, -2.502], abs=1e-3)
    assert power == pytest.approx([-1.306, -1.229], abs=1e-3)


class TwoEndings(VaswaniForConditionalGeneration):
    """Scores set by hand: "3 3 3 end" has log P = -3.0 at length 4, "4 4 4 4 4 end" -3.6 at length 6."""

    def forward(self, decoder_input_ids=None, encoder_outputs=None, **kwargs):
        rows = []
        for row in decoder_input_ids.tolist():
            prefix, scores = tuple(row[1:]), torch.full((self.config.vocab_size,), -50.0)
            if prefix == ():
                scores[3], scores[4] = -3.0, -3.6
            elif set(prefix) == {3}:
                scores[3 if len(prefix) < 3 else 1] = 0.0
            elif set(prefix) == {4}:
                scores[4 if len(prefix) < 5 else 1] = 0.0
            rows.append(scores)
        logits = torch.stack(rows)[:, None]
        # The rest of the mass goes to one token, so that log_softmax leaves the scores as they are.
        rest = 1.0 - logits.exp().sum(-1)
        logits[:, :, 7] = torch.where(rest > 1e-6, rest.clamp(min=1e-30).log(), logits[:, :, 7])
        from transformers.modeling_outputs import Seq2SeqLMOutput

        return Seq2SeqLMOutput(logits=logits)


@pytest.mark.parametrize(("kind", "winner"), [("gnmt", (3, 3, 3, 1)), ("power", (4, 4, 4, 4, 4, 1))])
def test_generate_picks_the_shorter_under_gnmt_and_the_longer_under_power(tiny_config, kind, winner):
    model = TwoEndings(tiny_config).eval()
    out = model.generate(
        input_ids=torch.tensor([[5, 6, 1]]), use_cache=False, length_penalty_type=kind, max_new_tokens=6,
        bad_words_ids=[[7]], return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert tokens_of(out.sequences[0]) == winner
    expected = {"gnmt": -2.352, "power": -1.229}[kind]
    assert out.sequences_scores[0].item() == pytest.approx(expected, abs=2e-3)


def test_the_penalty_number_keeps_its_own_power():
    penalty = LengthPenalty(0.6)
    assert 7**penalty == pytest.approx(2.0**0.6)
    assert 7 ** LengthPenalty(0.6, "power") == pytest.approx(7**0.6)
    assert penalty > 0.0


# ------------------------------------------------------------------ against other searches
@pytest.mark.parametrize("kind", ["gnmt", "power"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5, -0.5])
def test_a_wide_beam_equals_exhaustive_search(make_model, kind, alpha):
    vocab, limit = 5, 4
    for seed in range(3):
        model = sharpened(make_model, seed, vocab_size=vocab)
        input_ids = torch.tensor([[3, 4, 3, 1]])
        expected = exhaustive(stepper(model, input_ids), vocab, 1, limit, alpha, kind)
        out = model.generate(
            input_ids=input_ids, num_beams=300, num_return_sequences=5, length_penalty=alpha,
            length_penalty_type=kind, max_new_tokens=limit, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for row, score, (best_score, best) in zip(out.sequences, out.sequences_scores, expected, strict=False):
            assert is_row_of(row, best)
            assert score.item() == pytest.approx(best_score, abs=1e-5)


def test_search_equals_a_stand_alone_reference_on_many_cases(make_model):
    """240 cases: 60 models, four settings each, with early end on our side and none in the reference."""
    unlike_power = 0
    for seed in range(60):
        rng = random.Random(seed)
        vocab = rng.choice([6, 9, 13])
        model = sharpened(make_model, seed, vocab_size=vocab, encoder_layers=1, decoder_layers=1)
        input_ids = torch.tensor([[*(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 6))), 1]])
        step = stepper(model, input_ids)
        for alpha, kind, beams in ((0.6, "gnmt", 4), (0.6, "power", 4), (1.3, "gnmt", 2), (-0.4, "gnmt", 3)):
            limit = rng.choice([6, 9])
            expected = beam_search(step, vocab, 1, limit, alpha, kind, beams)
            out = model.generate(
                input_ids=input_ids, num_beams=beams, num_return_sequences=2, length_penalty=alpha,
                length_penalty_type=kind, max_new_tokens=limit, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            for rank in range(2):
                assert is_row_of(out.sequences[rank], expected[rank][1]), (seed, alpha, kind)
                assert out.sequences_scores[rank].item() == pytest.approx(expected[rank][0], abs=1e-5)
            if kind == "gnmt" and alpha == 0.6:
                unlike_power += beam_search(step, vocab, 1, limit, alpha, "power", beams)[0][1] != expected[0][1]
    assert unlike_power > 0  # the two penalties are told apart by these cases


def test_the_default_call_is_the_papers_search(make_model):
    model = sharpened(make_model, 2, vocab_size=11)
    input_ids = torch.tensor([[3, 7, 9, 1]])
    out = model.generate(input_ids=input_ids, return_dict_in_generate=True, output_scores=True)
    expected = beam_search(stepper(model, input_ids), 11, 1, 4 + 50, 0.6, "gnmt", 4)
    assert is_row_of(out.sequences[0], expected[0][1])
    assert out.sequences_scores[0].item() == pytest.approx(expected[0][0], abs=1e-5)


# ------------------------------------------------------------------ independence
def test_a_sentence_and_its_score_do_not_depend_on_its_neighbours(make_model, batch):
    for seed in range(4):
        model = sharpened(make_model, seed)
        options = {"num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
        together = model.generate(**source_of(batch), **options)
        for row in range(3):
            length = int(batch["attention_mask"][row].sum())
            alone = model.generate(input_ids=batch["input_ids"][row : row + 1, :length], **options)
            for n in range(3):
                assert tokens_of(together.sequences[3 * row + n]) == tokens_of(alone.sequences[n])
            torch.testing.assert_close(
                together.sequences_scores[3 * row : 3 * row + 3], alone.sequences_scores, atol=1e-5, rtol=0
            )


def test_more_hypotheses_never_change_the_best_one_and_fall_in_score(make_model, batch):
    for seed in range(3):
        model = sharpened(make_model, seed)
        best = model.generate(**source_of(batch))
        for count in (2, 3, 4):
            out = model.generate(
                **source_of(batch), num_return_sequences=count, return_dict_in_generate=True, output_scores=True
            )
            for row in range(3):
                assert tokens_of(out.sequences[count * row]) == tokens_of(best[row])
                scores = out.sequences_scores[count * row : count * (row + 1)]
                assert (scores[:-1] >= scores[1:]).all()
                texts = {tokens_of(one) for one in out.sequences[count * row : count * (row + 1)]}
                assert len(texts) == count


def test_caches_do_not_change_the_result(make_model, batch):
    model = sharpened(make_model, 3)
    plain = model.generate(**source_of(batch))
    assert torch.equal(model.generate(**source_of(batch), use_cache=False), plain)
    assert torch.equal(model.generate(**source_of(batch), cache_implementation="static"), plain)
    assert torch.equal(
        model.generate(**source_of(batch), num_beams=1, use_cache=False, max_new_tokens=30),
        model.generate(**source_of(batch), num_beams=1, max_new_tokens=30),
    )


def test_a_full_graph_compiled_forward_searches_with_a_static_cache(make_model, batch):
    model = sharpened(make_model, 3)
    plain = model.generate(**source_of(batch), max_new_tokens=6)
    graphs = []
    model.forward = torch.compile(model.forward, fullgraph=True, backend=lambda graph, _: graphs.append(1) or graph)
    compiled = model.generate(**source_of(batch), max_new_tokens=6, cache_implementation="static")
    assert torch.equal(compiled, plain)
    assert len(graphs) < 6  # not one for each step


def test_search_stops_as_soon_as_nothing_can_win(make_model, batch):
    """The model is asked for fewer steps than the limit, and no fewer than the winner has tokens."""
    saved = 0
    for seed in range(6):
        model = sharpened(make_model, seed, vocab_size=8)
        steps = []
        hook = model.lm_head.register_forward_hook(lambda *_, steps=steps: steps.append(1))
        out = model.generate(input_ids=batch["input_ids"][:1] % 5 + 3)
        hook.remove()
        assert len(steps) >= len(tokens_of(out[0]))
        saved += len(steps) < 57
    assert saved > 0


# ------------------------------------------------------------------ lengths
class NeverEnds(VaswaniForConditionalGeneration):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits[..., 1] = -1e4
        return out


@pytest.mark.parametrize("beams", [1, 4])
def test_the_limit_is_source_length_plus_fifty_for_each_sentence(tiny_config, batch, beams):
    torch.manual_seed(0)
    model = NeverEnds(tiny_config).eval()
    model.generation_config.pad_token_id = 0
    out = model.generate(**source_of(batch), num_beams=beams, suppress_tokens=[0])
    assert [int((row[1:] != 0).sum()) for row in out] == [57, 54, 52]


def test_the_limit_counts_beyond_a_given_decoder_prefix(tiny_config):
    torch.manual_seed(0)
    model = NeverEnds(tiny_config).eval()
    out = model.generate(
        input_ids=torch.tensor([[5, 6, 1]]), decoder_input_ids=torch.tensor([[2, 9, 9]]), suppress_tokens=[0]
    )
    assert out.shape == (1, 3 + 53)
    assert out[0, :3].tolist() == [2, 9, 9]


def test_a_given_length_wins_over_the_default_limit(tiny_config, batch):
    torch.manual_seed(0)
    model = NeverEnds(tiny_config).eval()
    source = source_of(batch)
    assert model.generate(**source, max_new_tokens=6).shape[1] == 7
    assert model.generate(**source, max_length=6).shape[1] == 6
    assert model.generate(**source, generation_config=GenerationConfig(max_new_tokens=9)).shape[1] == 10
    assert model.generate(**source, max_length_offset=3).shape[1] == 1 + 7 + 3
    given = GenerationConfig(num_beams=2)
    assert model.generate(**source, generation_config=given).shape[1] == 58
    assert given.max_new_tokens is None
    model.generation_config.max_new_tokens = 4
    assert model.generate(**source).shape[1] == 5
    model.generation_config.max_new_tokens = None
    # What Seq2SeqTrainer leaves behind after its first evaluation batch.
    model.generation_config.max_length = 20
    assert model.generate(**source).shape[1] == 58


def test_a_learned_table_bounds_the_default_and_refuses_more(make_model):
    model = make_model(position_encoding="learned", max_position_embeddings=12)
    source = {"input_ids": torch.tensor([[5, 6, 1]])}
    assert model.generate(**source, min_new_tokens=12).shape[1] == 13
    with pytest.raises(ValueError, match=r"20 tokens.*12 rows"):
        model.generate(**source, max_new_tokens=20)


# ------------------------------------------------------------------ what is returned
@pytest.mark.parametrize("pad", [0, 5])
def test_rows_are_filled_with_the_pad_id_behind_the_end(make_model, batch, pad):
    ended = 0
    for seed in range(6):
        model = sharpened(make_model, seed, pad_token_id=pad)
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, pad)
        out = model.generate(input_ids=ids, attention_mask=batch["attention_mask"], suppress_tokens=[pad])
        for row in out.tolist():
            if 1 in row:
                behind = row[row.index(1) + 1 :]
                ended += bool(behind)
                assert set(behind) <= {pad}
    assert ended > 0


def test_settings_survive_save_and_load_and_do_not_change_by_use(make_model, batch, tmp_path):
    model = sharpened(make_model, 4)
    before = model.generate(**source_of(batch))
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    settings = loaded.generation_config
    assert (settings.num_beams, settings.length_penalty, settings.early_stopping) == (4, 0.6, "never")
    assert (settings.length_penalty_type, settings.max_length_offset) == ("gnmt", 50)
    assert torch.equal(loaded.generate(**source_of(batch)), before)
    assert loaded.generation_config.to_dict() == settings.to_dict()
    assert type(loaded.generation_config.length_penalty) is float


def test_a_checkpoint_without_generation_settings_gets_the_papers(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generation_config.length_penalty_type == "gnmt"


def test_an_unknown_penalty_type_is_refused(make_model, batch):
    with pytest.raises(ValueError, match=r"length_penalty_type.*'bert'"):
        make_model().generate(**source_of(batch), length_penalty_type="bert")


# ------------------------------------------------------------------ forced beginnings
def test_a_forced_first_token_is_first_per_call_and_after_reload(make_model, batch, tmp_path):
    model = make_model()
    assert set(model.generate(**source_of(batch), forced_bos_token_id=17)[:, 1].tolist()) == {17}
    model.generation_config.forced_bos_token_id = 17
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert set(loaded.generate(**source_of(batch))[:, 1].tolist()) == {17}


@pytest.mark.parametrize("beams", [1, 4])
def test_a_forced_prefix_is_kept_verbatim_and_saved(make_model, batch, tmp_path, beams):
    model = make_model()
    out = model.generate(**source_of(batch), forced_prefix_ids=[17, 5, 9], num_beams=beams)
    assert out[:, 1:4].tolist() == [[17, 5, 9]] * 3
    model.generation_config.forced_prefix_ids = [17, 5, 9]
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generate(**source_of(batch), num_beams=beams)[:, 1:4].tolist() == [[17, 5, 9]] * 3
    with pytest.raises(ValueError, match=r"forced_prefix_ids.*\[40\]"):
        model.generate(**source_of(batch), forced_prefix_ids=[40])


def test_generation_values_in_the_model_config_change_nothing(make_model, batch, tmp_path):
    model = make_model()
    before = model.generate(**source_of(batch))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("{", '{"forced_bos_token_id": 9, "num_beams": 1,', 1))
    assert torch.equal(VaswaniForConditionalGeneration.from_pretrained(tmp_path).generate(**source_of(batch)), before)


# ------------------------------------------------------------------ the library's arguments
def test_the_librarys_other_arguments_still_work(make_model, batch):
    model = sharpened(make_model, 5)
    source = source_of(batch)

    class StopAtThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 4)

    assert model.generate(**source, stopping_criteria=[StopAtThree()]).shape[1] == 4
    out = model.generate(**source, num_beams=1, do_sample=True, top_k=5, num_return_sequences=2, max_new_tokens=6)
    assert out.shape[0] == 6
    out = model.generate(
        **source, num_beams=2, output_attentions=True, output_hidden_states=True, output_logits=True,
        output_scores=True, return_dict_in_generate=True, no_repeat_ngram_size=2, max_new_tokens=5,
    )  # fmt: skip
    transitions = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    lengths = (transitions < 0).sum(1)
    totals = transitions.sum(1) / torch.tensor([length_penalty_factor(int(n), 0.6) for n in lengths])
    torch.testing.assert_close(totals, out.sequences_scores, atol=1e-4, rtol=0)
    assert model.generate(**source, early_stopping=True).shape[0] == 3
    assert model.generate(**source, early_stopping=False).shape[0] == 3
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(**source, num_return_sequences=5)


def test_encoder_outputs_and_embeddings_serve_as_the_source(make_model, batch):
    model = sharpened(make_model, 6)
    source = source_of(batch)
    plain = model.generate(**source)
    encoded = model.get_encoder()(**source)
    mask = source["attention_mask"]
    assert torch.equal(model.generate(encoder_outputs=encoded, attention_mask=mask), plain)
    embeds = model.get_input_embeddings()(source["input_ids"])
    assert torch.equal(model.generate(inputs_embeds=embeds, attention_mask=mask), plain)


def test_padding_without_a_mask_is_refused_by_generate(make_model, batch):
    with pytest.raises(ValueError, match="attention_mask"):
        make_model().generate(input_ids=batch["input_ids"])


def test_scores_that_are_not_numbers_stop_the_search_with_the_step(make_model, batch):
    model = make_model()
    with torch.no_grad():
        model.model.decoder.layers[1].feed_forward.fc1.weight[0, 0] = float("nan")
    for search in ({}, {"num_beams": 1}, {"num_beams": 1, "do_sample": True}):
        with pytest.raises(FloatingPointError, match="step 1 "):
            model.generate(**source_of(batch), **search)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_generates(make_model, batch, dtype):
    out = sharpened(make_model, 7).to(dtype).generate(**source_of(batch), max_new_tokens=8)
    assert out.shape[0] == 3
