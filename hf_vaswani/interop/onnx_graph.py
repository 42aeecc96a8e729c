"""The encoder and the decoder, operator by operator, as ONNX graphs; `onnx_export` writes them into a folder.

Letters: B batch, S source length, T new target columns, P columns in the cache, L length of either, H heads, K width of
one head, D d_model, V vocabulary.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from .foreign import ConversionError
from .onnx_export import OPSET, cache_names

_IR_VERSION = 8  # the file format that belongs to the operator set; a newer one would shut older programs out
_BATCH, _SOURCE = "batch_size", "encoder_sequence_length"
_TARGET, _PAST = "decoder_sequence_length", "past_decoder_sequence_length"
_LEAST = np.float32(np.finfo(np.float32).min)
_LAST = np.array([-1])


def digest(array: np.ndarray) -> tuple[Any, ...]:
    return array.shape, array.dtype.str, hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=20).digest()


class Weights:
    """Hands the weights of a model out in float32, and knows which ones nobody asked for."""

    def __init__(self, model: Any):
        self.state = model.state_dict()
        self.used: set[tuple[Any, ...]] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.state

    def take(self, key: str) -> np.ndarray:
        array = self.state[key].detach().to("cpu", torch.float32).numpy()
        self.used.add(digest(array))
        return array

    def check(self) -> None:
        """Raises `ConversionError` where the graphs leave numbers out; a tied matrix counts under any of its names."""
        left = [key for key in self.state if digest(self.state[key].detach().cpu().float().numpy()) not in self.used]
        if left:
            raise ConversionError(f"{len(left)} weights have no place in the graphs: {', '.join(sorted(left)[:12])}.")


class _Graph:
    """Collects operators and the numbers that they read; values are known by their names."""

    def __init__(self, config: Any, weights: Weights):
        self.config, self.weights = config, weights
        self.nodes: list[Any] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def input(self, name: str, dims: Sequence[Any], is_integer: bool = False) -> str:
        self.inputs.append(self._described(name, dims, is_integer))
        return name

    def output(self, name: str, dims: Sequence[Any]) -> str:
        self.outputs.append(self._described(name, dims, False))
        return name

    @staticmethod
    def _described(name: str, dims: Sequence[Any], is_integer: bool) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.INT64 if is_integer else TensorProto.FLOAT, dims)

    def op(self, kind: str, *inputs: Any, out: str | None = None, **attributes: Any) -> str:
        """Append one operator; numbers among its inputs are stored."""
        name = out or f"{kind}_{len(self.nodes)}"
        read = [one if isinstance(one, str) else self.constant(one) for one in inputs]
        self.nodes.append(helper.make_node(kind, read, [name], name=f"node_{name}", **attributes))
        return name

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        written = str(array.tolist()) if array.size <= 4 else f"{array.shape}_{zlib.crc32(array.tobytes()):08x}"
        name = f"{array.dtype}_{written}".replace(" ", "")
        self.arrays[name] = array
        return name

    def weight(self, key: str) -> str:
        self.arrays[key] = self.weights.take(key)
        return key

    def length(self, tensor: str, axis: int) -> str:
        """One size of a tensor as a vector of one number."""
        return self.op("Shape", tensor, start=axis, end=axis + 1)

    def count(self, length: str) -> str:
        """0, 1, .. up to a length: [L]."""
        return self.op("Range", np.int64(0), self.op("Squeeze", length), np.int64(1))

    def model(self) -> Any:
        stored = [numpy_helper.from_array(np.asarray(array, order="C"), name) for name, array in self.arrays.items()]
        graph = helper.make_graph(self.nodes, "vaswani", self.inputs, self.outputs, stored)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)
        made.producer_name = "hf_vaswani"
        return made

    # ------------------------------------------------------------------ parts of the architecture
    def linear(self, x: str, key: str, out: str | None = None) -> str:
        """x W^T + b, with W stored turned round: a product with a plain matrix is what quantisers look for."""
        name = f"{key}.weight.transposed"
        self.arrays[name] = self.weights.take(f"{key}.weight").T
        if f"{key}.bias" not in self.weights:
            return self.op("MatMul", x, name, out=out)
        return self.op("Add", self.op("MatMul", x, name), self.weight(f"{key}.bias"), out=out)

    def norm(self, x: str, key: str, out: str | None = None) -> str:
        scale, shift = self.weight(f"{key}.weight"), self.weight(f"{key}.bias")
        return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=self.config.layer_norm_eps, out=out)

    def residual(self, x: str, key: str, sublayer: Callable[[str], str]) -> str:
        norm = f"{key}_residual.layer_norm"
        if self.config.norm_position == "post":
            return self.norm(self.op("Add", x, sublayer(x)), norm)
        return self.op("Add", x, sublayer(self.norm(x, norm)))

    def heads(self, x: str, width: int, out: str | None = None) -> str:
        """[B, L, H*K] -> [B, H, L, K]."""
        split = self.op("Reshape", x, np.array([0, 0, self.config.num_attention_heads, width]))
        return self.op("Transpose", split, perm=[0, 2, 1, 3], out=out)

    def keys_and_values(self, x: str, key: str, out: Sequence[str | None] = (None, None)) -> tuple[str, str]:
        widths = self.config.query_key_width, self.config.value_width
        keys, values = (
            self.heads(self.linear(x, f"{key}.{part}_proj"), width, out=name)
            for part, width, name in zip("kv", widths, out, strict=True)
        )
        return keys, values

    def attention(self, x: str, keys: str, values: str, mask: str, key: str) -> str:
        width, value_width = self.config.query_key_width, self.config.value_width
        query = self.heads(self.linear(x, f"{key}.q_proj"), width)
        scores = self.op("MatMul", query, self.op("Transpose", keys, perm=[0, 1, 3, 2]))
        weights = self.op("Softmax", self.op("Add", self.op("Mul", scores, np.float32(width**-0.5)), mask), axis=-1)
        joined = self.op("Transpose", self.op("MatMul", weights, values), perm=[0, 2, 1, 3])
        flat = self.op("Reshape", joined, np.array([0, 0, self.config.num_attention_heads * value_width]))
        return self.linear(flat, f"{key}.out_proj")

    def feed_forward(self, x: str, key: str) -> str:
        return self.residual(x, key, lambda y: self.linear(self.activation(self.linear(y, f"{key}.fc1")), f"{key}.fc2"))

    def activation(self, x: str) -> str:
        kind, one, half = self.config.activation_function, np.float32(1), np.float32(0.5)
        plain = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "elu": "Elu", "softplus": "Softplus"}
        if kind in plain:
            return self.op(plain[kind], x)
        if kind == "linear":
            return x
        if kind == "relu2":
            positive = self.op("Relu", x)
            return self.op("Mul", positive, positive)
        if kind in ("silu", "swish", "quick_gelu"):
            scaled = self.op("Mul", x, np.float32(1.702)) if kind == "quick_gelu" else x
            return self.op("Mul", x, self.op("Sigmoid", scaled))
        if kind in ("gelu", "gelu_python"):
            inner = self.op("Erf", self.op("Div", x, np.float32(math.sqrt(2))))
        elif kind in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"):
            cubed = self.op("Mul", self.op("Mul", self.op("Mul", x, x), x), np.float32(0.044715))
            inner = self.op("Tanh", self.op("Mul", self.op("Add", x, cubed), np.float32(math.sqrt(2 / math.pi))))
        else:
            raise ConversionError(f"`activation_function` {kind!r} has no ONNX form here; relu, gelu and silu have.")
        return self.op("Mul", self.op("Mul", x, half), self.op("Add", inner, one))

    def embed(self, ids: str, table: str, positions: str, stack: str) -> str:
        """sqrt(d_model) E + PE, from ids [B, L] and positions [B or 1, L]: [B, L, D]."""
        config = self.config
        x = self.op("Gather", self.weight(table), ids)
        if stack == "decoder" and config.zero_start_embedding:
            is_start = self.op("Equal", ids, np.int64(config.decoder_start_token_id))
            x = self.op("Where", self.op("Unsqueeze", is_start, _LAST), np.float32(0), x)
        if config.scale_embedding:
            x = self.op("Mul", x, np.float32(math.sqrt(config.d_model)))
        if config.position_encoding == "learned":
            placed = self.op("Gather", self.weight(f"model.{stack}.embed_positions.weight"), positions)
        else:
            placed = self.sinusoid(positions)
        return self.op("Add", x, placed)

    def sinusoid(self, positions: str) -> str:
        """The table of section 3.5, computed: [B, L] -> [B, L, D]."""
        config = self.config
        two_i = np.arange(0, config.d_model, 2, dtype=np.float64)
        power = two_i / (config.d_model if config.sinusoid_exponent == "2i/d" else config.d_model - 2)
        number = self.op("Add", positions, np.int64(config.position_offset)) if config.position_offset else positions
        number = self.op("Unsqueeze", self.op("Cast", number, to=TensorProto.DOUBLE), _LAST)
        angle = self.op("Div", number, 10000.0**power)  # [B, L, D / 2]
        waves = [self.op("Sin", angle), self.op("Cos", angle)]
        if config.sinusoid_layout == "interleaved":
            waves = [self.op("Unsqueeze", wave, _LAST) for wave in waves]
        joined = self.op("Concat", *waves, axis=-1)
        return self.op("Cast", self.op("Reshape", joined, np.array([0, 0, config.d_model])), to=TensorProto.FLOAT)

    def padding_mask(self, mask: str) -> str:
        """[B, S] of 1 and 0 -> [B, 1, 1, S] to add to scores; a row without text attends to its padding."""
        is_real = self.op("Cast", mask, to=TensorProto.BOOL)
        has_none = self.op("Not", self.op("Cast", self.op("ReduceMax", mask, _LAST, keepdims=1), to=TensorProto.BOOL))
        added = self.op("Where", self.op("Or", is_real, has_none), np.float32(0), _LEAST)
        return self.op("Unsqueeze", added, np.array([1, 2]))

    def finish(self, x: str, stack: str, out: str | None = None) -> str:
        """The norm on top of a stack, where there is one."""
        key = f"model.{stack}.layer_norm"
        if f"{key}.weight" in self.weights:
            return self.norm(x, key, out=out)
        return self.op("Identity", x, out=out) if out else x


def encoder(config: Any, weights: Weights) -> Any:
    """`input_ids`, `attention_mask` -> `last_hidden_state`, as a model of ONNX."""
    graph = _Graph(config, weights)
    ids = graph.input("input_ids", [_BATCH, _SOURCE], is_integer=True)
    mask = graph.input("attention_mask", [_BATCH, _SOURCE], is_integer=True)
    # Real tokens are numbered from 0, whichever side the padding is on.
    counted = graph.op("Sub", graph.op("CumSum", mask, np.int64(-1)), np.int64(1))
    positions = graph.op("Max", counted, np.int64(0))
    x = graph.embed(ids, "model.encoder.embed_tokens.weight", positions, "encoder")
    added = graph.padding_mask(mask)
    for n in range(config.encoder_layers):
        layer = f"model.encoder.layers.{n}"

        def attend(y: str, key: str = f"{layer}.self_attn") -> str:
            return graph.attention(y, *graph.keys_and_values(y, key), added, key)

        x = graph.feed_forward(graph.residual(x, f"{layer}.self_attn", attend), f"{layer}.feed_forward")
    graph.finish(x, "encoder", graph.output("last_hidden_state", [_BATCH, _SOURCE, config.d_model]))
    return graph.model()


def decoder(config: Any, weights: Weights, has_past: bool) -> Any:
    """The first columns of the target, or with `has_past` those behind a cache, as a model of ONNX.

    The new columns' positions follow the cache's length, which may be any, 0 included.
    """
    graph = _Graph(config, weights)
    heads, widths = config.num_attention_heads, (config.query_key_width, config.value_width)
    ids = graph.input("input_ids", [_BATCH, _TARGET], is_integer=True)
    states = "" if has_past else graph.input("encoder_hidden_states", [_BATCH, _SOURCE, config.d_model])
    source_mask = graph.input("encoder_attention_mask", [_BATCH, _SOURCE], is_integer=True)
    past = []
    for n in range(config.decoder_layers if has_past else 0):
        lengths = (_PAST, _PAST, _SOURCE, _SOURCE)
        names = cache_names("past_key_values", n)
        dims = zip(names, lengths, widths * 2, strict=True)
        past.append([graph.input(name, [_BATCH, heads, length, width]) for name, length, width in dims])
    graph.output("logits", [_BATCH, _TARGET, config.vocab_size])
    reach = f"{_PAST} + {_TARGET}" if has_past else _TARGET

    new = graph.length(ids, 1)
    rows = graph.count(new)
    total = new
    if has_past:
        before = graph.length(past[0][0], 2)
        rows, total = graph.op("Add", rows, before), graph.op("Add", new, before)
    is_seen = graph.op("LessOrEqual", graph.count(total), graph.op("Unsqueeze", rows, np.array([1])))  # [T, P + T]
    causal = graph.op("Where", is_seen, np.float32(0), _LEAST)
    x = graph.embed(ids, "model.decoder.embed_tokens.weight", graph.op("Unsqueeze", rows, np.array([0])), "decoder")
    padding = graph.padding_mask(source_mask)

    for n in range(config.decoder_layers):
        layer = f"model.decoder.layers.{n}"

        def attend(y: str, n: int = n, key: str = f"{layer}.self_attn") -> str:
            out = cache_names("present", n, ("decoder",))
            for name, width in zip(out, widths, strict=True):
                graph.output(name, [_BATCH, heads, reach, width])
            if has_past:
                own = graph.keys_and_values(y, key)
                for old, fresh, name in zip(past[n], own, out, strict=False):
                    graph.op("Concat", old, fresh, axis=2, out=name)
            else:
                graph.keys_and_values(y, key, out)
            return graph.attention(y, out[0], out[1], causal, key)

        def attend_source(y: str, n: int = n, key: str = f"{layer}.encoder_attn") -> str:
            if has_past:
                return graph.attention(y, past[n][2], past[n][3], padding, key)
            out = cache_names("present", n, ("encoder",))
            for name, width in zip(out, widths, strict=True):
                graph.output(name, [_BATCH, heads, _SOURCE, width])
            return graph.attention(y, *graph.keys_and_values(states, key, out), padding, key)

        x = graph.residual(x, f"{layer}.self_attn", attend)
        x = graph.residual(x, f"{layer}.encoder_attn", attend_source)
        x = graph.feed_forward(x, f"{layer}.feed_forward")
    graph.linear(graph.finish(x, "decoder"), "lm_head", out="logits")
    return graph.model()
