"""Seq2SeqTrainer with the stock collator, and a model that must learn."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vaswani import VaswaniTokenizer

LINES = [" ".join("abcdefgh"[(start + n) % 8] for n in range(1 + start % 5)) for start in range(16)]


class Pairs(Dataset):
    """Copying: the target is the source."""

    def __init__(self, tokenizer):
        self.rows = [dict(tokenizer(line, text_target=line)) for line in LINES]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.fixture(scope="module")
def tokenizer():
    return VaswaniTokenizer.train(iter(LINES * 4), vocab_size=264)


def make_trainer(model, tokenizer, folder, **arguments):
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3,
        learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, **arguments,
    )  # fmt: skip
    return Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=Pairs(tokenizer),
        eval_dataset=Pairs(tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_equals_one_large_batch(make_model, tokenizer, tmp_path, smoothing):
    grown = []
    for size, steps in ((8, 1), (2, 4)):
        model = make_model(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing)
        trainer = make_trainer(
            model, tokenizer, tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            max_steps=2, label_smoothing_factor=smoothing, optim="sgd",
        )  # fmt: skip
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        grown.append((losses, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert grown[0][0] == pytest.approx(grown[1][0], abs=1e-4)
    torch.testing.assert_close(grown[0][1], grown[1][1], atol=1e-6, rtol=0)
    fresh = make_model(vocab_size=len(tokenizer))
    assert not torch.allclose(grown[0][1], torch.cat([p.detach().flatten() for p in fresh.parameters()]))


def test_evaluation_while_training_uses_the_papers_limit_and_accepts_minus_100(make_model, tokenizer, tmp_path):
    model = make_model(vocab_size=len(tokenizer))
    seen = {}

    def metrics(prediction):
        seen["predictions"], seen["labels"] = prediction.predictions, prediction.label_ids
        texts = tokenizer.batch_decode(prediction.label_ids)
        assert sorted(texts) == sorted(LINES)
        tokenizer.batch_decode(prediction.predictions)
        return {"seen": len(texts)}

    trainer = make_trainer(
        model, tokenizer, tmp_path, per_device_eval_batch_size=5, predict_with_generate=True, max_steps=1
    )
    trainer.compute_metrics = metrics
    model.generation_config.forced_bos_token_id = 17
    assert trainer.evaluate()["eval_seen"] == len(LINES)
    assert seen["predictions"].shape[1] > 21  # not the library's 20 new tokens, and not after the first batch either
    assert set(seen["predictions"][:, 1].tolist()) == {17}


def test_it_learns_to_copy(make_model, tokenizer, tmp_path):
    model = make_model(vocab_size=len(tokenizer), d_model=32, d_ff=64, d_k=16, d_v=16, dropout=0.0)
    trainer = make_trainer(
        model, tokenizer, tmp_path, per_device_train_batch_size=16, max_steps=250, label_smoothing_factor=0.1
    )
    trainer.args.logging_steps = 50
    trainer.args.learning_rate = 5e-3
    trainer.train()
    model.eval()
    inputs = tokenizer(LINES, return_tensors="pt", padding=True)
    right = [text == line for text, line in zip(tokenizer.batch_decode(model.generate(**inputs)), LINES, strict=True)]
    assert sum(right) >= 15, sum(right)
