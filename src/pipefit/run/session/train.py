"""One rank of `pipefit train`: from the plan file to final weights.

User input is checked before any file is written. Rank 0 captures the model and sends the graphs to the other ranks
through the store; the first rank of every host prepares the corpus.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipefit import __version__, codec
from pipefit.data.corpus import open_prepared, prepare_corpus
from pipefit.data.multimodal.broken import BrokenSinceError, merge_broken
from pipefit.data.multimodal.sample_rows import SampleRows
from pipefit.data.prepared import Corpus, CorpusRequest
from pipefit.data.rows import RowSplit
from pipefit.errors import RunError
from pipefit.lab import pace
from pipefit.model.graph import Model
from pipefit.plan.assemble.packed_rows import CONDITIONS, frozen_layers
from pipefit.plan.types import Plan
from pipefit.precision import PRODUCT_TYPE
from pipefit.run.checkpoint import checkpoint
from pipefit.run.config import TrainConfig
from pipefit.run.inputs.feeding import BatchSource, SampleBatchSource, TextBatchSource
from pipefit.run.inputs.image_feeding import ImageBatchSource, is_multimodal, mean_sizes, open_images
from pipefit.run.session.faults import injected_fault, name_ranks
from pipefit.run.session.metrics import MeasuredStep, RunLog, StepWork, find_peak, step_metrics
from pipefit.run.session.process_use import ProcessUse
from pipefit.run.session.rendezvous import World
from pipefit.run.session.resume import resume_run
from pipefit.run.session.run_folder import check_run_dir, open_run_dir
from pipefit.run.session.staleness import check_cluster, check_model, planned_model
from pipefit.run.session.weights import (
    FINAL_WORDS,
    check_adapter_options,
    resolve_weights,
    save_final,
    start_lines,
    weights_value,
)
from pipefit.run.session.write_errors import write_errors
from pipefit.run.stage.user_module import UserModel, first_values, load_user_model, reads_text, user_samples
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.evaluation import LaneEvaluation
from pipefit.run.worker.state import all_pieces
from pipefit.run.worker.worker import StepResult, Worker


class TrainingRun:
    """A run on this rank, ready to step. The constructor writes no files."""

    def __init__(self, plan: Plan, config: TrainConfig, world: World) -> None:
        check_adapter_options(plan, config)
        config = replace(config, weights=resolve_weights(plan, config.weights))
        self.plan, self.config, self.world = plan, config, world
        optimizer = config.optimizer if config.optimizer.steps else replace(config.optimizer, steps=config.steps)
        world.share_text("cluster", lambda: str(check_cluster(plan, config.plan, config.cluster) is not None))
        world.share_text("sources", lambda: str(check_model(plan, config.weights)))
        self.model = shared_model(plan, world)
        self.given = load_user_model(plan)
        if self.given is not None and config.weights:
            self.given = first_values(self.given, config.weights, plan.model.config)
        self.feeding = shared_batch_source(plan, self.model, self.given, config, world)
        try:
            self._prepare_run(optimizer)
        except BaseException:
            self.feeding.close()
            raise

    def _prepare_run(self, optimizer: OptimizerConfig) -> None:
        """Build the worker and its state once the batch source, with its worker processes, is open."""
        plan, config, world = self.plan, self.config, self.world
        world.require_agreement("corpus", self.feeding.digest, corpus_mismatch)
        self.process_use = ProcessUse(world.device, world.local_size)
        value = weights_value(plan, self.model, config.weights, config.adapter) if config.weights else None
        self.worker = build_worker(plan, self.model, CommGroups(world.device), world.device, optimizer, value=value)
        elements = sum(bucket.owned[1] - bucket.owned[0] for bucket in self.worker.buckets)
        self.worker.skips_infinite |= config.nonfinite == "skip"
        self.worker.pace = pace.step_pacer(elements, self.worker.optimizer)
        self.flops = model_flops(self.model, plan, self.feeding.rows)
        self.start = resume_run(self.worker, plan, config, self.feeding, world) if config.resume else 0
        self._save_group = world.own_group() if config.async_save else world.cpu_group
        self._pending: checkpoint.PendingSave | None = None
        self._fault = injected_fault()
        self.done = self._saved = self.start
        "Completed steps, and completed steps at the last checkpoint."
        self.data_s = 0.0
        "Seconds spent preparing the data of the last step."
        self.final = Path()
        "Folder of the final weights, once they are written."

    def train_steps(self, log: RunLog | None, directory: Path) -> None:
        """Run all remaining steps, with evaluations, checkpoints and final weights as configured. Before it raises that
        images are broken it saves a checkpoint: all ranks know of it, between two steps."""
        try:
            self._train_loop(log, directory)
        except BrokenSinceError:
            if self.done != self._saved:
                self.save_state(self.done, directory)
            self.wait_for_save()
            raise

    def _train_loop(self, log: RunLog | None, directory: Path) -> None:
        config, last = self.config, self.config.steps
        peak = find_peak(self.world.device, PRODUCT_TYPE[self.plan.job.precision], self.world.local_size)
        job, devices = self.plan.job, len(self.plan.used_devices)
        work = StepWork(tokens=job.batch * job.sequence, flops=self.flops, devices=devices, peak=peak)
        if log is not None:
            log.write_line(f"peak FLOP/s used for mfu: {peak.flops_per_s:.3g} per device ({peak.source})")
            for line in start_lines(self.plan, self.model, config, self.given):
                log.write_line(line)
            if isinstance(self.feeding, ImageBatchSource) and self.feeding.rows.too_long:
                log.write_line(f"samples left out, longer than the sequence: {self.feeding.rows.too_long}")
            for note in self.feeding.notes if isinstance(self.feeding, TextBatchSource) else ():
                log.write_line(note)
        since, steps, data_s = time.perf_counter(), 0, 0.0
        for step in range(self.start, last):
            self.worker.tracing = config.trace_step == step + 1
            try:
                result = StepResult(*self.run_step(step))
            except Exception as error:
                error.step = step  # type: ignore[attr-defined]
                raise
            self.done = done = step + 1
            steps, data_s = steps + 1, data_s + self.data_s
            self.report_broken(done, log)
            if log is not None and (done % config.log_every == 0 or done == last):
                # Reading waits for the device: a time taken earlier would measure only the launches.
                loss, norm = result.read_values()
                self.require_finite(done, norm)
                now = time.perf_counter()
                measured = MeasuredStep(
                    step=done, loss=loss, grad_norm=norm, lr=result.lr, step_s=(now - since) / steps,
                    memory=self.process_use.peak_memory(), data_s=data_s / steps,
                    skipped_steps=self.worker.skipped_steps,
                    loss_scale=self.worker.loss_scale.scale if self.worker.loss_scale is not None else 0.0,
                )  # fmt: skip
                log.log_step(step_metrics(measured, work))
                since, steps, data_s = now, 0, 0.0
            if self.is_due(done, config.save_every):
                self.require_finite(done, result.grad_norm.item())
            if self.finish_step(step, log, directory):
                since, steps, data_s = time.perf_counter(), 0, 0.0
        self.wait_for_save()
        self.report_pace(log)
        self.final = save_final(self.worker, self.model, directory, self.world, self.given, config.merge)

    def require_finite(self, step: int, norm: float) -> None:
        """Raise RunError for a gradient norm that is not finite, unless such steps change no parameter."""
        if math.isfinite(norm) or self.worker.skips_infinite:
            return
        raise RunError(
            "The gradients are not finite, so the parameters of this run are lost.",
            where=f"a step up to {step}",
            seen=f"gradient norm {norm}",
            next_step=(f"resume from the last checkpoint (step {self._saved})" if self._saved else "start again")
            + " with a smaller --lr, or with --nonfinite skip to leave such steps out",
        )

    def is_due(self, done: int, every: int) -> bool:
        """Return True after the last step and after every `every` steps; 0: after the last one alone."""
        return done == self.config.steps or bool(every and done % every == 0)

    def finish_step(self, step: int, log: RunLog | None, directory: Path) -> bool:
        """Run the trace, evaluation and checkpoint due after a step. Return True if any of them took time."""
        config, done = self.config, step + 1
        evaluates, saves = self.is_due(done, config.eval_every), self.is_due(done, config.save_every)
        if self.worker.tracing:
            write_trace(self.worker, directory / "trace.json", self.world, done, self.data_s, self.process_use)
        if evaluates:
            self.evaluate_loss(done, log)
            self.report_broken(done, log)
        if saves:
            self.save_state(done, directory)
        return self.worker.tracing or evaluates or saves

    def report_broken(self, step: int, log: RunLog | None) -> None:
        """Log images that any rank has found broken since the last report."""
        if isinstance(self.feeding, ImageBatchSource):
            broken = self.feeding.take_broken()
            if broken and log is not None:
                log.log_broken(
                    step, {image.image: image.reason for image in broken}, len(self.feeding.excluded_samples)
                )

    def report_pace(self, log: RunLog | None) -> None:
        """In a lab: log if the real work of all ranks kept the pace of the emulated devices."""
        device = pace.emulated_device()
        if device is None:
            return
        everyone: list[Any] = [asdict(device.counts)]
        if self.world.size > 1:
            everyone = [None] * self.world.size
            dist.all_gather_object(everyone, asdict(device.counts), group=self.world.cpu_group)
        if log is not None:
            log.log_pace(*pace.judge_counts(everyone))

    def run_step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return (loss, gradient norm, learning rate) of a step on its own batch; does not wait for the device."""
        if self._fault is not None:
            self._fault.raise_fault(self.world.rank, step)
        began = time.perf_counter()
        fed = self.feeding.step_inputs(step)
        self.data_s = time.perf_counter() - began
        result = self.worker.run_step(fed.feeds, step, fed.divisor, fed.counts)
        return result.loss, result.grad_norm, result.lr

    def evaluate_loss(self, step: int, log: RunLog | None) -> float | None:
        """Return the mean loss over the held-out rows (at most `eval_batches`); None if no rows are held out."""
        began = time.perf_counter()
        worker, sums, divisors = self.worker, 0.0, Counter[str]()
        evaluation = LaneEvaluation(worker)
        for index in range(min(self.feeding.evaluation_count, self.config.eval_batches)):
            fed = self.feeding.evaluation_inputs(index)
            sums = sums + evaluation.run_batch(fed.feeds, fed.counts)
            divisors.update(worker.module_divisors(fed.divisor))
        if not isinstance(sums, torch.Tensor):
            return None
        loss = float(worker.mean_loss(sums, divisors))
        if log is not None:
            log.log_evaluation(step, loss, time.perf_counter() - began)
        return loss

    def save_state(self, step: int, directory: Path) -> None:
        """Save a checkpoint of everything that a resume needs."""
        extra = {
            "step": step,
            "plan": self.plan.content_hash,
            "model": self.plan.hashes.model,
            "seed": self.plan.job.seed,
            "batch": self.plan.job.batch,
            "sequence": self.plan.job.sequence,
            "precision": self.plan.job.precision,
            "held_out": self.feeding.rows.held_out,
            "corpus": self.feeding.digest,
            "rows_seen": step * self.plan.job.batch,
            "pipefit": __version__,
        }
        if self.worker.skipped_steps:
            extra["skipped_steps"] = self.worker.skipped_steps
        if self.worker.loss_scale is not None:
            extra["loss_scale"] = self.worker.loss_scale.to_mapping()
        if isinstance(self.feeding, ImageBatchSource) and self.feeding.excluded_samples:
            extra["left_out"] = self.feeding.excluded_samples
        pieces, folder = all_pieces(self.worker, saving=True), directory / "checkpoints"
        self.wait_for_save()
        if self.config.async_save:
            self._pending = checkpoint.save_in_thread(
                folder, step, pieces, extra, group=self._save_group, keep=self.config.keep_checkpoints
            )
        else:
            checkpoint.save_checkpoint(
                folder, step, pieces, extra, group=self._save_group, keep=self.config.keep_checkpoints
            )
        self._saved = step

    def wait_for_save(self) -> None:
        """Wait until a save in progress is complete; raises its error."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def shared_model(plan: Plan, world: World) -> Model:
    """Return the plan's model: rank 0 opens it, and other ranks read its graphs. Raises StalePlanError."""
    text = world.share_text("model", lambda: codec.dump_text(planned_model(plan)))
    return codec.load_text(Model, text, "the model of rank 0")


