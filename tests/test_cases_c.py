"""Known faults of loss, batching and gradients, in plain torch and through Seq2SeqTrainer.

The number after "Case" is that of the fault. Held elsewhere: 9, 35 and 49 in test_modeling.py, 50 in
test_configuration.py, and in test_training.py what concerns our own loop.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vaswani import VaswaniTokenizer
from hf_vaswani.evaluation import sacrebleu_score
from hf_vaswani.loss_vaswani import label_smoothed_cross_entropy

SMOOTHING = [0.0, 0.1]
UNTIED = {"tie_word_embeddings": False}
LINES = [" ".join("abcdefgh"[(start + n) % 8] for n in range(1 + start % 5)) for start in range(8)]


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train(iter(LINES * 4), vocab_size=264)


def rows_of(tokenizer, pairs=None):
    pairs = pairs or [(line, line) for line in LINES]
    return [dict(tokenizer(src, text_target=tgt)) for src, tgt in pairs]


def make_trainer(model, tokenizer, folder, rows, collator=None, **arguments):
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3,
        lr_scheduler_type="constant", logging_steps=1, **arguments,
    )  # fmt: skip
    return Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator or DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )


def first_update(trainer):
    """Loss and norm of the gradient that a trainer logs for its first update."""
    trainer.train()
    row = trainer.state.log_history[0]
    return row["loss"], row["grad_norm"]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def padded(tokenizer, rows, extra=0, model=None):
    """A batch with `extra` more columns than it needs, on both sides; with a model, also what its decoder reads."""
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)(rows)
    fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100, "decoder_input_ids": 0}
    return {name: torch.cat([ids, torch.full((len(rows), extra), fillers[name])], 1) for name, ids in batch.items()}


# ------------------------------------------------------------------ how an update is split
@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_eight_at_once_and_four_times_two_have_one_loss_and_one_gradient_norm(
    make_model, tokenizer, tmp_path, smoothing
):
    """Cases 30 (smoothing on) and 31 (off)."""
    found = []
    for size, steps in ((8, 1), (2, 4)):
        model = make_model(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing)
        trainer = make_trainer(
            model, tokenizer, tmp_path, rows_of(tokenizer), per_device_train_batch_size=size,
            gradient_accumulation_steps=steps, max_steps=1, label_smoothing_factor=smoothing, max_grad_norm=1e9,
        )  # fmt: skip
        found.append(first_update(trainer))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][1] > 0.1


@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_in_plain_torch_a_split_batch_adds_up_to_the_gradient_of_the_whole(make_model, tokenizer, smoothing):
    """Cases 30 and 31, with nothing but the model's own loss."""
    rows = rows_of(tokenizer)
    count = sum(len(row["labels"]) for row in rows)
    found = []
    for size in (8, 2):
        model = make_model(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing)
        model.train()
        loss = 0.0
        for start in range(0, 8, size):
            part = model(**padded(tokenizer, rows[start : start + size]), num_items_in_batch=count).loss
            part.backward()
            loss += part.item()
        found.append((loss, gradient(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("smoothing", SMOOTHING)
@pytest.mark.parametrize(("size", "steps"), [(1, 2), (2, 1)])
def test_every_target_token_weighs_the_same_whatever_micro_batch_it_is_in(
    make_model, tokenizer, tmp_path, smoothing, size, steps
):
    """Case 32: 3 and 30 target tokens. The mean of the two means would weigh the short target ten times as much."""
    rows = [{"input_ids": [5, 6, 7, 1], "labels": labels} for labels in ([9, 8, 1], [*range(3, 32), 1])]
    for row in rows:
        row["attention_mask"] = [1] * 4
    model = make_model(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing)
    model.train()
    sums = []
    for row in rows:
        out = model(**{name: torch.tensor([value]) for name, value in row.items()})
        sums.append(out.loss.item() * len(row["labels"]))
    assert [len(row["labels"]) for row in rows] == [3, 30]
    expected = sum(sums) / 33
    assert abs(expected - (sums[0] / 3 + sums[1] / 30) / 2) > 1e-3
    trainer = make_trainer(
        model, tokenizer, tmp_path, rows, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
        max_steps=1, label_smoothing_factor=smoothing,
    )  # fmt: skip
    assert first_update(trainer)[0] == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------ padding
@pytest.mark.parametrize("smoothing", SMOOTHING)
@pytest.mark.parametrize("changes", [{}, UNTIED])
def test_ten_more_columns_of_padding_change_neither_loss_nor_gradient(make_model, tokenizer, smoothing, changes):
    """Case 33."""
    found = []
    for extra in (0, 10):
        model = make_model(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing, **changes)
        model.train()
        loss = model(**padded(tokenizer, rows_of(tokenizer), extra)).loss
        loss.backward()
        found.append((loss.item(), gradient(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_padding_columns_change_nothing_in_the_trainer(make_model, tokenizer, tmp_path, smoothing):
    """Case 33, where the trainer works the smoothed loss out by itself."""
    found = []
    for extra in (0, 10):
        model = make_model(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing)
        trainer = make_trainer(
            model, tokenizer, tmp_path, rows_of(tokenizer),
            collator=lambda rows, n=extra, m=model: padded(tokenizer, rows, n, m),
            per_device_train_batch_size=8, max_steps=1, label_smoothing_factor=smoothing, max_grad_norm=1e9,
        )  # fmt: skip
        found.append(first_update(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# ------------------------------------------------------------------ smoothing in the trainer
def test_the_trainers_smoothing_with_the_stock_collator_gives_our_loss(make_model, tokenizer, tmp_path):
    """Case 36: labels are taken away before the model sees them, so the collator must shift them; smoothed once."""
    model = make_model(vocab_size=len(tokenizer), dropout=0.0)
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    batch = collator(rows_of(tokenizer))
    start = model.config.decoder_start_token_id
    for ids, labels in zip(batch["decoder_input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert ids == [start, *(0 if label == -100 else label for label in labels[:-1])]
    with torch.no_grad():
        logits = model(**batch).logits
    smooth, plain = (label_smoothed_cross_entropy(logits, batch["labels"], eps).item() for eps in (0.1, 0.0))
    assert abs(smooth - plain) > 1e-2
    trainer = make_trainer(
        model, tokenizer, tmp_path, rows_of(tokenizer), per_device_train_batch_size=8, max_steps=1,
        label_smoothing_factor=0.1,
    )  # fmt: skip
    assert first_update(trainer)[0] == pytest.approx(smooth, abs=1e-5)


# ------------------------------------------------------------------ ignored labels in a metric
def test_a_metric_reads_predictions_and_labels_with_the_ignored_label(make_model, tokenizer, tmp_path):
    """Case 42: batches of unlike length are joined with -100, in predictions too."""
    seen = {}

    def metric(prediction):
        seen["predictions"], labels = prediction.predictions, prediction.label_ids
        hypotheses, references = tokenizer.batch_decode(seen["predictions"]), tokenizer.batch_decode(labels)
        assert references == texts
        return {"bleu": sacrebleu_score(hypotheses, references).score, "right": hypotheses == references}

    texts = ["a b c d e f g h " * 6 + "a", "b c", "a", "c d e f g h a"]
    model = make_model(vocab_size=len(tokenizer))
    rows = rows_of(tokenizer, [(text, text) for text in texts])
    # A search that says the source again, each batch at its own length.
    model.generate = lambda input_ids, **_: torch.cat([torch.full_like(input_ids[:, :1], 2), input_ids], dim=1)
    trainer = make_trainer(model, tokenizer, tmp_path, rows, per_device_eval_batch_size=1, predict_with_generate=True)
    trainer.compute_metrics = metric
    found = trainer.evaluate()
    assert (seen["predictions"] == -100).any()
    assert (found["eval_bleu"], found["eval_right"]) == (pytest.approx(100.0), True)


def test_a_metric_of_arrays_with_the_ignored_label_equals_that_of_the_texts(tokenizer):
    """Case 42, without a trainer."""
    ids = [tokenizer.encode(text) for text in ("a b c d e", "f g")]
    array = np.full((2, 12), -100)
    for row, one in enumerate(ids):
        array[row, : len(one)] = one
    texts = tokenizer.batch_decode(array)
    assert texts == ["a b c d e", "f g"]
    assert sacrebleu_score(texts, texts).score == pytest.approx(100.0)


# ------------------------------------------------------------------ parameters without a gradient
@pytest.mark.parametrize("changes", [{}, UNTIED, {"tie_encoder_decoder_embeddings": False}])
@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_every_parameter_has_a_gradient_after_a_step_of_the_trainer(
    make_model, tokenizer, tmp_path, changes, smoothing
):
    """Case 115, on one process."""
    model = make_model(vocab_size=len(tokenizer), label_smoothing=smoothing, **changes)
    missing = []
    trainer = make_trainer(
        model, tokenizer, tmp_path, rows_of(tokenizer), per_device_train_batch_size=8, max_steps=1,
        label_smoothing_factor=smoothing,
    )  # fmt: skip
    trainer.create_optimizer().register_step_pre_hook(
        lambda *_: missing.append([name for name, p in model.named_parameters() if p.grad is None])
    )
    trainer.train()
    assert missing == [[]]


@pytest.mark.parametrize("changes", [{}, UNTIED])
def test_a_model_with_a_frozen_encoder_still_trains(make_model, tokenizer, tmp_path, changes):
    """Case 115; with one matrix for all, freezing the encoder freezes the embeddings and the output map with it."""
    model = make_model(vocab_size=len(tokenizer), dropout=0.0, **changes)
    model.model.encoder.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(
        model, tokenizer, tmp_path, rows_of(tokenizer), per_device_train_batch_size=8, max_steps=3, learning_rate=1e-2
    )
    trainer.train()
    frozen = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert any(name.startswith("model.encoder.layers") for name in frozen)
    assert ("lm_head.weight" in dict(model.named_parameters())) is bool(changes)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]


TWO_PROCESSES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from accelerate import Accelerator
from conftest import TINY
from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
accelerator = Accelerator(cpu=True)
found = {}
for name, changes in (("tied", {}), ("untied", {"tie_word_embeddings": False})):
    for is_frozen in (False, True):
        torch.manual_seed(0)
        model = VaswaniForConditionalGeneration(VaswaniConfig(**{**TINY, **changes, "label_smoothing": 0.1}))
        if is_frozen:
            model.model.encoder.requires_grad_(False)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
        assert not wrapped.find_unused_parameters
        wrapped.train()
        columns = 4 + 3 * accelerator.process_index
        ids = torch.arange(3, 3 + 2 * columns).view(2, columns)
        without = set()
        for _ in range(2):  # an unused parameter of one step is found out in the next one
            optimizer.zero_grad()
            accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
            without |= {n for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
            optimizer.step()
        values = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        same = accelerator.gather(values.sum()[None]).tolist()
        found[f"{name} {'frozen' if is_frozen else 'whole'}"] = [sorted(without), same[0] == same[1]]
if accelerator.is_main_process:
    print(json.dumps([accelerator.num_processes, found]))
"""


def test_two_processes_find_every_parameter_used_without_searching_for_unused_ones(tmp_path):
    """Case 115: tied and untied, smoothing on; then with a frozen encoder. Both processes end with equal weights."""
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(script), str(here)], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    processes, found = json.loads(done.stdout.splitlines()[-1])
    assert processes == 2
    assert found == {name: [[], True] for name in ("tied whole", "tied frozen", "untied whole", "untied frozen")}
