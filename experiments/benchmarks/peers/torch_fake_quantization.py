"""Peer: FP8 fake quantization of transformers' Llama, written from the definitions, in float32.

It shares no code with what it checks. A scale is amax / 448 in float32, a value x / scale is
rounded by torch's cast to float8_e4m3fn, and the product is that of the dequantized operands. A
block at an edge is shorter; one of zeros has the scale 1. What is quantized are the linears of the
layers: not the embeddings, the norms, the head, nor anything of the attention.

Each sequence is a forward of its own, without padding.

    {"score": VARIANT}    log-probabilities of the completions' tokens, a list a sequence, and the
                          medians over tokens of the hidden states' relative error, by layer
    {"errors": SEED}      what quantization does at the inputs of the unquantized forward
    {"accumulated": true} errors of inputs and outputs of the linears of the quantized forward
    {"gaussian": SEED}    the same of independent normal numbers
    {"codes": FILE, "sequences": [..]}    inputs, codes and scales, for a comparison bit for bit

A VARIANT is null (nothing quantized), or {"kinds": [..], "layers": [..], "weights": BLOCK,
"activations": BLOCK, "power_of_two": .., "inverse": ..}; a BLOCK is [rows, columns], "tensor" for
one scale, or null where nothing is quantized. Activations per tensor have a scale a sequence. With
"moved": [SEED, SIZE] what the embedding gives is multiplied by 1 + SIZE * normal numbers.
"""

import numpy as np
import torch
from link import Link
from transformers import LlamaForCausalLM

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LARGEST = 448.0
WEIGHTS, ACTIVATIONS = [128, 128], [1, 128]
ABOVE = 0.05
"""Products of tokens with a larger error are looked at by themselves."""


def main():
    link = Link()
    torch.set_num_threads(link.settings["threads"])
    torch.set_grad_enabled(False)
    peer = Peer(link.settings)
    link.ready(("torch", "transformers", "numpy"), {"attention": peer.attention})
    for request in link:
        if "score" in request:
            link.answer(peer.score(request["score"]))
        elif "errors" in request:
            link.answer(peer.errors(request["errors"]))
        elif "accumulated" in request:
            link.answer(peer.accumulated())
        elif "gaussian" in request:
            link.answer(gaussian(request["gaussian"]))
        else:
            link.answer(peer.codes(request["codes"], request["sequences"]))