def shared_batch_source(
    plan: Plan, model: Model, found: UserModel | None, config: TrainConfig, world: World
) -> BatchSource:
    """Return this rank's batch source: images, a user's data set, or text prepared by the first rank of every host."""
    device = plan.used_devices[world.rank]
    if is_multimodal(model):
        return open_images(
            plan, model, config, device, world.device, lambda found: merge_broken(world.gather_lists(found))
        )
    if found is None or reads_text(found, config):
        return TextBatchSource(plan, shared_corpus(plan, config, world), device, world.device)
    samples = user_samples(found, plan, config)
    return SampleBatchSource(plan, model, samples, found.fed, device, world.device, world.sum_over_ranks)


def shared_corpus(plan: Plan, config: TrainConfig, world: World) -> Corpus:
    """Return the corpus: prepared by the first rank of every host, opened by all."""
    vocabulary = plan.model.config.get("vocab_size")
    request = CorpusRequest(
        sources=config.data, tokenizer=config.tokenizer, vocabulary=vocabulary, field=config.field,
        chat_template=config.chat_template, loss_on=config.loss_on,
    )  # fmt: skip
    world.run_once_per_host(lambda: prepare_corpus(request))
    corpus = open_prepared(request, sequence=plan.job.sequence, held_out=config.held_out)
    if plan.job.documents == "apart":
        corpus.require_separator()
    return corpus


