"""Stored sinusoids against the formula: rounding passes, anything else is found with its row."""

import numpy as np
import pytest
import torch

from hf_vaswani.interop.foreign import ConversionError, TensorReader
from hf_vaswani.interop.positions import check_sinusoid, first_other_row
from hf_vaswani.modeling_vaswani import sinusoid_table


def in_float32(rows, width):
    """As many programs make it: angles and all in float32."""
    power = np.float32(10000) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angle = np.arange(rows, dtype=np.float32)[:, None] / power
    return torch.from_numpy(np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(rows, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_rounded_table_is_the_sinusoid(dtype):
    assert first_other_row(in_float32(2000, 12).to(dtype), "interleaved") is None
    assert first_other_row(sinusoid_table(70, 12, "halves", "2i/(d-2)", 2).to(dtype), "halves", "2i/(d-2)", 2) is None


def test_exact_angles_are_held_to_more():
    table = in_float32(2000, 12)
    assert first_other_row(table, "interleaved", rounding_a_row=0.0) is not None
    assert first_other_row(sinusoid_table(2000, 12), "interleaved", rounding_a_row=0.0) is None


@pytest.mark.parametrize("kind", [("halves",), ("interleaved", "2i/(d-2)"), ("interleaved", "2i/d", 1)])
def test_another_sinusoid_is_found(kind):
    assert first_other_row(sinusoid_table(50, 12), *kind) is not None


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_the_first_row_that_differs_is_named(value):
    table = sinusoid_table(50, 12)
    table[31, 4] = value
    table[40] = 0.0
    row, apart = first_other_row(table, "interleaved")
    assert row == 31
    assert apart == pytest.approx(abs(value - float(sinusoid_table(50, 12)[31, 4])), nan_ok=True)


def test_a_reader_leaves_the_right_table_out_and_refuses_another():
    reader = TensorReader({"pe": sinusoid_table(300, 8)[None], "other": torch.zeros(300, 8)}, "file.pt")
    check_sinusoid(reader, "pe", 8)
    check_sinusoid(reader, "absent", 8)
    assert reader.ignored == {"pe": "computed from a formula"}
    with pytest.raises(ConversionError, match=r"file\.pt: .other. is not the sinusoid"):
        check_sinusoid(reader, "other", 8)