def by_block(x, block):
    """[rows of blocks, rows, columns of blocks, columns]; zeros fill the last blocks."""
    m, n = x.shape
    bm, bn = (m, n) if block == "tensor" else block
    wide = torch.nn.functional.pad(x, (0, -n % bn, 0, -m % bm))
    return wide.view(-(-m // bm), bm, -(-n // bn), bn)


def quantize(x, block, power_of_two=False, inverse=False):
    """Codes [m, n] in float8_e4m3fn, and scales of the blocks.

    With `inverse` amax is multiplied by 1 / 448, and x by 1 / scale, where the definition divides:
    the same but for roundings.
    """
    blocks = by_block(x, block)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scales = amax * torch.tensor(1 / LARGEST) if inverse else amax / LARGEST
    if power_of_two:
        fraction, exponent = torch.frexp(scales)  # fraction in [0.5, 1)
        exponent = exponent - (fraction == 0.5).to(exponent.dtype)
        scales = torch.ldexp(torch.ones_like(scales), exponent)
    scales = torch.where(amax == 0, torch.ones_like(scales), scales)
    scaled = blocks * (1 / scales) if inverse else blocks / scales
    codes = scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    rows, columns = scaled.shape[0] * scaled.shape[1], scaled.shape[2] * scaled.shape[3]
    codes = codes.view(torch.uint8).reshape(rows, columns)[: x.shape[0], : x.shape[1]]
    return codes.contiguous().view(torch.float8_e4m3fn), scales[:, 0, :, 0]


def fake(x, block, **rule):
    """What x is after quantization, float32."""
    codes, scales = quantize(x, block, **rule)
    blocks = by_block(codes.float(), block) * scales[:, None, :, None]
    rows, columns = blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3]
    return blocks.reshape(rows, columns)[: x.shape[0], : x.shape[1]]


class Peer:
    """The model, and what is asked of it.

    Args:
        settings: `model`, a directory; `sequences`, token ids; `prompt_lengths`.
    """

    def __init__(self, settings):
        self.model = LlamaForCausalLM.from_pretrained(settings["model"], dtype=torch.float32).eval()
        self.attention = self.model.config._attn_implementation
        self.sequences = [torch.tensor([tokens]) for tokens in settings["sequences"]]
        self.starts = settings["prompt_lengths"]
        self.linears = [
            {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
            for layer in self.model.model.layers
        ]
        self.weights = [{k: of[k].weight.detach().clone() for k in KINDS} for of in self.linears]
        self.exact = None  # hidden states of the unquantized forward

    def score(self, variant):
        handles = self._quantize(variant) if variant else []
        logprobs, hidden = [], []
        for tokens, start in zip(self.sequences, self.starts, strict=True):
            out = self.model(tokens, use_cache=False, output_hidden_states=True)
            logits = out.logits[0, start - 1 : -1].log_softmax(-1)
            logprobs.append(logits.gather(1, tokens[0, start:, None])[:, 0].tolist())
            hidden.append(torch.stack([x[0] for x in out.hidden_states[1:-1]], 1))  # [t, layers, h]
        for handle in handles:
            handle.remove()
        for of, weights in zip(self.linears, self.weights, strict=True):
            for kind in KINDS:
                of[kind].weight.data = weights[kind]
        hidden = torch.cat(hidden)
        if variant is None:
            self.exact = hidden
            size = hidden.square().mean(-1).sqrt()
            return {
                "logprobs": logprobs,
                "rms": size.median(0).values.tolist(),
                "largest": hidden.abs().amax((0, 2)).tolist(),
            }
        error = norm(hidden - self.exact) / norm(self.exact)
        return {"logprobs": logprobs, "hidden_error": error.median(0).values.tolist()}

    def _quantize(self, variant):
        """Quantized weights in the model's place, and hooks that quantize the inputs."""
        rule, handles = {name: variant[name] for name in ("power_of_two", "inverse")}, []

        def before(module, inputs):
            (x,) = inputs
            return (fake(x[0], variant["activations"], **rule)[None],)

        if "moved" in variant:
            seed, size = variant["moved"]
            made = torch.Generator().manual_seed(seed)

            def move(module, inputs, out):
                return out * (1 + size * torch.randn(out.shape, generator=made))

            handles.append(self.model.model.embed_tokens.register_forward_hook(move))
        for i in variant["layers"]:
            for kind in variant["kinds"]:
                module = self.linears[i][kind]
                if variant["weights"]:
                    weight = fake(self.weights[i][kind], variant["weights"], **rule)
                    module.weight.data = weight
                if variant["activations"]:
                    handles.append(module.register_forward_pre_hook(before))
        return handles

    def errors(self, seed):
        """Per kind and layer, each by token: see `Sums`."""
        made = torch.Generator().manual_seed(seed)
        found = {kind: [] for kind in KINDS}
        handles = []
        for of, weights in zip(self.linears, self.weights, strict=True):
            for kind in KINDS:
                sums = Sums(weights[kind], made)
                found[kind].append(sums)
                handles.append(of[kind].register_forward_pre_hook(sums))
        for tokens in self.sequences:
            self.model.model(tokens, use_cache=False)
        for handle in handles:
            handle.remove()
        return {kind: summary(layers) for kind, layers in found.items()}

    def accumulated(self):
        """Medians over the tokens of all layers, and by layer, a kind each.

        The unquantized and the quantized forward go side by side, as the two rows of a batch.
        """
        found = {kind: {"inputs": [], "outputs": []} for kind in KINDS}
        replaced = []
        for of, weights in zip(self.linears, self.weights, strict=True):
            for kind in KINDS:
                kept = {name: [] for name in found[kind]}
                for name, rows in kept.items():
                    found[kind][name].append(rows)
                of[kind].forward = both_ways(weights[kind], kept)
                replaced.append(of[kind])
        for tokens in self.sequences:
            self.model.model(tokens.expand(2, -1), use_cache=False)
        for module in replaced:
            del module.forward
        answer = {}
        for kind, parts in found.items():
            layers = {name: [torch.cat(rows) for rows in kept] for name, kept in parts.items()}
            answer[kind] = {name: float(torch.cat(x).median()) for name, x in layers.items()}
            answer[kind]["outputs_by_layer"] = [float(x.median()) for x in layers["outputs"]]
        return answer

    def codes(self, path, chosen):
        """Write inputs, codes and scales of the linears to an npz file.

        By layer, kind, and scale rule; q, k and v have one input, and gate and up have.
        """
        inputs, handles = {}, []
        for i, of in enumerate(self.linears):
            for kind in ("q_proj", "o_proj", "gate_proj", "down_proj"):
                kept = inputs[f"{i}.{kind}"] = []
                handles.append(
                    of[kind].register_forward_pre_hook(lambda _, x, kept=kept: kept.append(x[0][0]))
                )
        for number in chosen:
            self.model.model(self.sequences[number], use_cache=False)
        for handle in handles:
            handle.remove()
        arrays = {}
        for name, parts in inputs.items():
            x = torch.cat(parts)
            arrays[f"x.{name}"] = x.numpy()
            arrays |= ways(f"activation.{name}", x, ACTIVATIONS)
        for i, weights in enumerate(self.weights):
            for kind in KINDS:
                arrays |= ways(f"weight.{i}.{kind}", weights[kind], WEIGHTS)
        np.savez(path, **arrays)
        return {"arrays": len(arrays)}


def ways(name, x, block):
    """Codes and scales by each rule, and by float32 with inverses."""
    arrays = {}
    for way, rule in {
        "float32": {},
        "power_of_two": {"power_of_two": True},
        "inverse": {"inverse": True},
    }.items():
        codes, scales = quantize(x, block, **rule)
        arrays[f"{way}.codes.{name}"] = codes.view(torch.uint8).numpy()
        arrays[f"{way}.scales.{name}"] = scales.numpy()
    return arrays


def both_ways(weight, kept):
    """A linear's forward of two rows, the second quantized; errors of each token go to `kept`."""
    quantized = fake(weight, WEIGHTS)

    def forward(x):
        y = torch.stack([x[0] @ weight.T, fake(x[1], ACTIVATIONS) @ quantized.T])
        for name, (exact, other) in {"inputs": x, "outputs": y}.items():
            kept[name].append(norm(other - exact) / norm(exact))
        return y

    return forward


def norm(x):
    return x.square().sum(-1).sqrt()


class Sums:
    """Squared norms, a token each, at one linear: a hook before its forward.

    x and w are the exact operands, X and W the quantized ones, y = w x. Names end in what is
    squared and summed over the outputs (or inputs):

        x, x_error         x, and X - x
        y                  y
        both, weights, activations    W X - y, W x - y, w X - y
        terms              |x_k w_jk| over all k and j
        terms_weights, terms_activations    |x_k (W - w)_jk|, |(X - x)_k w_jk|: what the errors of
                           a product would add up to if its terms' errors were independent
        fourth             x to the fourth, over x's square: how many channels carry the input
        signs_y, signs_both, signs_weights, signs_activations    the products again, with the signs
                           of x drawn at random: same magnitudes, same errors, no cancellation
    """

    def __init__(self, weight, made):
        self.weight, self.quantized = weight, fake(weight, WEIGHTS)
        self.delta = self.quantized - weight
        self.columns = weight.square().sum(0)
        self.delta_columns = self.delta.square().sum(0)
        self.made = made
        self.rows = []

    def __call__(self, module, inputs):
        x = inputs[0][0]
        error = fake(x, ACTIVATIONS) - x
        square = x.square()
        row = {
            "x": square.sum(-1),
            "x_error": error.square().sum(-1),
            "terms": square @ self.columns,
            "terms_weights": square @ self.delta_columns,
            "terms_activations": error.square() @ self.columns,
            "fourth": square.square().sum(-1),
        }
        row |= self._products(x, error, "")
        signs = torch.randint(0, 2, x.shape, generator=self.made) * 2.0 - 1
        row |= self._products(x * signs, error * signs, "signs_")
        self.rows.append(torch.stack(list(row.values())))
        self.names = list(row)

    def _products(self, x, error, prefix):
        of_weights, of_activations = x @ self.delta.T, error @ self.weight.T
        products = {
            "y": x @ self.weight.T,
            "weights": of_weights,
            "activations": of_activations,
            "both": of_weights + of_activations + error @ self.delta.T,
        }
        return {prefix + name: y.square().sum(-1) for name, y in products.items()}

    def table(self):
        return dict(zip(self.names, torch.cat(self.rows, 1), strict=True))


RATIOS = {
    "activations": ("x_error", "x"),
    "product": ("both", "y"),
    "product_of_quantized_weights": ("weights", "y"),
    "product_of_quantized_activations": ("activations", "y"),
    "cancellation": ("terms", "y"),
    "terms_of_weights": ("terms_weights", "terms"),
    "terms_of_activations": ("terms_activations", "terms"),
    "random_signs": ("signs_both", "signs_y"),
    "random_signs_of_quantized_weights": ("signs_weights", "signs_y"),
    "random_signs_of_quantized_activations": ("signs_activations", "signs_y"),
}
"""Relative errors and other ratios, as roots of sums of squares."""


def summary(layers):
    """Of one kind: medians over the tokens of all layers, and the roots of ratios of all tokens'
    sums in a layer, of which the median over layers is taken."""
    tables = [sums.table() for sums in layers]
    whole = {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
    independent = (whole["terms_weights"] + whole["terms_activations"]) / whole["y"]
    ratio = {name: (whole[a] / whole[b]).sqrt() for name, (a, b) in RATIOS.items()}
    ratio["product_if_independent"] = independent.sqrt()
    ratio["channels"] = whole["x"].square() / whole["fourth"]
    above = ratio["product"] > ABOVE
    by_layer = [float((t["both"] / t["y"]).sqrt().median()) for t in tables]
    worst = max(range(len(by_layer)), key=by_layer.__getitem__)
    worst_ratios = ("product", "cancellation", "terms_of_weights", "terms_of_activations")
    of_worst = {
        name: float(
            (tables[worst][RATIOS[name][0]] / tables[worst][RATIOS[name][1]]).sqrt().median()
        )
        for name in (*worst_ratios, "random_signs")
    }
    weights = [(sums.delta.square().sum() / sums.weight.square().sum()).sqrt() for sums in layers]
    top = [table["y"].max() / table["y"].sum() for table in tables]
    top_inputs = [table["x"].max() / table["x"].sum() for table in tables]
    return {
        "weights": float(torch.stack(weights).median()),
        "median": {name: float(of.median()) for name, of in ratio.items()},
        "all_tokens": {
            name: float(torch.stack([(t[a].sum() / t[b].sum()).sqrt() for t in tables]).median())
            for name, (a, b) in RATIOS.items()
        },
        "by_layer": by_layer,
        "all_tokens_by_layer": [float((t["both"].sum() / t["y"].sum()).sqrt()) for t in tables],
        "worst_layer": {"layer": worst} | of_worst,
        "above": {
            "limit": ABOVE,
            "share": float(above.float().mean()),
            **{
                name: float(ratio[name][above].median()) if above.any() else None
                for name in (*worst_ratios, "random_signs", "product_if_independent")
            },
        },
        "largest_token": {
            "of_inputs": float(torch.stack(top_inputs).median()),
            "of_products": float(torch.stack(top).median()),
        },
    }


def gaussian(seed):
    """Relative RMS errors of independent normal operands, 1024 x 2048 and 2048 x 2048."""
    made = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(size, 2048, generator=made) for size in (1024, 2048))
    sums = Sums(w, made)
    sums(None, (x[None],))
    return {"of": [len(x), *w.shape]} | summary([sums])


if __name__ == "__main__":
    main()
