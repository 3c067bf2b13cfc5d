"""How much less the head needs at its worst moment when sequences come in slices: measured on the last stage.

The last stage of a model (norm, head, loss) makes logits of rows x tokens x vocabulary: cut into s slices, of a part
of the tokens. It is run forward and backward, slice by slice, one slice at a time as 1F1B does on the last stage, and
the CPU allocator's own record (PyTorch's profiler) gives what is alive at the worst moment, beside the parameters and
gradient buffers. Beside it the planner's count of the same (`cost/memory/stage.py`).

    python -m benchmarks.token_slices.head_memory [--quick] [--json PATH]
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from pipefit.run.stage.program import StageSetup

LIMIT = 0.02
"""The most that count and measurement may differ."""

TABLE = TextTable(
    ("slices", ">7"), ("logits MiB", ">12"), ("measured MiB", ">14"), ("counted MiB", ">13"), ("differ", ">9"),
    ("share", ">8"),
)  # fmt: skip


def main() -> int:
    return run_benchmark(benchmark_parser(__doc__, quick="a small vocabulary and short sequences"), measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the peaks of all numbers of slices."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = {"tokens": 256, "width": 32, "vocabulary": 4096} if arguments.quick else {}
    result = {"limit": LIMIT, **head_peaks(**sizes)}
    print_table(result)
    return Outcome(result, passed=all(row["difference"] <= LIMIT for row in result["rows"]))


def head_peaks(
    rows: int = 1,
    tokens: int = 2048,
    width: int = 64,
    vocabulary: int = 32000,
    counts: tuple[int, ...] = (1, 2, 4, 8, 16),
    dtype: str = "float32",
) -> dict[str, Any]:
    """{rows, tokens, ..., "rows": [{slices, logits_bytes, peak_bytes, counted_bytes, difference, share}]}.

    `peak_bytes` is measured; `share` is that of the uncut sequence's.
    """
    table = [_one(rows, tokens, width, vocabulary, count, dtype) for count in counts]
    for row in table:
        row["share"] = row["peak_bytes"] / table[0]["peak_bytes"]
    sizes = {"batch_rows": rows, "tokens": tokens, "width": width, "vocabulary": vocabulary, "dtype": dtype}
    return {**sizes, "rows": table}


def _one(rows: int, tokens: int, width: int, vocabulary: int, slices: int, dtype: str) -> dict[str, Any]:
    import torch

    from pipefit.cluster import parse_spec
    from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
    from pipefit.cost.compute.roofline import RooflineCosts
    from pipefit.cost.memory.stage import stage_memory
    from pipefit.run.stage.memory_audit import AllocationAudit
    from pipefit.run.stage.program import StageLayer, StageProgram
    from pipefit.run.stage_inputs import StageInputs

    model = _model(width, vocabulary)
    layers = [
        StageLayer(layer.name, model.layer_graph(layer), layer.parameters)
        for layer in model.layers
        if layer.name in ("head", "loss")
    ]
    program = StageProgram(layers, StageSetup(dtype=getattr(torch, dtype), slices=slices))
    program.bind_gradients({name: torch.zeros_like(value) for name, value in program.parameters.items()})
    program.begin_step(0, rows * tokens)
    assert tokens % slices == 0, "equal slices"
    part = tokens // slices
    x = torch.randn(rows, part, width, dtype=getattr(torch, dtype))
    feed = StageInputs(labels=torch.zeros(rows, part, dtype=torch.int64), rows=torch.arange(rows))
    with AllocationAudit() as audit:
        for index in range(slices):
            program.forward(0, index, {"": x}, feed)
            program.backward(0, index, {})
    kind = parse_spec("1xA100-80").kinds["A100-80"]
    place = MicrobatchShape(rows, part, 0, part)
    memory = stage_memory([RooflineCosts().layer_cost(LayerQuery(layer.graph, place, kind, dtype)) for layer in layers])
    counted = memory.saved_bytes + max(memory.passing["F"], memory.passing["B"]) - x.nbytes  # x is made outside
    return {
        "slices": slices,
        "logits_bytes": rows * part * vocabulary * x.itemsize,
        "peak_bytes": audit.peak_bytes,
        "counted_bytes": counted,
        "difference": abs(counted / audit.peak_bytes - 1),
    }


def _model(width: int, vocabulary: int) -> Any:
    """A Llama of one layer, of which only the head and the loss are run."""
    from pipefit.model.capture.layers import capture_family
    from pipefit.model.registry import describe_config

    config = {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": width,
        "num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    described = describe_config(config, "head", "head")
    return capture_family(described.family, described.config)


def print_table(result: dict[str, Any]) -> None:
    print(
        f"head and loss of {result['batch_rows']} x {result['tokens']} tokens, vocabulary {result['vocabulary']}, "
        f"{result['dtype']}: bytes alive at the worst moment"
    )
    TABLE.print_head()
    for row in result["rows"]:
        sizes = (f"{row[name] / 2**20:.2f}" for name in ("logits_bytes", "peak_bytes", "counted_bytes"))
        TABLE.print_row(row["slices"], *sizes, f"{row['difference']:.2%}", f"{row['share']:.1%}")


if __name__ == "__main__":
    sys.exit(main())
