"""The variables of CTranslate2's `model.bin` as weights of this architecture, in float32."""

import math
import re
from typing import Any

import torch

from ..modeling_vaswani import sinusoid_table
from .ctranslate2_file import ModelFile
from .foreign import ConversionError, TensorReader

# By the numbers that the format has for activations.
_ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "silu", 3: "gelu", 4: "quick_gelu", 5: "tanh", 6: "sigmoid"}

# Heads of kinds of models that store no number of them.
HEADS = {"": 8, "TransformerBase": 8, "TransformerBig": 16, "TransformerSpec": 8}


class Weights:
    """Variables as float32, whatever they are stored as."""

    def __init__(self, reader: TensorReader, stored: ModelFile):
        self.reader, self.stored = reader, stored
        self.choices: list[str] = []
        self.rounded: set[str] = set()
        self.has_rounded_positions = False
        self.made: dict[int, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.reader

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """One variable. The writer stores equal ones once: only matrices of vocabularies are one tensor here too."""
        found = self.reader.take(name, *shape)
        if name + "_scale" in self.reader:
            self.reader.take(name + "_scale")
        if id(found) not in self.made:
            self.made[id(found)] = self._full(name, found)
        elif "embeddings" not in name and "projection" not in name:
            return self.made[id(found)].clone()
        return self.made[id(found)]

    def _full(self, name: str, found: torch.Tensor) -> torch.Tensor:
        if found.dtype == torch.float32:
            return found
        self.rounded.add(str(found.dtype).removeprefix("torch."))
        if found.dtype.is_floating_point:
            return found.float()
        if name + "_scale" in self.reader:
            scale = self.reader.take(name + "_scale").float()
        elif found.dtype == torch.int16:
            scale = torch.tensor(1000.0)  # the one scale of the first int16 files
        else:
            raise ConversionError(f"{self.reader.path}: {name!r} is {found.dtype} without a scale.")
        return found.float() / (scale[:, None] if scale.dim() == 1 else scale)

    def scalar(self, side: str, name: str, default: Any) -> Any:
        """A number of one side, of both sides (older files), or a default."""
        for full in (f"{side}/{name}", name):
            if full in self.reader:
                return self.reader.take(full).item()
        return default

    def both(self, name: str, default: Any) -> Any:
        one, other = self.scalar("encoder", name, default), self.scalar("decoder", name, default)
        if one != other:
            raise ConversionError(f"{self.reader.path}: `{name}` is {one} in the encoder and {other} in the decoder.")
        return one

    def layers(self, side: str) -> int:
        numbers = {int(n) for n in re.findall(rf"^{side}/layer_(\d+)/", "\n".join(self.stored.tensors), re.M)}
        if numbers != set(range(len(numbers))) or not numbers:
            raise ConversionError(f"{self.reader.path}: the layers of the {side} are {sorted(numbers) or 'missing'}.")
        return len(numbers)

    def embeddings(self, side: str) -> str:
        names = [f"{side}/embeddings/weight", f"{side}/embeddings_0/weight"]
        return names[1] if names[1] in self.reader else names[0]


def sizes(weights: Weights, settings: dict[str, Any]) -> dict[str, Any]:
    """What the variables say about the shape, as fields of `VaswaniConfig`."""
    path = weights.reader.path
    source, target = (weights.take(weights.embeddings(side), None, None) for side in ("encoder", "decoder"))
    d_model = target.shape[1]
    stored_heads = any(f"{side}num_heads" in weights for side in ("encoder/", ""))
    heads = weights.both("num_heads", HEADS[weights.stored.spec])
    if not stored_heads:
        weights.choices.append(f"The number of heads is not stored; {heads} is what CTranslate2 takes then.")
    activation = weights.both("activation", 0)
    if activation not in _ACTIVATIONS:
        raise ConversionError(f"{path}: `activation` is {activation}, which is not known here.")
    has_norm = "encoder/layer_norm/gamma" in weights
    if has_norm != ("decoder/layer_norm/gamma" in weights):
        raise ConversionError(f"{path}: only one of encoder and decoder ends in a norm.")
    epsilon = settings["layer_norm_epsilon"]
    if epsilon is None:
        epsilon = 1e-5
        weights.choices.append("The norms' epsilon is not stored; 1e-5 is what CTranslate2 takes then.")
    width = weights.reader.take("encoder/layer_0/ffn/linear_0/weight", None, d_model).shape[0]
    return {
        "vocab_size": target.shape[0],
        "source_vocab_size": None if source.shape[0] == target.shape[0] else source.shape[0],
        "d_model": d_model,
        "d_ff": width,
        "encoder_layers": weights.layers("encoder"),
        "decoder_layers": weights.layers("decoder"),
        "num_attention_heads": heads,
        "activation_function": _ACTIVATIONS[activation],
        "norm_position": "pre" if weights.both("pre_norm", True) else "post",
        "final_norm": has_norm,
        "layer_norm_eps": epsilon,
        "scale_embedding": _is_scaled(weights, d_model),
        "attention_bias": any(re.search(r"attention/linear_\d/bias$", name) for name in weights.stored.tensors),
        "output_bias": "decoder/projection/bias" in weights,
        "zero_start_embedding": bool(weights.scalar("decoder", "start_from_zero_embedding", False)),
    }


def _is_scaled(weights: Weights, d_model: int) -> bool:
    scales = []
    for side in ("encoder", "decoder"):
        old = weights.embeddings(side).replace("weight", "multiply_by_sqrt_depth")
        name = f"{side}/scale_embeddings" if f"{side}/scale_embeddings" in weights else old
        stored = weights.reader.take(name) if name in weights else None
        if stored is None or stored.dtype == torch.int8:
            scales.append(math.sqrt(d_model) if stored is None or bool(stored) else 1.0)
        else:
            scales.append(float(stored))
    if scales[0] == scales[1]:
        for scale, answer in ((math.sqrt(d_model), True), (1.0, False)):
            if math.isclose(scales[0], scale, rel_tol=1e-6):
                return answer
    raise ConversionError(
        f"{weights.reader.path}: `scale_embeddings` is {scales[0]:g} in the encoder and {scales[1]:g} in the decoder; "
        f"this architecture multiplies both by sqrt(d_model) = {math.sqrt(d_model):g}, or neither."
    )


def tensors_of(weights: Weights, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights by our names; adds to `config` what only they tell: tying, widths of heads, positions."""
    source, target = (weights.take(weights.embeddings(side)) for side in ("encoder", "decoder"))
    projection = weights.take("decoder/projection/weight", config["vocab_size"], config["d_model"])
    config["tie_word_embeddings"] = projection is target or torch.equal(projection, target)
    config["tie_encoder_decoder_embeddings"] = source is target or torch.equal(source, target)
    found = {"model.shared.weight": target}
    if not config["tie_encoder_decoder_embeddings"]:
        found["model.encoder.embed_tokens.weight"] = source
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = projection
    if config["output_bias"]:
        found["lm_head.bias"] = weights.take("decoder/projection/bias", config["vocab_size"])
    attentions: dict[str, dict[str, torch.Tensor]] = {}
    for side in ("encoder", "decoder"):
        for n in range(config[f"{side}_layers"]):
            there, here = f"{side}/layer_{n}", f"model.{side}.layers.{n}"
            maps = {"self_attention": "self_attn", **({"attention": "encoder_attn"} if side == "decoder" else {})}
            for old, new in maps.items():
                attentions[f"{here}.{new}"] = _attention(weights, f"{there}/{old}", config, old == "self_attention")
                _norm(weights, f"{there}/{old}/layer_norm", f"{here}.{new}_residual.layer_norm", found)
            _norm(weights, f"{there}/ffn/layer_norm", f"{here}.feed_forward_residual.layer_norm", found)
            for old, new, rows in (("linear_0", "fc1", config["d_ff"]), ("linear_1", "fc2", config["d_model"])):
                found[f"{here}.feed_forward.{new}.weight"] = weights.take(f"{there}/ffn/{old}/weight", rows, None)
                name = f"{there}/ffn/{old}/bias"
                if name not in weights:
                    weights.choices.append(f"{name} is not there, and was filled with zeros.")
                bias = weights.take(name, rows) if name in weights else torch.zeros(rows)
                found[f"{here}.feed_forward.{new}.bias"] = bias
        if config["final_norm"]:
            _norm(weights, f"{side}/layer_norm", f"model.{side}.layer_norm", found)
    _widths(attentions, config, weights)
    for name, parts in attentions.items():
        found.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
    _positions(weights, config, found)
    return found


def _norm(weights: Weights, there: str, here: str, found: dict[str, torch.Tensor]) -> None:
    found[f"{here}.weight"], found[f"{here}.bias"] = weights.take(f"{there}/gamma"), weights.take(f"{there}/beta")


def _attention(weights: Weights, there: str, config: dict[str, Any], is_self: bool) -> dict[str, torch.Tensor]:
    """The four maps of one attention, taken apart."""
    groups = [["q", "k", "v"], ["out"]] if is_self else [["q"], ["k", "v"], ["out"]]
    d_model = config["d_model"]
    found: dict[str, torch.Tensor] = {}
    for number, names in enumerate(groups):
        matrix = weights.take(
            f"{there}/linear_{number}/weight", *((d_model, None) if names == ["out"] else (None, d_model))
        )
        if matrix.shape[0] % len(names):
            raise ConversionError(
                f"{weights.reader.path}: {there}/linear_{number} does not fall into {len(names)} maps."
            )
        bias_name = f"{there}/linear_{number}/bias"
        bias = weights.take(bias_name, matrix.shape[0]) if bias_name in weights else None
        if bias is None and config["attention_bias"]:
            weights.choices.append(f"{bias_name} is not there, and was filled with zeros.")
            bias = torch.zeros(matrix.shape[0])
        for place, name in enumerate(names):
            part = slice(place * matrix.shape[0] // len(names), (place + 1) * matrix.shape[0] // len(names))
            found[f"{name}_proj.weight"] = matrix[part]
            if bias is not None:
                found[f"{name}_proj.bias"] = bias[part]
    heads, rows = config["num_attention_heads"], found["q_proj.weight"].shape[0]
    if rows % heads or found["out_proj.weight"].shape[1] != found["v_proj.weight"].shape[0]:
        raise ConversionError(f"{weights.reader.path}: {there} does not fall into {heads} heads.")
    width = rows // heads
    for name, expected in (("head_dim", width),):
        if f"{there}/{name}" in weights and weights.reader.take(f"{there}/{name}").item() != expected:
            raise ConversionError(f"{weights.reader.path}: {there}/{name} is not the {expected} of its matrices.")
    if f"{there}/queries_scale" in weights:
        found["scale"] = weights.reader.take(f"{there}/queries_scale").float()
    return found


def _widths(attentions: dict[str, dict[str, torch.Tensor]], config: dict[str, Any], weights: Weights) -> None:
    """d_k and d_v: those of the matrices, or less where an export filled heads up with zeros."""
    heads = config["num_attention_heads"]
    width = next(iter(attentions.values()))["q_proj.weight"].shape[0] // heads
    scales = {float(parts.pop("scale")) if "scale" in parts else width**-0.5 for parts in attentions.values()}
    d_k, d_v = width, width
    if len(scales) > 1:
        raise ConversionError(f"{weights.reader.path}: `queries_scale` differs between attentions.")
    (scale,) = scales
    wanted = round(scale**-2) if scale > 0 else 0
    if not math.isclose(scale, width**-0.5, rel_tol=1e-6):
        if not (0 < wanted < width and math.isclose(scale, wanted**-0.5, rel_tol=1e-6)):
            raise ConversionError(f"{weights.reader.path}: `queries_scale` is {scale:g}, not 1 / sqrt(d_k).")
        d_k = wanted
    if d_k != width or width * heads != config["d_model"]:
        empty = [_used(parts["v_proj.weight"], heads) for parts in attentions.values()]
        d_v = max([1, *empty])
    for name, parts in attentions.items():
        for part, own in (("q_proj", d_k), ("k_proj", d_k), ("v_proj", d_v)):
            for kind in ("weight", "bias"):
                if f"{part}.{kind}" in parts:
                    parts[f"{part}.{kind}"] = _cut(parts[f"{part}.{kind}"], heads, width, own, name, weights)
        parts["out_proj.weight"] = _cut(parts["out_proj.weight"].T, heads, width, d_v, name, weights).T
    if (d_k, d_v) != (width, width):
        weights.choices.append(f"Heads of {width} hold zeros beyond d_k {d_k} and d_v {d_v}, which were taken off.")
    if (d_k, d_v) != (config["d_model"] // heads,) * 2 or config["d_model"] % heads:
        config["d_k"], config["d_v"] = d_k, d_v


def _used(matrix: torch.Tensor, heads: int) -> int:
    rows = matrix.reshape(heads, -1, matrix.shape[1]).ne(0).any(dim=2).any(dim=0).nonzero()
    return int(rows.max()) + 1 if len(rows) else 0


def _cut(tensor: torch.Tensor, heads: int, width: int, own: int, name: str, weights: Weights) -> torch.Tensor:
    if own == width:
        return tensor
    by_head = tensor.reshape(heads, width, -1)
    if by_head[:, own:].any():
        raise ConversionError(f"{weights.reader.path}: {name} has heads of {width}, but scales queries as for {own}.")
    return by_head[:, :own].reshape(heads * own, *tensor.shape[1:])


# --------------------------------------------------------------------------- positions
def _positions(weights: Weights, config: dict[str, Any], found: dict[str, torch.Tensor]) -> None:
    names = [f"{side}/position_encodings/encodings" for side in ("encoder", "decoder")]
    if names[0] not in weights and names[1] not in weights:
        config.update(sinusoid_layout="halves", sinusoid_exponent="2i/(d-2)", position_offset=1)
        weights.choices.append("No positions are stored: CTranslate2 then takes halved sinusoids that start at 1.")
        return
    tables = [weights.take(name, None, config["d_model"]) for name in names]
    rows = min(len(table) for table in tables)
    config["max_position_embeddings"] = rows
    # A table in half precision is a sinusoid to within its rounding.
    tolerance = 1e-6 if weights.stored.tensors[names[0]].dtype == torch.float32 else 5e-3
    for layout in ("interleaved", "halves"):
        for exponent in ("2i/d", "2i/(d-2)"):
            for offset in (0, 1, 2):
                if exponent == "2i/(d-2)" and config["d_model"] <= 2:
                    continue
                table = sinusoid_table(rows, config["d_model"], layout, exponent, offset)
                if all((table - one[:rows]).abs().max() <= tolerance + rows * 6e-8 for one in tables):
                    config.update(sinusoid_layout=layout, sinusoid_exponent=exponent, position_offset=offset)
                    weights.has_rounded_positions = tolerance > 1e-6
                    kind = f"{layout}, {exponent}, from {offset}"
                    weights.choices.append(f"The table of positions is the sinusoid ({kind}), which needs none.")
                    return
    config["position_encoding"] = "learned"
    for side, table in zip(("encoder", "decoder"), tables, strict=True):
        found[f"model.{side}.embed_positions.weight"] = table[:rows]
