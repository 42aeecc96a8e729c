"""Writes a model as ONNX graphs for ONNX Runtime: an encoder, a decoder's first step, and its further steps.

    encoder_model.onnx             input_ids, attention_mask -> last_hidden_state
    decoder_model.onnx             input_ids, encoder_hidden_states, encoder_attention_mask -> logits, present.*
    decoder_with_past_model.onnx   input_ids, encoder_attention_mask, past_key_values.* -> logits, present.*
    model.onnx_data                the weights of all three, each of them once

Beside them lie config.json, generation_config.json and the tokenizer's files. Files, inputs and outputs have the names
that optimum gives them. `VaswaniOnnxModel` of `hf_vaswani.interop.onnx_runtime` translates with such a folder.

Choice: the graphs are written operator by operator, not traced: a trace depends on the releases of torch and of its
exporter, takes minutes, and hides which length is which.
"""

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .foreign import ConversionError, check_all_heads

ENCODER, DECODER, DECODER_WITH_PAST = "encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"
DATA_FILE = "model.onnx_data"
QUANTIZATIONS = ("int8",)
# Choice: the oldest set with LayerNormalization as one operator is 17; every ONNX Runtime since 1.14 computes 18, of
# file format (IR) 8, so newer sets would only shut older programs out.
OPSET = 18

_INLINE_BYTES = 1024  # smaller tensors stay in the graph's own file
_PAGE = 4096  # a tensor that begins on a page can be mapped into memory
_MISSING = "ONNX is not installed. Run: pip install 'hf-vaswani[onnx]', or pip install onnx onnxruntime"


def cache_names(prefix: str, layer: int, parts: Sequence[str] = ("decoder", "encoder")) -> list[str]:
    """Names of one layer's keys and values, of self-attention ("decoder") and of attention over the source."""
    return [f"{prefix}.{layer}.{part}.{kind}" for part in parts for kind in ("key", "value")]


