"""Our own search loop beside the library's: equal results wherever both can do what is asked."""

import pytest
import torch
from transformers import EosTokenCriteria, LogitsProcessor, MaxTimeCriteria
from transformers.generation import TextStreamer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, generation_vaswani
from hf_vaswani.decoding_vaswani import FoldedDecoder


def make(vocab_size=211, seed=0, scale=1.5, **changes):
    torch.manual_seed(seed)
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 3, "d_ff": 40}
    model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=vocab_size, **{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)  # so that translations end at different lengths
    return model


def sources(model, rows=7, width=9, seed=1):
    """Sources of 3 to `width` tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, model.config.vocab_size, (rows, width), generator=generator)
    mask = (torch.arange(width) < torch.tensor([3 + n % (width - 2) for n in range(rows)])[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id), "attention_mask": mask}


@pytest.fixture
def paths(monkeypatch):
    """Counts the calls of our own loops; `paths.library()` switches them off."""

    class Paths:
        own = 0

        def library(self):
            monkeypatch.setattr(FoldedDecoder, "suits", staticmethod(lambda *args: False))

    counted = Paths()
    for name in ("beam_search", "greedy_search"):
        plain = getattr(generation_vaswani, name)

        def counting(*args, plain=plain, **kwargs):
            counted.own += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(generation_vaswani, name, counting)
    return counted


SETTINGS = [
    {},
    {"num_beams": 1},
    {"num_beams": 7, "max_new_tokens": 33},
    {"early_stopping": True},
    {"early_stopping": False, "length_penalty": 1.0, "length_penalty_type": "power"},
    {"length_penalty": -1.0},
    {"num_return_sequences": 3},
    {"max_new_tokens": 1},
    {"max_new_tokens": 1, "num_beams": 1},
    {"max_length": 6},
    {"min_new_tokens": 6},
    {"min_new_tokens": 5, "num_beams": 1},
    {"min_length": 9},
    {"forced_prefix_ids": [7, 9]},
    {"forced_prefix_ids": [7, 9], "min_new_tokens": 4, "num_beams": 1},
    {"forced_prefix_ids": [8], "no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "num_beams": 1},
    {"suppress_tokens": [5, 6]},
    {"eos_token_id": [1, 5, 6]},
    {"eos_token_id": [1, 5], "num_beams": 1},
    {"max_length_offset": 1},
]


@pytest.mark.parametrize("changes", [{}, {"norm_position": "pre", "attention_bias": True, "output_bias": True}])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_librarys_loop(paths, settings, changes):
    # 130 = 2 * 64 + 2: whole blocks and a rest; with 7 sentences many rows, with 1 few.
    for vocab_size, rows, seed in ((130, 7, 0), (601, 7, 1), (130, 1, 2), (601, 1, 3)):
        model = make(vocab_size, seed, **changes)
        batch = sources(model, rows)
        before = paths.own
        ours = model.generate(**batch, **settings)
        assert paths.own == before + 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FoldedDecoder, "suits", staticmethod(lambda *args: False))
            theirs = model.generate(**batch, **settings)
        assert paths.own == before + 1
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"sinusoid_layout": "halves", "position_offset": 2, "zero_start_embedding": True},
        {"position_encoding": "learned", "max_position_embeddings": 20, "scale_embedding": False},
        {"activation_function": "gelu", "norm_position": "pre"},
        {"d_k": 5, "d_v": 7},
        {"source_vocab_size": 97, "tie_encoder_decoder_embeddings": False},
    ],
    ids=str,
)
def test_every_kind_of_model(paths, changes):
    model = make(**changes)
    batch = sources(model)
    batch["input_ids"] = batch["input_ids"].clamp(max=96)
    ours = model.generate(**batch, max_new_tokens=12)
    assert paths.own == 1
    paths.library()
    assert torch.equal(ours, model.generate(**batch, max_new_tokens=12))


def test_biases_of_the_vocabulary_count(paths):
    model = make(output_bias=True, attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.7)
    batches = [sources(model, 9), sources(model, 1)]
    ours = [model.generate(**batch) for batch in batches]
    paths.library()
    assert all(torch.equal(one, model.generate(**batch)) for one, batch in zip(ours, batches, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_our_loop_and_differs_in_roundings_alone(paths, dtype):
    model = make(seed=4).to(dtype)
    batch = sources(model, 6)
    ours = model.generate(**batch, num_beams=3, max_new_tokens=12)
    assert paths.own == 1
    paths.library()
    theirs = model.generate(**batch, num_beams=3, max_new_tokens=12, return_dict_in_generate=True, output_scores=True)
    # Scores of our sequences, found by the model itself in float32, are as good as those of the library's.
    whole = model.float()

    def score(rows):
        labels = rows[:, 1:].masked_fill(rows[:, 1:] == model.config.pad_token_id, -100)
        logits = whole(**batch, decoder_input_ids=rows[:, :-1]).logits.log_softmax(-1)
        picked = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        return picked.sum(1) / ((5 + (labels != -100).sum(1)) / 6) ** 0.6

    with torch.no_grad():
        assert (score(ours) - score(theirs.sequences)).mean() > -0.3  # of some -16


def test_padding_on_the_left_and_rows_of_padding_alone(paths):
    model = make()
    batch = sources(model, 5)
    batch["input_ids"] = batch["input_ids"].flip(1)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    batch["attention_mask"][3] = 0
    ours = model.generate(**batch)
    assert paths.own == 1
    paths.library()
    assert torch.equal(ours, model.generate(**batch))


def test_a_batch_gives_what_each_sentence_gives_alone():
    model = make(seed=2)
    batch = sources(model, 11)
    together = model.generate(**batch)
    for n, row in enumerate(together):
        length = int(batch["attention_mask"][n].sum())
        alone = model.generate(batch["input_ids"][n : n + 1, :length])[0]
        assert torch.equal(row[: len(alone)], alone)
        assert (row[len(alone) :] == model.config.pad_token_id).all()


def test_finished_sentences_leave_the_batch(monkeypatch):
    model = make(seed=3)
    rows = []
    plain = FoldedDecoder.step
    monkeypatch.setattr(FoldedDecoder, "step", lambda self, tokens: rows.append(len(tokens)) or plain(self, tokens))
    lengths = (model.generate(**sources(model, 16), num_beams=1) != model.config.pad_token_id).sum(1) - 1
    assert len(set(lengths.tolist())) > 2
    assert rows[0] == 16
    assert rows == sorted(rows, reverse=True)
    for step, count in enumerate(rows):
        still_open = int((lengths > step).sum())
        assert still_open <= count <= max(still_open / 0.875, still_open + 1)


def test_keys_of_the_source_are_made_once(monkeypatch):
    model = make()
    calls = []
    for layer in model.model.decoder.layers:
        plain = layer.encoder_attn.k_proj.weight
        assert plain.shape == (24, 24)
    from hf_vaswani import decoding_vaswani

    plain_linear = decoding_vaswani.linear
    cross = [layer.encoder_attn.k_proj for layer in model.model.decoder.layers]
    monkeypatch.setattr(
        decoding_vaswani, "linear", lambda x, map_: calls.append((map_, len(x))) or plain_linear(x, map_)
    )
    model.generate(**sources(model, 7, width=9), max_new_tokens=8, min_new_tokens=8)
    assert [len_ for map_, len_ in calls if any(map_ is one for one in cross)] == [7 * 9, 7 * 9]  # not times the beams


class Forward(LogitsProcessor):
    """Prefers tokens that are larger than the last one, and remembers what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        smaller = torch.arange(scores.shape[1])[None] <= input_ids[:, -1:]
        return scores - 2.0 * smaller


