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
    task: str = typer.Option("caption", help="Of a folder: caption (learn the texts) or generate (the images)."),
    tokenizer: str = typer.Option("bytes", help="`bytes`, or a local tokenizer.json."),
    model: str | None = typer.Option(None, help="A model, as for `pipefit plan`, that says how images are cut."),
    patch: int | None = typer.Option(None, help="Pixels of the side of a patch, one token; 16, or the model's."),
    max_patches: int | None = typer.Option(
        None, help="Larger images are scaled down to so many; 1024, or as many as the model's table has."
    ),
    side: int | None = typer.Option(None, help="Resize every image to so many pixels square; 0: keep its shape."),
    start_token: bool | None = typer.Option(
        None, "--start-token/--no-start-token", help="One more token in front of every image (ViT); or the model's."
    ),
    latent_patch: int | None = typer.Option(None, help="As --patch, of generated images."),
    max_latents: int | None = typer.Option(None, help="As --max-patches, of generated images."),
    image_token: int = typer.Option(0, help="The token id that stands for a patch that is looked at."),
    generation_token: int = typer.Option(0, help="The token id that stands for a patch to generate."),
    on_broken: str = typer.Option("fail", help="Broken or absent images: fail, or skip their samples and report."),
    check: str = typer.Option("decode", help="How images are looked at: decode (whole) or header (size only)."),
    cores: float = typer.Option(0.0, help="Say how many cores keep up with steps of so many seconds (--batch)."),
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
    print(f"tokens a sample: {middle} in the middle, {low} to {high} for 98 %, {lengths.max()} at most")
    if summary.left_out:
        print(f"{summary.left_out} samples left out for a broken or absent image, the first ones:")
        for defect in summary.reported[:5]:
            print(f"  {defect.sample} ({defect.where}): {defect.image}: {defect.reason}")