def corpus_mismatch(ranks: list[int], seen: str) -> RunError:
    """Return the error for ranks whose text or tokenizer is not rank 0's."""
    return RunError(
        f"These ranks read another corpus than rank 0: {name_ranks(ranks)}.",
        where="--data and --tokenizer",
        seen=f"corpus {seen}",
        allowed="the same text or data set, in the same order, and the same tokenizer on all hosts",
        next_step="copy the data to all hosts, or name a folder that they share",
    )


def model_flops(model: Model, plan: Plan, rows: RowSplit) -> float:
    """Return the model FLOPs of one step, forward and backward, without recomputation; for images those of an average
    step. Leading frozen layers have no backward."""
    from pipefit.model.analysis.totals import graph_flops

    packed = mean_sizes(rows, plan.job.batch) if isinstance(rows, SampleRows) else {}
    meeting = {symbol: packed[space]["T"] for symbol, space in CONDITIONS.items() if space in packed}
    per_graph, without = {}, frozen_layers(model)
    total = 0.0
    for module in model.modules:
        symbols = packed.get(module.space, {"B": plan.job.batch, "T": plan.job.sequence, **meeting})
        for index, layer in enumerate(module.layers):
            if layer.graph not in per_graph:
                per_graph[layer.graph] = graph_flops(model.layer_graph(layer), symbols)
            flops = per_graph[layer.graph]
            total += flops.forward if index < without[module.name] else flops.total_flops
    return total