# --------------------------------------------------------------------------- the public way in
def export(model: Any, tokenizer: Any, out: Path, quantization: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Write the graphs, their weights, the configurations and the tokenizer's files into a folder.

    Args:
        model (`VaswaniForConditionalGeneration`): in any precision; it is not changed.
        tokenizer (*optional*): saved beside the graphs; None: there is none.
        out (`Path`): is made where it does not exist; files of these names are overwritten.
        quantization (`str`, *optional*): "int8": maps and embeddings in int8, one scale for each row of a matrix,
            activations quantised as they come. None: float32.

    Returns:
        facts for a report (`tensors`, `graphs`, `opset`, `bytes`, `quantization`, `choices`), and one sentence for
        each thing that is lost.

    Raises:
        ConversionError: an activation or quantization that is not known here, or a weight that no graph uses.
        ImportError: ONNX is not installed.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise ConversionError(f"There is no quantization {quantization!r} for ONNX. It has {', '.join(QUANTIZATIONS)}.")
    check_all_heads(model.config, "the ONNX export")
    try:
        import onnx
    except ImportError as error:
        raise ImportError(_MISSING) from error
    from .onnx_graph import Weights, decoder, encoder

    weights = Weights(model)
    graphs = {
        ENCODER: encoder(model.config, weights),
        DECODER: decoder(model.config, weights, has_past=False),
        DECODER_WITH_PAST: decoder(model.config, weights, has_past=True),
    }
    weights.check()
    if quantization:
        graphs = _quantize(graphs)
    out.mkdir(parents=True, exist_ok=True)
    sizes = _store(graphs, out)
    for name in graphs:
        onnx.checker.check_model(str(out / name), full_check=True)
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    facts = {
        "tensors": len(weights.state),
        "graphs": {name: len(graph.graph.node) for name, graph in graphs.items()},
        "opset": OPSET,
        "bytes": sizes,
        "quantization": quantization or "float32",
        "choices": _choices(model, quantization),
    }
    return facts, _losses(model.config, quantization)


def _choices(model: Any, quantization: str | None) -> list[str]:
    choices = [
        f"Operator set {OPSET}, which ONNX Runtime computes since 1.14; LayerNormalization is one operator in it.",
        "The decoder counts its positions from the length of the cache, the encoder over its mask.",
        f"The weights of the three graphs lie once in {DATA_FILE}: keep the files together.",
    ]
    if model.config.position_encoding == "sinusoidal":
        choices.append("Sinusoids are computed in the graph, in float64: there is no table that a text can outgrow.")
    if model.dtype != torch.float32:
        choices.append(f"The weights were {str(model.dtype).removeprefix('torch.')}; the graphs hold float32.")
    if quantization == "int8":
        choices.append(
            "int8: one scale for each row of a matrix, unsigned, since sums of signed products can overflow on "
            "processors without VNNI. Residual sums, norms, softmax and the cache stay float32."
        )
    return choices


def _losses(config: Any, quantization: str | None) -> list[str]:
    losses = [
        "The search is not in the graphs: `VaswaniOnnxModel` runs it as generation_config.json says, the paper's "
        "length rule and limit included; another program ends and ranks translations by rules of its own.",
        "Only inference: no dropout, no loss, no attention weights, no hidden states of single layers.",
        "The decoder has no mask over the target (`decoder_attention_mask`): it reads every column.",
    ]
    if config.position_encoding == "learned":
        losses.append(
            f"The learned table has {config.max_position_embeddings} positions: `VaswaniOnnxModel` refuses more with a "
            "plain message, another program shows ONNX Runtime's own, of an index out of bounds."
        )
    if quantization == "int8":
        losses.append(
            "int8: activations share one scale across a batch, so a translation can change with its neighbours."
        )
    return losses


# --------------------------------------------------------------------------- files
def _store(models: dict[str, Any], out: Path) -> dict[str, int]:
    """Write the graphs with one file of weights; a matrix of which the transpose is there gets a node instead."""
    from onnx import TensorProto, helper, numpy_helper

    from .onnx_graph import digest

    places: dict[tuple[Any, ...], tuple[int, int]] = {}
    # A program may have the old file mapped, so that it must not change under its feet.
    written = out / f"{DATA_FILE}.new"
    with open(written, "wb") as data:

        def place(array: np.ndarray) -> tuple[int, int]:
            key = digest(array)
            if key not in places:
                data.write(b"\0" * (-data.tell() % _PAGE))
                places[key] = data.tell(), array.nbytes
                data.write(np.ascontiguousarray(array).data)
            return places[key]

        # Embeddings first: a map that is tied to one is its transpose, and not the other way round.
        for model in models.values():
            looked_up = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
            for one in model.graph.initializer:
                array = numpy_helper.to_array(one)
                if one.name in looked_up and array.nbytes >= _INLINE_BYTES:
                    place(array)
        for name, model in models.items():
            nodes = []
            for one in model.graph.initializer:
                array = numpy_helper.to_array(one)
                if array.nbytes < _INLINE_BYTES:
                    continue
                if array.ndim == 2 and digest(array) not in places and digest(array.T) in places:
                    array = np.ascontiguousarray(array.T)
                    node = helper.make_node("Transpose", [f"{one.name}.stored"], [one.name], perm=[1, 0])
                    nodes.append(node)
                    one.name, one.dims[:] = node.input[0], array.shape
                offset, length = place(array)
                one.ClearField("raw_data")
                for field in ("float_data", "int32_data", "int64_data", "double_data"):
                    one.ClearField(field)
                one.data_location = TensorProto.EXTERNAL
                for key, value in (("location", DATA_FILE), ("offset", str(offset)), ("length", str(length))):
                    one.external_data.add(key=key, value=value)
            for node in nodes:
                model.graph.node.insert(0, node)
            (out / name).write_bytes(model.SerializeToString())
    written.replace(out / DATA_FILE)
    return {name: (out / name).stat().st_size for name in [*models, DATA_FILE]}


# --------------------------------------------------------------------------- int8
@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the quantiser says about itself; an error is still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _quantize(models: dict[str, Any]) -> dict[str, Any]:
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise ImportError(_MISSING) from error
    import onnx
    from onnx import numpy_helper

    from .onnx_graph import digest

    # A map that is tied to an embedding is its transpose; the embedding then uses the map's int8 numbers.
    names = {
        digest(numpy_helper.to_array(one).T): one.name
        for model in models.values()
        for one in model.graph.initializer
        if one.name.endswith(".transposed")
    }
    quantized = {}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        for name, model in models.items():
            quantize_dynamic(
                model, Path(folder) / name, op_types_to_quantize=["MatMul"], per_channel=True,
                weight_type=QuantType.QUInt8, extra_options={"WeightSymmetric": True}, use_external_data_format=True,
            )  # fmt: skip
            quantized[name] = onnx.load(str(Path(folder) / name))
    maps = {
        one.name: numpy_helper.to_array(one)
        for model in quantized.values()
        for one in model.graph.initializer
        if ".transposed_" in one.name
    }
    for model in quantized.values():
        _quantize_embedding(model.graph, names, maps)
    return quantized


def _quantize_embedding(graph: Any, names: dict[tuple[Any, ...], str], maps: dict[str, np.ndarray]) -> None:
    """Store the table that ids are looked up in as 8 bits, with a scale and a zero for each row."""
    from onnx import TensorProto, helper, numpy_helper

    from .onnx_graph import digest

    (node,) = (one for one in graph.node if one.op_type == "Gather" and one.input[1] == "input_ids")
    table = next(one for one in graph.initializer if one.name == node.input[0])
    full = numpy_helper.to_array(table)
    same = names.get(digest(full))
    if same is not None:
        rows, scale, zero = (maps[f"{same}_{part}"] for part in ("quantized", "scale", "zero_point"))
        rows = rows.T
    else:
        scale = np.maximum(np.abs(full).max(axis=1) / 127, np.finfo(np.float32).tiny).astype(np.float32)
        zero = np.full(len(full), 128, dtype=np.uint8)
        rows = (np.rint(full / scale[:, None]) + 128).astype(np.uint8)
    parts = {"rows": rows, "scale": scale[:, None], "zero": zero[:, None]}
    graph.initializer.remove(table)
    for part, array in parts.items():
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), f"{table.name}.{part}"))
    x, place = node.output[0], list(graph.node).index(node)
    graph.node.remove(node)
    steps = [helper.make_node("Gather", [f"{table.name}.{part}", "input_ids"], [f"{x}.{part}"]) for part in parts]
    steps += [
        helper.make_node("Cast", [f"{x}.{part}"], [f"{x}.{part}.f"], to=TensorProto.FLOAT) for part in ("rows", "zero")
    ]
    steps.append(helper.make_node("Sub", [f"{x}.rows.f", f"{x}.zero.f"], [f"{x}.steps"]))
    steps.append(helper.make_node("Mul", [f"{x}.steps", f"{x}.scale"], [x]))
    for step in reversed(steps):
        graph.node.insert(place, step)
