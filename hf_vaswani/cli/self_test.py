"""`hf-vaswani self-test`: does this machine decode as it should?"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .output import UserError, plain_faults

_STEPS = 30
_SOURCE_LENGTHS = (9, 5, 2)
# Two scores nearer than this, relative to the largest one, are a tie: which of them wins is a matter of rounding.
_TIE = 1e-3


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name (`str`): what was compared. is_equal (`bool`): whether it came out as it must.
        detail (`str`): what was found, for the reader.
    """

    name: str
    is_equal: bool
    detail: str


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "self-test",
        help="check that this machine decodes as it should",
        description=f"Decode {_STEPS} tokens greedily, with and without the cache, with eager and SDPA attention, and "
        "on every device, and compare the tokens. One line a check on standard output; the exit status is 1 if any "
        "differs. Where a check of the accelerator fails, run on the CPU: --device cpu leaves all other devices out "
        'here, and pipeline("translation", model=..., device="cpu") translates there.',
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder of a model, or its name on the Hub (default: a tiny random one)",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="check this one beside the CPU: cpu, cuda, mps (default: all that are there)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    devices = [args.device] if args.device else available_devices()
    for device in devices:
        _check_device(device)
    model = load_model(args.model) if args.model else tiny_model()
    failed_count = 0
    with plain_faults():
        for check in checks(model, devices):
            print(f"{'ok  ' if check.is_equal else 'FAIL'}  {check.name}: {check.detail}", flush=True)
            failed_count += not check.is_equal
    return 1 if failed_count else 0


def available_devices() -> list[str]:
    """The CPU, and the accelerator (cuda, mps or another) where there is one."""
    import torch

    if not torch.accelerator.is_available():
        return ["cpu"]
    accelerator: Any = torch.accelerator.current_accelerator()
    return ["cpu", accelerator.type]


def _check_device(name: str) -> None:
    import torch

    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--device {name}: not to be had here ({reason}). Found: {', '.join(available_devices())}."
        ) from None


def tiny_model() -> Any:
    """A model with random weights, the same on every machine, whose tokens change from step to step."""
    import torch

    from .. import VaswaniConfig, VaswaniForConditionalGeneration

    config = VaswaniConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        num_attention_heads=4,
        d_ff=48,
        tie_word_embeddings=False,  # a tied random model says one token over and over
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VaswaniForConditionalGeneration(config).eval()
    with torch.no_grad():
        for matrix in (model.model.shared.weight, model.lm_head.weight):
            matrix.mul_(2.0)
    return model


def load_model(name: str) -> Any:
    """A model from a folder or the Hub, in float32, so that devices can be compared.

    Raises:
        UserError: there is no such model.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    if not Path(name).is_dir() and name.count("/") != 1:
        raise UserError(f"{name}: no such folder.")
    try:
        return AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32).eval()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(f"{name} cannot be loaded as a translation model ({' '.join(str(error).split())}).") from error


def checks(model: Any, devices: list[str]) -> Iterator[Check]:
    """Compare every way of decoding with the plainest one: on the CPU, eager, without the cache.

    Args:
        model: a seq2seq model of transformers, in evaluation mode; it ends on the CPU.
        devices (`list[str]`): names of devices.

    Yields:
        `Check`: cached against uncached and SDPA against eager, on each device, and each device against the CPU. A
        check whose scores are not finite fails, with the step; if those of the plainest way are not, it is the last.
    """
    plain = _decode(model, "cpu", "eager", use_cache=False)
    if isinstance(plain, str):
        yield Check("scores on cpu", False, plain)
        return
    for device in dict.fromkeys(["cpu", *devices]):
        try:
            here = plain
            if device != "cpu":
                here = _decode(model, device, "eager", use_cache=False)
                yield _compared(f"{device} against cpu", plain, here)
            if isinstance(here, str):
                continue
            yield _compared(
                f"with against without cache, {device}", here, _decode(model, device, "eager", use_cache=True)
            )
            yield _compared(f"SDPA against eager, {device}", here, _decode(model, device, "sdpa", use_cache=True))
        finally:
            model.to("cpu")


def _decode(model: Any, device: str, attention: str, use_cache: bool) -> Any:
    """New tokens [B, T] and their scores [B, T, V] of a greedy search; or a sentence on what stopped it."""
    import torch

    config = model.config
    steps = _STEPS
    if getattr(config, "position_encoding", None) == "learned":
        steps = min(steps, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(1)
    rows = getattr(config, "source_vocab_size", None) or config.vocab_size
    input_ids = torch.randint(min(3, rows - 1), rows, (len(_SOURCE_LENGTHS), max(_SOURCE_LENGTHS)), generator=generator)
    lengths = torch.tensor(_SOURCE_LENGTHS)[:, None]
    columns = torch.arange(max(_SOURCE_LENGTHS))[None]
    # Some models have several end tokens, or none.
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if ends[0] is not None:
        input_ids = input_ids.masked_fill(columns == lengths - 1, ends[0])
    input_ids = input_ids.masked_fill(columns >= lengths, config.pad_token_id or 0)
    model.to(device).set_attn_implementation(attention)
    try:
        found = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=(columns < lengths).long().to(device),
            num_beams=1,
            do_sample=False,
            use_cache=use_cache,
            max_new_tokens=steps,
            min_new_tokens=steps,
            return_dict_in_generate=True,
            output_logits=True,
        )
    except FloatingPointError as error:
        return f"{error} Where only one device shows it, use another: --device cpu."
    except RuntimeError as error:
        return f"decoding stopped: {' '.join(str(error).split())}"
    for step, logits in enumerate(found.logits, start=1):
        if not torch.isfinite(logits).all():
            return (
                f"the scores are not finite at step {step} of decoding. A weight that is not finite is the usual "
                "cause; where only one device shows it, use another: --device cpu."
            )
    return found.sequences[:, -steps:].cpu(), torch.stack(found.logits, dim=1).float().cpu()


def _compared(name: str, expected: Any, actual: Any) -> Check:
    """Compare tokens row by row up to a tie, after which two right searches may part."""
    if isinstance(actual, str):
        return Check(name, False, actual)
    (ids, scores), (other_ids, other_scores) = expected, actual
    largest, tie_count = 0.0, 0
    for row in range(len(ids)):
        different = (ids[row] != other_ids[row]).nonzero().flatten().tolist()
        compared = different[0] + 1 if different else ids.shape[1]
        largest = max(largest, float((scores[row, :compared] - other_scores[row, :compared]).abs().max()))
        if not different:
            continue
        step = different[0]
        wanted, found = int(ids[row, step]), int(other_ids[row, step])
        gap = float(scores[row, step, wanted] - scores[row, step, found])
        if gap > _TIE * max(1.0, float(scores[row, step].abs().max())):
            found_there = f"token {found} where {wanted} scores {gap:.3g} more"
            return Check(name, False, f"sentence {row + 1} differs from step {step + 1} on: {found_there}")
        tie_count += 1
    detail = f"equal tokens over {ids.shape[1]} steps, scores within {largest:.1e}"
    return Check(name, True, detail + (f", up to {tie_count} tie(s)" if tie_count else ""))