def write_trace(worker: Worker, path: Path, world: World, step: int, data_s: float, use: ProcessUse) -> None:
    """Write the measured times of one step's actions on every rank, in the format of docs/reference/report.md."""
    columns = zip(worker.trace, worker.trace_waits_s, strict=True)
    rank_record = {
        "rank": world.rank,
        "data_s": data_s,
        "memory_bytes": use.peak_memory()[0],
        "core_share": use.core_share(),
        "spans": [[str(span.action), span.start_s, span.stop_s, wait_s] for span, wait_s in columns],
    }
    everyone: list[Any] = [rank_record]
    if world.size > 1:
        everyone = [None] * world.size
        dist.all_gather_object(everyone, rank_record, group=world.cpu_group)
    if world.rank == 0:
        document = {
            "format": "pipefit-trace",
            "version": 1,
            "plan": worker.plan.content_hash,
            "step": step,
            "ranks": everyone,
        }
        with write_errors("trace", path):
            path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def train_rank(plan: Plan, config: TrainConfig, world: World) -> None:
    """Run one rank's training from start to end."""
    world.share_text("folder", lambda: str(check_run_dir(config)))
    run = TrainingRun(plan, config, world)
    directory, log = Path(config.run_dir), None
    try:
        world.share_text("directory", lambda: str(open_run_dir(config, plan, world.device)))
        log = RunLog(directory, config.tensorboard) if world.rank == 0 else None
        run.train_steps(log, directory)
    finally:
        run.feeding.close()
        if log is not None:
            log.close()
    if log is not None:
        log.write_line(f"done: {config.steps} steps; {FINAL_WORDS[run.final.name]} in {run.final}")