@pytest.mark.parametrize("num_beams", [1, 3])
def test_processors_of_the_caller_see_the_librarys_rows(paths, num_beams):
    model = make()
    batch = sources(model)
    mine, other = Forward(), Forward()
    ours = model.generate(**batch, num_beams=num_beams, max_new_tokens=9, logits_processor=[mine])
    assert paths.own == 1
    paths.library()
    theirs = model.generate(**batch, num_beams=num_beams, max_new_tokens=9, logits_processor=[other])
    assert torch.equal(ours, theirs)
    assert len(mine.seen) == len(other.seen) > 1
    for own, library in zip(mine.seen, other.seen, strict=True):
        assert own.shape == library.shape
        if num_beams > 1:  # beams of nearly equal score may change places
            own, library = (one.view(len(batch["input_ids"]), -1).sort(dim=1).values for one in (own, library))
            assert torch.equal(own, library)


REQUESTS = {
    "the output object": {"return_dict_in_generate": True},
    "scores of each step": {"return_dict_in_generate": True, "output_scores": True},
    "attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "a prompt of several tokens": {"decoder_input_ids": torch.tensor([[2, 9, 11]] * 7)},
    "a clock": {"stopping_criteria": [MaxTimeCriteria(1e6)]},
    "other ends": {"stopping_criteria": [EosTokenCriteria([17])]},
}


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", list(REQUESTS))
def test_the_library_does_what_ours_cannot(paths, name, num_beams):
    model = make()
    settings = {"num_beams": num_beams, "max_new_tokens": 10, **REQUESTS[name]}
    result = model.generate(**sources(model), **settings)
    assert paths.own == 0
    if name not in ("a prompt of several tokens", "other ends"):
        found = result if isinstance(result, torch.Tensor) else result.sequences
        assert torch.equal(found, model.generate(**sources(model), num_beams=num_beams, max_new_tokens=10))
        assert paths.own == 1


