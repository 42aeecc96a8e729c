"""`hf-vaswani self-test`: it passes on a machine that decodes well, and says where one does not (row 116)."""

import argparse

import pytest
import torch

from hf_vaswani import VaswaniForConditionalGeneration, modeling_vaswani
from hf_vaswani.cli import self_test
from hf_vaswani.cli.output import UserError


def run(*arguments):
    parser = argparse.ArgumentParser()
    self_test.add_parser(parser.add_subparsers())
    args = parser.parse_args(["self-test", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def cpu_alone(monkeypatch):
    monkeypatch.setattr(self_test, "available_devices", lambda: ["cpu"])


def test_without_a_model_it_checks_the_cache_and_the_attention_one_line_each(cpu_alone, capsys):
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "ok    with against without cache, cpu",
        "ok    SDPA against eager, cpu",
    ]
    assert all("equal tokens over 30 steps" in line for line in lines)


def test_the_default_model_says_many_things_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = self_test.tiny_model(), self_test.tiny_model()
    assert torch.equal(torch.get_rng_state(), state)
    ids, scores = self_test._decode(first, "cpu", "eager", use_cache=False)
    assert torch.equal(ids, self_test._decode(second, "cpu", "eager", use_cache=False)[0])
    assert (ids.shape, scores.shape) == ((3, 30), (3, 30, 97))
    assert min(len(set(row)) for row in ids.tolist()) > 2
    assert len({tuple(row) for row in ids.tolist()}) == 3


def test_a_saved_model_is_checked_in_float32_whatever_it_was_saved_in(make_model, cpu_alone, tmp_path, capsys):
    make_model(
        position_encoding="learned", max_position_embeddings=12, source_vocab_size=41
    ).bfloat16().save_pretrained(tmp_path)
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.count("equal tokens over 12 steps") == 2  # all that the learned table has
    assert self_test.load_model(str(tmp_path)).dtype == torch.float32


def test_a_cache_that_loses_a_step_is_found(monkeypatch, cpu_alone, capsys):
    plain = modeling_vaswani.VaswaniAttention.keys_and_values

    def forgetful(self, states, is_cross, cache):
        key, value = plain(self, states, is_cross, cache)
        if not is_cross and cache is not None and key.shape[2] > 11:
            value = value.clone()
            value[:, :, 1:10] = 0.0
        return key, value

    monkeypatch.setattr(modeling_vaswani.VaswaniAttention, "keys_and_values", forgetful)
    assert run() == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("FAIL  with against without cache, cpu: sentence ")
    assert int(line.split("from step ")[1].split()[0]) > 11


def test_attention_that_differs_is_found(monkeypatch, cpu_alone, capsys):
    eager = modeling_vaswani.eager_attention_forward
    monkeypatch.setattr(
        modeling_vaswani,
        "eager_attention_forward",
        lambda *args, scaling, **kwargs: eager(*args, scaling=2 * scaling, **kwargs),
    )
    assert run() == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ok    with against without cache")
    assert second.startswith("FAIL  SDPA against eager, cpu: sentence ")


class Elsewhere(VaswaniForConditionalGeneration):
    """Stands in for an accelerator: it counts moves, and decodes wrongly or not at all once moved there."""

    fault = None

    def to(self, device):
        self.is_there = device == "elsewhere"
        return self

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if getattr(self, "is_there", False) and self.fault is not None:
            out.logits = self.fault(out.logits)
        return out


@pytest.fixture
def elsewhere(monkeypatch):
    """The stand-in, with a device name that tensors take for the CPU."""
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: self if a == ("elsewhere",) else plain(self, *a, **k))
    model = Elsewhere(self_test.tiny_model().config)
    model.load_state_dict(self_test.tiny_model().state_dict())
    return model.eval()


def test_every_device_is_compared_with_the_cpu(elsewhere):
    found = list(self_test.checks(elsewhere, ["cpu", "elsewhere"]))
    assert [check.name for check in found] == [
        "with against without cache, cpu",
        "SDPA against eager, cpu",
        "elsewhere against cpu",
        "with against without cache, elsewhere",
        "SDPA against eager, elsewhere",
    ]
    assert all(check.is_equal for check in found)
    assert not elsewhere.is_there  # it ends on the CPU


