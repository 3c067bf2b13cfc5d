"""Small whole models for the tests: HAP's four as a user writes them, and those of transformers, without dropout."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from pipefit.model.example import Example

MODELS = Path(__file__).parents[2] / "examples" / "models"
TOKENS = 11
VOCABULARY = 48


def load(name: str) -> Any:
    """A file of examples/models as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vgg(dropout: float = 0.0) -> Example:
    vgg = load("vgg")
    return vgg.example(vgg.VGG(8, width=1 / 16, hidden=32, dropout=dropout), 8)


def vit() -> Example:
    vit = load("vit")
    return vit.example(vit.ViT(8, 8, 4, 24, 4, 2), 8)


class UNet(torch.nn.Module):
    """Images down and up again with a skip: norms by groups and channels, transposed convolutions, pooling, resizing.
    With `rolled`, a function that has no rule stands in its middle."""

    def __init__(self, rolled: bool = False) -> None:
        super().__init__()
        nn, self.rolled = torch.nn, rolled
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm, self.act = nn.GroupNorm(8, 16), nn.PReLU(16)
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)
        self.apart, self.fine = nn.InstanceNorm2d(8, affine=True), nn.ConvTranspose2d(8, 8, 2, groups=8)
        self.pool, self.head = nn.AdaptiveMaxPool2d(2), nn.Linear(8 * 4, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stem = torch.nn.functional.silu(self.stem(images))
        x = self.act(self.norm(self.down(stem)))
        x = torch.roll(x, 1, 2) if self.rolled else x
        x = self.apart(self.up(x) + stem)
        x = torch.nn.functional.interpolate(self.fine(x), scale_factor=2)
        return self.head(self.pool(x).flatten(1))  # type: ignore[no-any-return]


def unet(rolled: bool = False) -> Example:
    inputs = {"images": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    return Example(module=UNet(rolled), inputs=inputs, loss=torch.nn.functional.cross_entropy)


def bert(dropout: float = 0.0, **changes: Any) -> Example:
    from transformers import BertConfig

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=dropout,
                        attention_probs_dropout_prob=dropout, **{**SMALL, **changes})  # fmt: skip
    return load("bert").example(config, TOKENS)


def bert_moe() -> Example:
    moe = load("bert_moe")
    return moe.example(moe.BertMoe(VOCABULARY, TOKENS, 24, 4, 2, experts=8), TOKENS)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 48}
"""Eight heads: one for each of eight devices."""


def causal(name: str, config: str, **fields: Any) -> Example:
    """A language model of transformers with its own (shifted) loss."""
    import transformers

    made = getattr(transformers, config)(vocab_size=VOCABULARY, **fields)
    ids = torch.zeros(2, TOKENS, dtype=torch.int64)
    return Example(module=getattr(transformers, name)(made), inputs={"input_ids": ids, "labels": ids})


def gpt2() -> Example:
    return causal("GPT2LMHeadModel", "GPT2Config", n_positions=32, n_embd=32, n_layer=2, n_head=8, resid_pdrop=0.0,
                  embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip


def llama() -> Example:
    return causal("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=4, **SMALL)


def qwen3() -> Example:
    return causal("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=4, head_dim=6, **SMALL)


def hugging_vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=8, patch_size=4, num_labels=8, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0, **SMALL)  # fmt: skip
    inputs = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    return Example(module=ViTForImageClassification(config), inputs=inputs)


HAP = {"vgg": vgg, "vit": vit, "bert": bert, "bert_moe": bert_moe}
OTHERS = {"gpt2": gpt2, "llama": llama, "qwen3": qwen3, "hugging_vit": hugging_vit, "unet": unet}


def random_inputs(example: Example, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Numbers for the inputs of an example, so many rows; float64."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in example.inputs.items():
        shape = (rows, *value.shape[1:])
        if value.is_floating_point():
            found[name] = torch.randn(shape, generator=draw, dtype=torch.float64)
        else:
            found[name] = torch.randint(0, 8, shape, generator=draw)
    return found


def count_of_labels(example: Example, inputs: dict[str, torch.Tensor]) -> int:
    """What the mean of the model's loss divides by: causal models look one token ahead."""
    labels = inputs["labels"]
    shifted = "Causal" in type(example.module).__name__ or "LMHead" in type(example.module).__name__
    return int(labels[:, 1:].numel() if shifted else labels.numel())
