"""`pipefit data`: index samples of text and images, from a folder or a manifest, for runs and plans."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pipefit.cli._options import takes_options

if TYPE_CHECKING:
    from pipefit.data.multimodal.index import IndexSummary, SampleIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Options of `pipefit data`."""

    source: Path
    "A manifest (.jsonl, .parquet), or a folder of images with texts."
    output: Path
    "The index, a folder; NAME.jsonl: a manifest."
    task: str = "caption"
    "For a folder: caption (learn the texts) or generate (learn the images)."
    tokenizer: str = "bytes"
    "`bytes`, or a local tokenizer.json."
    model: str | None = None
    "Take the patch options from this model (named as for `pipefit plan`)."
    patch: int | None = None
    "Side of a patch (one token) in pixels. Default: 16, or the model's."
    max_patches: int | None = None
    "Most patches of an image; larger ones are scaled down. Default: 1024, or the size of the model's table."
    side: int | None = None
    "Resize every image to this many pixels square; 0: keep its shape."
    start_token: bool | None = None
    "Add a token in front of every image (ViT). Default: as the model."
    latent_patch: int | None = None
    "As --patch, for generated images."
    max_latents: int | None = None
    "As --max-patches, for generated images."
    image_token: int = 0
    "Token id of a patch of an input image."
    generation_token: int = 0
    "Token id of a patch to generate."
    on_broken: str = "fail"
    "Broken or absent images: fail, or skip their samples and report."
    check: str = "decode"
    "Check of the images: decode (fully) or header (size only)."
    cores: float = 0.0
    "Report the cores that keep up with steps of this many seconds (see --batch)."
    batch: int = 1
    "Samples of one step, for --cores."
    as_json: bool = False
    "Print the summary as JSON."


@takes_options(DataOptions, arguments=("source",), flags={"output": ("-o", "--output")})
def command(options: DataOptions) -> None:
    """Index samples of text and images for training, or write a manifest of a folder."""
    from pipefit.data.multimodal.fits import check_vocabulary, requirements_of_model, rule_for
    from pipefit.data.multimodal.folder import Task, write_manifest
    from pipefit.data.multimodal.index import GENERATE, IMAGE, Check, IndexRequest, OnBroken, make_index, open_index
    from pipefit.data.tokenizer import load_tokenizer

    output, model = options.output, options.model
    chosen: Any = {"task": options.task, "on_broken": options.on_broken, "check": options.check}
    for name, kind in (("task", Task), ("on_broken", OnBroken), ("check", Check)):
        _require_choice(name, chosen[name], get_args(kind))
    if output.suffix == ".jsonl":
        count = write_manifest(options.source, output, chosen["task"])
        print(json.dumps({"samples": count}) if options.as_json else f"{count} samples written to {output}")
        return
    requirements = requirements_of_model(model) if model is not None else None
    if requirements is not None:
        check_vocabulary(load_tokenizer(options.tokenizer).vocabulary, requirements.vocabulary, "--tokenizer")
    looked = {name: getattr(options, name) for name in ("patch", "max_patches", "side", "start_token")}
    generated = {"patch": options.latent_patch, "max_patches": options.max_latents}
    request = IndexRequest(
        source=str(options.source),
        tokenizer=options.tokenizer,
        images=rule_for(requirements, IMAGE, looked),
        generated=rule_for(requirements, GENERATE, generated),
        image_token=options.image_token,
        generation_token=options.generation_token,
        **chosen,
    )
    summary = make_index(request, output)
    index = open_index(output)
    needed = _preparation_cores(index, options.batch, options.cores) if options.cores > 0 else None
    if options.as_json:
        from pipefit.codec import to_data

        print(json.dumps({**to_data(summary), **({"cores": to_data(needed)} if needed is not None else {})}))
        return
    _print_summary(summary, index)
    if needed is not None:
        print(needed.to_text())


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    from pipefit.errors import DataError

    if value not in allowed:
        option = "--" + name.replace("_", "-")
        raise DataError(f"There is no such {option}.", where=option, seen=value, allowed=", ".join(allowed))


def _preparation_cores(index: SampleIndex, batch: int, step_s: float) -> Any:
    from pipefit.data.multimodal.sample_rows import lengths_of, rows_of_index
    from pipefit.data.preparation.cores import cores_needed, measured_rate

    rows = rows_of_index(index, int(lengths_of(index).max()))
    return cores_needed(index, rows, batch, step_s, measured_rate(index))


def _print_summary(summary: IndexSummary, index: SampleIndex) -> None:
    import numpy as np

    from pipefit.data.multimodal.sample_rows import lengths_of

    lengths = lengths_of(index)
    print(f"{summary.samples} samples, {summary.images} images ({summary.image_bytes / 1e6:.1f} MB) in {index.folder}")
    low, middle, high = (int(np.percentile(lengths, share)) for share in (1, 50, 99))
    print(f"tokens per sample: median {middle}, {low} to {high} for 98 %, at most {lengths.max()}")
    if summary.left_out:
        print(f"{summary.left_out} samples left out for a broken or absent image, the first ones:")
        for defect in summary.reported[:5]:
            print(f"  {defect.sample} ({defect.where}): {defect.image}: {defect.reason}")