def test_a_device_that_decodes_otherwise_is_named(elsewhere):
    elsewhere.fault = lambda logits: logits.roll(1, -1)
    found = {check.name: check for check in self_test.checks(elsewhere, ["elsewhere"])}
    assert [name for name, check in found.items() if not check.is_equal] == ["elsewhere against cpu"]
    assert "sentence 1 differs from step 1 on" in found["elsewhere against cpu"].detail


def test_a_device_that_gives_no_numbers_is_named_with_the_step_and_the_way_out(elsewhere):
    def spoil(logits, calls=[]):  # noqa: B006
        calls.append(1)
        return logits * float("nan") if len(calls) == 7 else logits

    elsewhere.fault = spoil
    last = list(self_test.checks(elsewhere, ["elsewhere"]))[-1]
    assert (last.name, last.is_equal) == ("elsewhere against cpu", False)
    assert "not numbers at step 7 of decoding" in last.detail
    assert "--device cpu" in last.detail


def test_a_device_that_stops_decoding_is_named(elsewhere):
    def stop(logits):
        raise RuntimeError("sizes differ:\n3 and 4")

    elsewhere.fault = stop
    last = list(self_test.checks(elsewhere, ["elsewhere"]))[-1]
    assert (last.name, last.is_equal) == ("elsewhere against cpu", False)
    assert last.detail == "decoding stopped: sizes differ: 3 and 4"


def test_a_tie_is_no_difference():
    ids, other = torch.tensor([[4, 5, 6]]), torch.tensor([[4, 7, 7]])
    scores = torch.zeros(1, 3, 9)
    scores[0, 1, 5] = 2e-4
    tie = self_test._compared("x", (ids, scores), (other, scores))
    assert tie.is_equal
    assert tie.detail.endswith("1 tie(s)")
    scores[0, 1, 5] = 2e-2
    assert not self_test._compared("x", (ids, scores), (other, scores)).is_equal


def test_a_weight_that_is_no_number_is_told_with_the_step_and_fails(make_model, cpu_alone, tmp_path, capsys):
    model = make_model()
    with torch.no_grad():
        model.model.decoder.layers[1].feed_forward.fc1.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "first")
    assert run(tmp_path / "first") == 1
    assert capsys.readouterr().out.startswith(
        "FAIL  scores on cpu: The model's scores are not numbers at step 1 of decoding"
    )

    model = make_model(position_encoding="learned", max_position_embeddings=12)
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[4, 2] = float("nan")  # read at step 5 first
    model.save_pretrained(tmp_path / "fifth")
    assert run(tmp_path / "fifth") == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "at step 5 of decoding" in lines[0]


def test_the_switch_to_the_cpu_leaves_other_devices_out(monkeypatch, capsys):
    monkeypatch.setattr(self_test, "available_devices", lambda: ["cpu", "nowhere"])
    assert run("--device", "cpu") == 0
    assert "nowhere" not in capsys.readouterr().out


def test_a_device_or_a_model_that_is_not_there_is_refused_in_one_sentence(cpu_alone, tmp_path):
    with pytest.raises(UserError, match=r"--device warp: not to be had here .*Found: cpu"):
        run("--device", "warp")
    with pytest.raises(UserError, match="no such folder"):
        run(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded as a translation model"):
        run(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator is visible here")
def test_the_accelerator_of_this_machine_decodes_like_its_cpu(capsys):
    assert run() == 0
    assert f"{self_test.available_devices()[1]} against cpu" in capsys.readouterr().out


@pytest.mark.parametrize("end", [None, [1, 3]])
def test_a_model_with_several_end_tokens_or_none_is_checked(end):
    model = self_test.tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    found = list(self_test.checks(model, ["cpu"]))
    assert [check.is_equal for check in found] == [True, True]