def test_scores_of_whole_translations_come_from_either_loop(paths):
    model = make()
    settings = {"num_return_sequences": 2, "num_beams": 3, "output_sequence_scores": True}
    ours = model.generate(**sources(model), **settings)
    assert paths.own == 1
    paths.library()
    theirs = model.generate(**sources(model), **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    assert theirs.scores is None
    steps = model.generate(**sources(model), **settings, return_dict_in_generate=True, output_scores=True)
    assert len(steps.scores) >= steps.beam_indices.shape[1]
    torch.testing.assert_close(steps.sequences_scores, theirs.sequences_scores)
    transitions = model.compute_transition_scores(steps.sequences, steps.scores, steps.beam_indices).sum(1)
    lengths = (ours.beam_indices >= 0).sum(1)
    torch.testing.assert_close(transitions / ((5 + lengths) / 6) ** 0.6, ours.sequences_scores, atol=1e-5, rtol=1e-5)


def test_sampling_and_streaming_are_the_librarys(paths):
    model = make()
    torch.manual_seed(0)
    model.generate(**sources(model), num_beams=1, do_sample=True, max_new_tokens=5)
    model.generate(**sources(model), num_beams=3, do_sample=True, max_new_tokens=5)

    class Silent(TextStreamer):
        def __init__(self):
            self.count = 0

        def put(self, value):
            self.count += 1

        def end(self):
            pass

    streamer = Silent()
    model.generate(**sources(model, 1), num_beams=1, max_new_tokens=5, min_new_tokens=5, streamer=streamer)
    assert streamer.count == 6
    assert paths.own == 0


class Doubled(torch.nn.Linear):
    """A map that someone put in, as adapters do."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["hook", "other map", "other forward", "training", "autocast"])
def test_a_model_that_was_changed_is_run_by_its_modules(paths, kind):
    model = make()
    plain = model.generate(**sources(model), max_new_tokens=12)
    assert paths.own == 1
    block = model.model.decoder.layers[0].feed_forward
    if kind == "hook":
        block.fc1.register_forward_hook(lambda module, args, output: -output)
    elif kind == "other map":
        other = Doubled(24, 40)
        other.load_state_dict(block.fc1.state_dict())
        block.fc1 = other
    elif kind == "other forward":
        block.forward = lambda x: -x
    elif kind == "training":
        model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        changed = model.generate(**sources(model), max_new_tokens=12)
    assert paths.own == 1
    if kind != "autocast":
        assert changed.shape != plain.shape or not torch.equal(changed, plain)


def test_hooks_by_which_the_library_records_do_not_count(paths):
    model = make()
    recorded = model.generate(**sources(model), return_dict_in_generate=True, output_attentions=True)
    assert recorded.cross_attentions
    assert paths.own == 0
    assert torch.equal(model.generate(**sources(model)), recorded.sequences)
    assert paths.own == 1


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("rows", [1, 9])
def test_scores_that_are_no_numbers_end_the_search(paths, num_beams, rows):
    model = make()
    with torch.no_grad():
        model.model.decoder.layers[1].feed_forward.fc2.bias[3] = float("nan")
    with pytest.raises(FloatingPointError, match="not numbers at step 1"):
        model.generate(**sources(model, rows), num_beams=num_beams)
    assert paths.own == 1


def test_more_beams_than_the_vocabulary_has_room_for_are_the_librarys(paths):
    model = make(vocab_size=11)
    model.generate(**sources(model), num_beams=5, max_new_tokens=4)
    assert paths.own == 0
