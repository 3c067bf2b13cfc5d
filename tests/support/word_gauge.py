"""Count how the source names things and how its prose reads. `tests/test_words.py` keeps the counts from rising.

A name or a sentence is counted by simple rules on the syntax tree and on paragraphs, the same for every file: the
figures compare states of one code base and say little about a single line.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILLER_NAMES = frozenset(
    {
        "found", "one", "each", "own", "other", "others", "made", "way", "ways", "place", "whole", "most", "at",
        "real", "some", "many", "every", "kept", "given", "taken", "it", "ones"
    }
)  # fmt: skip
"""Local names that say nothing about the value."""

CLAUSE_START = re.compile(r"(?:What|Who|Whoever|Whatever|How|Where|Whether)\b")
CLAUSE_PRONOUNS = re.compile(
    r"\b(?:what|who|those that|those which|that of|as far as|the others|one behind the other|so many|as many)\b"
)
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(])")
LONG_SENTENCE_WORDS = 30
MESSAGE_WORDS = 5
"""Shorter string literals are names and values, not messages."""
MARKUP = re.compile(r"</?[a-z]+[ >]")
"""A tag of HTML or SVG: the literal is a template. The source has no other code in literals of MESSAGE_WORDS words."""
DIRECTIVE = re.compile(r"#\s*(?:noqa|fmt:|type:|pragma:|ruff:|mypy:|!)")
"""A comment for a tool."""
GIVEN_NAMES = frozenset({"forward", "backward"})
"""Methods that PyTorch names."""

MOST_PARAMETERS = 7
MOST_BRANCHES = 15
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.BoolOp, ast.comprehension, ast.Assert)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameCounts:
    """Counts over the functions, classes and local variables of some files."""

    functions: int
    one_word_functions: int
    classes: int
    one_word_classes: int
    repeated_classes: int
    "Class names that two or more files define."
    locals: int
    filler_locals: int
    many_parameters: int
    "Functions with more than MOST_PARAMETERS parameters."
    complex_functions: int
    "Functions with more than MOST_BRANCHES branches."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProseCounts:
    """Counts over the sentences of some texts."""

    words: int
    sentences: int
    long_sentences: int
    clause_first: int
    "Sentences that begin with a What, Who, How, Where or Whether clause."
    pronouns: int
    "Clause pronouns such as `what` and `those that`."


def count_names(files: Sequence[Path]) -> NameCounts:
    """Count the names in Python files."""
    function_names: list[str] = []
    class_files: Counter[str] = Counter()
    stored: list[str] = []
    many_parameters = complex_functions = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function_names.append(node.name)
                arguments = node.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                many_parameters += count > MOST_PARAMETERS
                complex_functions += 1 + sum(isinstance(child, BRANCHES) for child in ast.walk(node)) > MOST_BRANCHES
            elif isinstance(node, ast.ClassDef):
                class_files[node.name] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored.append(node.id)
    plain = [name for name in function_names if not name.startswith("__") and name not in GIVEN_NAMES]
    return NameCounts(
        functions=len(plain),
        one_word_functions=sum("_" not in name.strip("_") for name in plain),
        classes=len(class_files),
        one_word_classes=sum(len(re.findall(r"[A-Z]+[a-z0-9]*", name.strip("_"))) < 2 for name in class_files),
        repeated_classes=sum(count > 1 for count in class_files.values()),
        locals=len(stored),
        filler_locals=sum(name in FILLER_NAMES for name in stored),
        many_parameters=many_parameters,
        complex_functions=complex_functions,
    )


def count_prose(texts: Sequence[str]) -> ProseCounts:
    """Count the words and sentences of texts; code blocks, tables and headings are left out."""
    sentences = [sentence for text in texts for sentence in iterate_sentences(text)]
    lengths = [len(sentence.split()) for sentence in sentences]
    return ProseCounts(
        words=sum(lengths),
        sentences=len(sentences),
        long_sentences=sum(length > LONG_SENTENCE_WORDS for length in lengths),
        clause_first=sum(bool(CLAUSE_START.match(text)) and not text.endswith("?") for text in sentences),
        pronouns=sum(len(CLAUSE_PRONOUNS.findall(text)) for text in sentences),
    )


def count_pronouns(texts: Sequence[str]) -> float:
    """Return the clause pronouns per 100 words of texts that need not be sentences; 0 without words."""
    words = sum(len(text.split()) for text in texts)
    return 100 * sum(len(CLAUSE_PRONOUNS.findall(text)) for text in texts) / words if words else 0.0


def iterate_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of at least four words in a Markdown text or a docstring."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "<", "![", ">>>"))]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    text = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
            if len(sentence.split()) >= 4:
                yield sentence


def iterate_docstrings(files: Sequence[Path]) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def iterate_messages(files: Sequence[Path]) -> Iterator[str]:
    """Yield the string literals of at least MESSAGE_WORDS words: messages, notes and help texts.

    A value in an f-string counts as one word. Docstrings, strings below a field and templates of HTML are left out.
    """
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            text = "" if id(node) in parts else _literal_text(node)
            if len(text.split()) >= MESSAGE_WORDS and not MARKUP.search(text):
                yield text


def iterate_comments(files: Sequence[Path]) -> Iterator[str]:
    """Yield the comments, line by line, without the ones for tools such as `noqa`."""
    for file in files:
        with tokenize.open(file) as lines:
            for token in tokenize.generate_tokens(lines.readline):
                if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
                    yield token.string.lstrip("# ")


def _literal_text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return ""
