"""Options of the projector between an image encoder and a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipefit.model.families.decoder.options import NormOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorOptions:
    """One projector: by options the encoder's last norm, the mean of a token's patches, a norm, and linear layers."""

    activation: str = "gelu"
    encoder_norm: bool = True
    "Whether the encoder's last norm is applied first."
    encoder_norm_kind: Literal["layer", "rms"] = "layer"
    patches: Literal["joined", "mean"] = "joined"
    "Features of a token of several patches: theirs one after the other, or their mean."
    norm: NormOptions | None = None
    "The norm of the features in front of the linear layers."
    layers: int = 2
    "Linear layers: two with the activation between them, or one."
    keeps_width: bool = False
    "Whether the first of two linear layers has as many outputs as inputs, instead of those of the language model."
    bias: bool = True
