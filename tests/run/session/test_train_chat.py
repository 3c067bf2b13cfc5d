"""`pipefit train` on conversations: the loss of their answers, each conversation alone, by transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from tests.support import train_toys as toys
from tests.support import worker_plans as plans
from tests.support.chat_toys import BLOCKS_MARKED, CHATML_MARKED, turns, write_chat, write_tokenizer
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.data.corpus import open_corpus
from pipefit.errors import PipefitError
from pipefit.plan.check.rules import save_plan

CONFIG = plans.LLAMA | {"vocab_size": 320, "num_hidden_layers": 2}
CHATS = [turns(f"question {n}", "answer " * (1 + n % 5), "more?", f"no, {n}") for n in range(11)]
SEQUENCE = 300


def reference_loss(folder: Path, tokenizer: str) -> float:
    """The mean loss of the answers' tokens, of one forward pass of transformers per conversation."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float()
    model.save_pretrained(folder)
    library = AutoTokenizer.from_pretrained(tokenizer)
    losses, count = torch.zeros(()), 0
    for messages in CHATS:
        rendered = library.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(rendered["input_ids"]), torch.tensor(rendered["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        labels = torch.where(mask, ids, -100)[1:]
        losses += torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int((labels != -100).sum())
    return float(losses / count)


@pytest.mark.parametrize("template", [CHATML_MARKED, BLOCKS_MARKED], ids=["chatml", "blocks"])
def test_the_loss_is_that_of_the_answers_of_each_conversation_alone(tmp_path, alone, template):
    pytest.importorskip("transformers")
    tokenizer, chat = write_tokenizer(tmp_path / "tokenizer", template), write_chat(tmp_path / "chat.jsonl", CHATS)
    expected = reference_loss(tmp_path / "weights", tokenizer)
    corpus = open_corpus([str(chat)], sequence=SEQUENCE, tokenizer=tokenizer, held_out=0, cache=tmp_path / "cache")
    rows = corpus.rows.count
    plans.CONFIGS.setdefault("chat", CONFIG)
    job = replace(toys.JOB, batch=rows, sequence=SEQUENCE, documents="apart")
    save_plan(plans.plan("chat", job, microbatches=rows), tmp_path / "plan.json")
    options = ("--tokenizer", tokenizer, "--held-out", "0", "--weights", str(tmp_path / "weights"))
    code, error = toys.train_here(tmp_path / "plan.json", chat, tmp_path / "run", *options)
    assert (code, error) == (0, "")
    (record,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert record["loss"] == pytest.approx(expected, rel=1e-5) and 2 < rows < len(CHATS)


@pytest.mark.gloo
@pytest.mark.slow
def test_two_processes_plan_train_and_evaluate(tmp_path):
    tokenizer, chat = write_tokenizer(tmp_path / "tokenizer"), write_chat(tmp_path / "chat.jsonl", CHATS * 3)
    model, plan, run = tmp_path / "model", tmp_path / "plan.json", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    start = [*toys.command(plan, chat, run)[:3]]
    words = ["plan", "--model", str(model), "--local", "2", "--batch", "4", "--seq", str(SEQUENCE), "--quiet"]
    planned = toys.start([*start, *words, "--documents", "apart", "--fix", "pp=2", "-o", str(plan)])
    assert planned.returncode == 0, planned.stderr
    options = ("--local", "2", "--tokenizer", tokenizer, "--loss-on", "answers", "--held-out", "2")
    trained = toys.start(toys.command(plan, chat, run, *options, steps=2))
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("chat data: 33 conversations") == 1 and "--documents apart" not in trained.stdout
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [name for record in records for name in ("loss", "eval_loss") if name in record] == [
        "loss",
        "loss",
        "eval_loss",
    ]


def test_joined_documents_are_noted_and_wrong_options_refused(tmp_path, alone):
    tokenizer, chat = write_tokenizer(tmp_path / "tokenizer"), write_chat(tmp_path / "chat.jsonl", CHATS * 3)
    plans.CONFIGS.setdefault("chat", CONFIG)
    save_plan(plans.plan("chat", replace(toys.JOB, batch=4, sequence=SEQUENCE)), tmp_path / "plan.json")

    def train(*options: str) -> Result:
        words = toys.command(tmp_path / "plan.json", chat, tmp_path / "run", "--held-out", "2", *options, steps=1)
        return CliRunner().invoke(build_app(), words[3:])

    refused = train("--tokenizer", tokenizer, "--loss-on", "users").exception
    assert isinstance(refused, PipefitError) and "--loss-on" in str(refused) and "answers or all" in str(refused)
    unread = train()
    assert unread.exit_code == 2 and "Chat data need a tokenizer" in unread.stderr
    assert not (tmp_path / "run").exists()
    trained = train("--tokenizer", tokenizer)
    assert trained.exit_code == 0 and trained.stderr == ""
    assert trained.stdout.count("plan with --documents apart") == 1
