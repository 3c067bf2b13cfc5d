"""`pipefit data`: index samples of text and images, from a folder or a manifest, for runs and plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from pipefit.data.multimodal.index import IndexSummary, SampleIndex


def command(
    source: Annotated[Path, typer.Argument(help="A manifest (.jsonl, .parquet), or a folder of images with texts.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The index, a folder; NAME.jsonl: a manifest.")],
    task: str = typer.Option("caption", help="For a folder: caption (learn the texts) or generate (learn the images)."),
    tokenizer: str = typer.Option("bytes", help="`bytes`, or a local tokenizer.json."),
    model: str | None = typer.Option(
        None, help="Take the patch options from this model (named as for `pipefit plan`)."
    ),
    patch: int | None = typer.Option(None, help="Side of a patch (one token) in pixels. Default: 16, or the model's."),
    max_patches: int | None = typer.Option(
        None,
        help="Most patches of an image; larger ones are scaled down. Default: 1024, or the size of the model's table.",
    ),
    side: int | None = typer.Option(None, help="Resize every image to this many pixels square; 0: keep its shape."),
    start_token: bool | None = typer.Option(
        None, "--start-token/--no-start-token", help="Add a token in front of every image (ViT). Default: as the model."
    ),
    latent_patch: int | None = typer.Option(None, help="As --patch, for generated images."),
    max_latents: int | None = typer.Option(None, help="As --max-patches, for generated images."),
    image_token: int = typer.Option(0, help="Token id of a patch of an input image."),
    generation_token: int = typer.Option(0, help="Token id of a patch to generate."),
    on_broken: str = typer.Option("fail", help="Broken or absent images: fail, or skip their samples and report."),
    check: str = typer.Option("decode", help="Check of the images: decode (fully) or header (size only)."),
    cores: float = typer.Option(
        0.0, help="Report the cores that keep up with steps of this many seconds (see --batch)."
    ),
    batch: int = typer.Option(1, help="Samples of one step, for --cores."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Index samples of text and images for training, or write a manifest of a folder."""
    from pipefit.data.multimodal.fits import check_vocabulary, requirements_of_model, rule_for
    from pipefit.data.multimodal.folder import Task, write_manifest
    from pipefit.data.multimodal.index import GENERATE, IMAGE, Check, IndexRequest, OnBroken, make_index, open_index
    from pipefit.data.tokenizer import load_tokenizer

    chosen: Any = {"task": task, "on_broken": on_broken, "check": check}
    for name, kind in (("task", Task), ("on_broken", OnBroken), ("check", Check)):
        _require_choice(name, chosen[name], get_args(kind))
    if output.suffix == ".jsonl":
        count = write_manifest(source, output, chosen["task"])
        print(json.dumps({"samples": count}) if as_json else f"{count} samples written to {output}")
        return
    requirements = requirements_of_model(model) if model is not None else None
    if requirements is not None:
        check_vocabulary(load_tokenizer(tokenizer).vocabulary, requirements.vocabulary, "--tokenizer")
    looked = {"patch": patch, "max_patches": max_patches, "side": side, "start_token": start_token}
    request = IndexRequest(
        source=str(source),
        tokenizer=tokenizer,
        images=rule_for(requirements, IMAGE, looked),
        generated=rule_for(requirements, GENERATE, {"patch": latent_patch, "max_patches": max_latents}),
        image_token=image_token,
        generation_token=generation_token,
        **chosen,
    )
    summary = make_index(request, output)
    index = open_index(output)
    needed = _preparation_cores(index, batch, cores) if cores > 0 else None
    if as_json:
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
