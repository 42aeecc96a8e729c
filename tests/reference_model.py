"""The paper's equations as plain float64 loops over lists, written from the text and from nothing of the package."""

import math


def matvec(weight, x, bias=None):
    """y = W x + b with W as torch stores it: rows are outputs."""
    y = [sum(w * v for w, v in zip(row, x, strict=True)) for row in weight]
    return y if bias is None else [a + b for a, b in zip(y, bias, strict=True)]


def softmax(scores):
    top = max(scores)
    raised = [math.exp(s - top) for s in scores]
    return [r / sum(raised) for r in raised]


def layer_norm(x, gain, shift, eps):
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return [(v - mean) / math.sqrt(variance + eps) * g + s for v, g, s in zip(x, gain, shift, strict=True)]


def position(pos, d_model):
    """Section 3.5."""
    out = []
    for dim in range(d_model):
        angle = pos / 10000 ** ((dim - dim % 2) / d_model)
        out.append(math.sin(angle) if dim % 2 == 0 else math.cos(angle))
    return out


def multi_head(queries, memory, weights, heads, visible):
    """Section 3.2.2; `visible(t, s)` says whether query t may look at key s."""
    q = [matvec(weights["q"], x) for x in queries]
    k = [matvec(weights["k"], x) for x in memory]
    v = [matvec(weights["v"], x) for x in memory]
    d_k, d_v = len(q[0]) // heads, len(v[0]) // heads
    out = []
    for t in range(len(queries)):
        joined = []
        for h in range(heads):
            seen = [s for s in range(len(memory)) if visible(t, s)]
            query = q[t][h * d_k : (h + 1) * d_k]
            scores = [
                sum(a * b for a, b in zip(query, k[s][h * d_k : (h + 1) * d_k], strict=True)) / math.sqrt(d_k)
                for s in seen
            ]
            share = softmax(scores)
            joined += [sum(p * v[s][h * d_v + i] for p, s in zip(share, seen, strict=True)) for i in range(d_v)]
        out.append(matvec(weights["out"], joined))
    return out


def feed_forward(x, w1, b1, w2, b2):
    """Section 3.3, eq. (2)."""
    return matvec(w2, [max(0.0, v) for v in matvec(w1, x, b1)], b2)


class Reference:
    """Reads the parameters of a model by name and computes the logits of one sentence pair without padding."""

    def __init__(self, model):
        self.w = {name: tensor.double().tolist() for name, tensor in model.state_dict().items()}
        self.config = model.config

    def attention(self, queries, memory, name, visible):
        weights = {part: self.w[f"{name}.{part}_proj.weight"] for part in ("q", "k", "v", "out")}
        return multi_head(queries, memory, weights, self.config.num_attention_heads, visible)

    def wrap(self, inputs, outputs, name):
        """Section 3.1: LayerNorm(x + Sublayer(x))."""
        gain, shift = self.w[f"{name}.layer_norm.weight"], self.w[f"{name}.layer_norm.bias"]
        return [
            layer_norm([a + b for a, b in zip(x, y, strict=True)], gain, shift, self.config.layer_norm_eps)
            for x, y in zip(inputs, outputs, strict=True)
        ]

    def feed_forward(self, states, name):
        parts = [self.w[f"{name}.{part}"] for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]
        return [feed_forward(x, *parts) for x in states]

    def embed(self, ids):
        """Sections 3.4 and 3.5."""
        d_model = self.config.d_model
        return [
            [
                math.sqrt(d_model) * e + p
                for e, p in zip(self.w["model.shared.weight"][i], position(n, d_model), strict=True)
            ]
            for n, i in enumerate(ids)
        ]

    def encode(self, source_ids):
        states = self.embed(source_ids)
        for n in range(self.config.encoder_layers):
            name = f"model.encoder.layers.{n}"
            attended = self.attention(states, states, f"{name}.self_attn", lambda t, s: True)
            states = self.wrap(states, attended, f"{name}.self_attn_residual")
            states = self.wrap(
                states, self.feed_forward(states, f"{name}.feed_forward"), f"{name}.feed_forward_residual"
            )
        return states

    def logits(self, source_ids, target_ids):
        memory, states = self.encode(source_ids), self.embed(target_ids)
        for n in range(self.config.decoder_layers):
            name = f"model.decoder.layers.{n}"
            attended = self.attention(states, states, f"{name}.self_attn", lambda t, s: s <= t)
            states = self.wrap(states, attended, f"{name}.self_attn_residual")
            attended = self.attention(states, memory, f"{name}.encoder_attn", lambda t, s: True)
            states = self.wrap(states, attended, f"{name}.encoder_attn_residual")
            states = self.wrap(
                states, self.feed_forward(states, f"{name}.feed_forward"), f"{name}.feed_forward_residual"
            )
        return [matvec(self.w["model.shared.weight"], x) for x in states]
