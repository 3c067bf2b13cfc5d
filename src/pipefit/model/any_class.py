"""Models of `transformers` without a family of pipefit: the library's own class, built from a config.json.

The class is captured as a complete module (`capture/whole.py`), for one number of tokens. Its loss, as in
native language models, is the cross-entropy of the logits against labels shifted by the step plan. No code of a model's
directory is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from pipefit.errors import ModelError
from pipefit.extras import install_command
from pipefit.model.example import Example
from pipefit.model.quiet import quiet_logs

FIELDS = "library_config"
"""The field of a user model's configuration with the config.json."""

TOKENS = "tokens"
"""The field of a user model's configuration with the number of tokens of a row."""

SHARED_ELEMENTS = 1 << 24
"""Elements from which zeros share one number while a class is built without values: 64 MiB in float32."""


def library_fields(config: Mapping[str, Any], name: str, tokens: int) -> dict[str, Any] | None:
    """Return the configuration of a user's model for a config.json, None if `transformers` has no causal language model
    of its type. Raises ModelError if `transformers` is not installed."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in library_types(repr(kind)):
        return None
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    vocabulary = config.get("vocab_size", inner.get("vocab_size"))
    known = {} if vocabulary is None else {"vocab_size": vocabulary}
    return {"source": name, FIELDS: dict(config), TOKENS: tokens, **known}


def library_types(seen: str) -> frozenset[str]:
    """Return the model types of all causal language models of `transformers`. Raises ModelError if it is not
    installed."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    except ImportError:
        raise ModelError(
            "pipefit has no family for this model type, and `transformers` is not installed to give its class.",
            where="model_type",
            seen=seen,
            next_step=install_command("transformers"),
        ) from None
    return frozenset(NAMES)


def library_example(config: Mapping[str, Any], with_values: bool = True) -> Example:
    """Return the class of a user model's configuration (`library_fields`) and example inputs; parameters have initial
    values, or none and no memory. Raises ModelError if the number of tokens is not set or the class refuses its
    configuration."""
    import torch

    source, tokens = str(config.get("source", "")), int(config.get(TOKENS) or 0)
    if tokens < 1:
        raise ModelError(
            "This model is captured as one graph, for one sequence length, and the length is not set.",
            where=source,
            seen=f"model_type {config[FIELDS]['model_type']!r}, captured from the class of `transformers`",
            next_step="add --seq 1024",
        )
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    with nullcontext() if with_values else empty_parameters():
        module = build_class(config[FIELDS], source)
    fix_frequencies(module, tokens)
    return Example(module=module, inputs={"input_ids": ids, "labels": ids}, loss=token_loss)


def build_class(fields: Mapping[str, Any], where: str = "config.json") -> Any:
    """Return the causal language model of a config.json on the CPU in float32, with values of torch's generator. Raises
    ModelError with the reason of the library if it cannot be built."""
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_logs():
        try:
            config = _typed_fields(fields)
            _turn_off_caches(config)
            state = torch.random.get_rng_state()
            try:
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
            except ValueError:  # the class has no such attention
                torch.random.set_rng_state(state)
                return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        except Exception as error:  # a class may raise anything
            reason = " ".join(str(error).split())  # the library's reasons take several lines
            raise ModelError(
                "The class of `transformers` cannot be built from this configuration.",
                where=where,
                seen=f"{type(error).__name__}: {reason[:200]}",
                next_step="correct that field, or give the model as FILE.py:FUNCTION (docs/reference/models.md)",
            ) from None


def is_encoder(fields: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes an encoder: its type has the field `is_decoder`, which is false."""
    always_causal = str(fields["model_type"]).startswith("gpt_neox")
    return not always_causal and _typed_fields(fields).to_dict().get("is_decoder") is False


def _typed_fields(fields: Mapping[str, Any]) -> Any:
    """The configuration of `transformers` from the data of a config.json."""
    from transformers import CONFIG_MAPPING

    known = {name: value for name, value in fields.items() if name != "model_type"}
    return CONFIG_MAPPING[fields["model_type"]](**known)


def fix_frequencies(module: Any, tokens: int) -> None:
    """Fix the frequencies of rotary embeddings that depend on the length (`longrope`, `dynamic`) at this number of
    tokens."""
    import torch

    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        lengthy = [name for name, kind in by_layer.items() if kind == "longrope" or "dynamic" in str(kind)]
        for name in lengthy:
            with torch.no_grad():
                part(torch.zeros(1, tokens, 1), torch.arange(tokens)[None], *(() if name is None else (name,)))
        if lengthy:
            fixed = {name: "default" if name in lengthy else kind for name, kind in by_layer.items()}
            part.rope_type = fixed if isinstance(kinds, dict) else fixed[None]


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build modules whose parameters are on the meta device from the start. Buffers keep their values, because tables
    of positions and frequencies are part of the graph."""
    from torch import nn

    register = nn.Module.register_parameter

    def register_empty(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty
    try:
        with _shared_zeros():
            yield
    finally:
        nn.Module.register_parameter = register


def _shared_zeros() -> Any:
    """Return a mode of torch in which large `torch.zeros` are views of one element, so that nothing is written: a
    class may make its parameters by them."""
    import torch
    from torch.overrides import TorchFunctionMode

    class SharedZeros(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.zeros and kwargs.keys() <= {"dtype", "device"}:
                shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
                if math.prod(shape) >= SHARED_ELEMENTS:
                    return function(1, **kwargs).expand(shape)
            return function(*args, **kwargs)

    return SharedZeros()


def _turn_off_caches(config: Any) -> None:
    """Set `use_cache` of a configuration and its parts to False: training keeps no keys and values."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if hasattr(part, "use_cache"):
            part.use_cache = False


def token_loss(result: Any, labels: Any) -> Any:
    """Return the mean cross-entropy of a result's logits, over labels other than -100."""
    from torch.nn import functional

    return functional.cross_entropy(result.logits.float().flatten(0, 1), labels.flatten())
