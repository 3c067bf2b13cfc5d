"""The shard recipe of one layer: the search's choices as a short text in plans.

With the recipe and the shares, every rank writes the same program.

    G1>G1 d1 t0:G1>I out heads in t12:P>G1 +0 ...

The recipe begins with the forms of the incoming and the outgoing hidden state. If the layer has its own shares, they
follow an @, between the shares of the incoming and of the outgoing hidden state (`@2:1>5:2>5:2`); otherwise all are the
mesh's. Then one word per operator follows, in order: the label that is split, `-` for replicated, `+0` for partial sums
that pass through, `in>G1` for a label with a partial result reduced at once, `d1*` for a linear layer split along
tokens with gathered factors of the weight gradient. Words with a colon are conversions of a value before the next
operator. A lowering other than padding follows a slash: `t0:G1>I/grouped`, `in>G1/padded+alltoallv` (forward and
backward).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipefit.cost.comm.lowerings import LOWERINGS
from pipefit.errors import PlanError
from pipefit.layout import PARTIAL, TensorForm, parse_form
from pipefit.model.graph import Graph, Operator
from pipefit.shard.choice import FormConversion, HeldForm, OperatorChoice
from pipefit.shard.cuts import cut_units
from pipefit.shard.pricing import OptionPick, PricedLayer, form_of
from pipefit.shard.program import ShardedGraph, shard_graph
from pipefit.shard.rules import OperatorLabels
from pipefit.shard.template import ChosenProgram, ConversionCost, held_fractions

DeviceShares = tuple[int, ...]

RecipeConversion = tuple[str, TensorForm, TensorForm, str]
"""A conversion: (value, source form, target form, lowerings of uneven parts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecipe:
    """The choices for one layer."""

    takes: TensorForm
    gives: TensorForm
    picks: tuple[OptionPick, ...]
    "The choice for every operator."
    before: tuple[tuple[RecipeConversion, ...], ...]
    "The conversions before every operator."
    after: tuple[RecipeConversion, ...]
    shares: tuple[DeviceShares, ...] = ()
    "Shares of the incoming hidden state, the layer, and the outgoing hidden state; empty: the mesh's."

    @property
    def recipe_text(self) -> str:
        """The recipe as text."""
        words = [f"{self.takes}>{self.gives}"]
        words += ["@" + ">".join(":".join(map(str, shares)) for shares in self.shares)] if self.shares else []
        for pick, conversions in zip(self.picks, self.before, strict=True):
            words += [*map(_conversion_word, conversions), _pick_word(pick)]
        return " ".join([*words, *map(_conversion_word, self.after)])


def recipe_of(
    layer: PricedLayer, choice: ChosenProgram, takes: TensorForm, gives: TensorForm, shares: Sequence[int] = ()
) -> ShardRecipe:
    """Return the recipe of a solved layer; with `shares`, the lowerings of uneven parts are the cheapest for them."""
    fractions = held_fractions(layer.template.cuts, shares, layer.template.members) if shares else None

    def name_conversions(moves: Sequence[tuple[int, int, int]]) -> tuple[RecipeConversion, ...]:
        return tuple(
            (
                layer.values[value],
                form_of(source),
                form_of(target),
                lowering_word(layer.template.conversion_costs[value][source, target]),
            )
            for value, source, target in moves
        )

    def lowering_word(conversion: ConversionCost | None) -> str:
        return "" if fractions is None or conversion is None else conversion.lowering_names(fractions)

    picks, before = [], []
    waiting: tuple[RecipeConversion, ...] = ()
    steps = zip(layer.operators, layer.picks, layer.template.steps, choice.ways, choice.before, strict=True)
    for index, step_picks, step, number, moves in steps:
        waiting += name_conversions(moves)
        if index >= 0:
            option = step.ways[number]
            picks.append(
                replace(
                    step_picks[number],
                    how=lowering_word(option.talk if step_picks[number].factors else option.reduction),
                )
            )
            before.append(waiting)
            waiting = ()
    return ShardRecipe(
        takes=takes, gives=gives, picks=tuple(picks), before=tuple(before), after=name_conversions(choice.after)
    )


def parse_recipe(text: str) -> ShardRecipe:
    """Parse a `recipe_text`. Raises PlanError for any other text."""
    first, *words = text.split() or [""]
    takes, separator, gives = first.partition(">")
    shares: tuple[DeviceShares, ...] = ()
    if words and words[0].startswith("@"):
        shares = _parse_shares(words.pop(0))
    if not separator:
        raise PlanError(
            "A recipe begins with the forms it takes and gives.", seen=repr(first), allowed="for example G1>G1"
        )
    picks: list[OptionPick] = []
    before: list[tuple[RecipeConversion, ...]] = []
    conversions: list[RecipeConversion] = []
    for word in words:
        if ":" in word:
            conversions.append(_parse_conversion(word))
        else:
            picks.append(_parse_pick(word))
            before.append(tuple(conversions))
            conversions = []
    return ShardRecipe(
        takes=parse_form(takes),
        gives=parse_form(gives),
        picks=tuple(picks),
        before=tuple(before),
        after=tuple(conversions),
        shares=shares,
    )


def write_program(graph: Graph, shares: Sequence[int], recipe: ShardRecipe) -> ShardedGraph:
    """Return the program of a recipe; `shares` are the mesh's.

    Raises PlanError for a recipe of another graph, and for shares that leave a device without a unit.
    """
    if len(recipe.picks) != len(graph.operators):
        raise PlanError(
            "This recipe is for another layer.",
            where="recipe",
            seen=f"{len(recipe.picks)} choices",
            allowed=f"{len(graph.operators)} operators",
            next_step="make the plan again with the model as it is now",
        )
    units = cut_units(graph)
    takes_shares, layer_shares, gives_shares = recipe.shares or (tuple(shares),) * 3
    if any(len(axis_shares) != len(shares) for axis_shares in (takes_shares, layer_shares, gives_shares)):
        raise PlanError(
            "This recipe is for another number of devices.",
            where="recipe",
            seen=":".join(map(str, layer_shares)),
            allowed=f"{len(shares)} shares",
        )

    def choose_operator(
        place: int, operator: Operator, labelled: OperatorLabels, held: Mapping[str, HeldForm]
    ) -> OperatorChoice:
        pick = recipe.picks[place]
        before = tuple(_form_conversion(conversion, units) for conversion in recipe.before[place])
        if pick.linear >= len(labelled.linear):
            raise PlanError(
                "Partial sums do not pass through this operator in this way.",
                where=f"recipe, {operator.kind}",
                seen=_pick_word(pick),
            )
        if not pick.label:
            return OperatorChoice(linear=pick.linear, before=before)
        cut = _units_of(pick.label, operator, labelled, units)
        return OperatorChoice(pick.label, cut, settle=pick.settle, how=pick.how, factors=pick.factors, before=before)

    after = [_form_conversion(conversion, units) for conversion in recipe.after]
    hidden = graph.hidden_input or ""
    takes, gives = _held_form(hidden, recipe.takes, units), _held_form(graph.outputs[0], recipe.gives, units)
    return shard_graph(
        graph,
        layer_shares,
        _cut_by(takes, takes_shares, layer_shares),
        choose_operator,
        _cut_by(gives, gives_shares, layer_shares),
        after,
    )


def _cut_by(held: HeldForm, shares: DeviceShares, own: DeviceShares) -> HeldForm:
    """Return the hidden state with these shares, if it is split and they are not the layer's."""
    return replace(held, shares=shares) if held.form.kind == "G" and shares != own else held


def _form_conversion(conversion: RecipeConversion, units: Mapping[tuple[str, int], int]) -> FormConversion:
    name, source, target, how = conversion
    return FormConversion(name, _held_form(name, source, units), _held_form(name, target, units), how)


def _held_form(name: str, form: TensorForm, units: Mapping[tuple[str, int], int]) -> HeldForm:
    if form.dim is None:
        return HeldForm(form)
    if (name, form.dim) not in units:
        raise PlanError("This dimension cannot be split.", where=f"recipe, {name}", seen=str(form))
    return HeldForm(form, units[name, form.dim])


def _units_of(label: str, operator: Operator, labelled: OperatorLabels, units: Mapping[tuple[str, int], int]) -> int:
    names, labelled = (*operator.inputs, *operator.outputs), labelled.for_label(label)
    for name, labels in zip(names, (*labelled.inputs, *labelled.outputs), strict=True):
        if name and labels and label in labels and (name, labels.index(label)) in units:
            return units[name, labels.index(label)]
    raise PlanError("This operator has no such label to split.", where=f"recipe, {operator.kind}", seen=label)


def _parse_shares(word: str) -> tuple[DeviceShares, ...]:
    parts = word[1:].split(">")
    if len(parts) != 3 or not all(re.fullmatch(r"[1-9]\d*(:[1-9]\d*)*", part) for part in parts):
        raise PlanError(
            "These are not the shares of a layer.",
            where="recipe",
            seen=repr(word),
            allowed="incoming>own>outgoing, for example @2:1>5:2>5:2",
        )
    return tuple(tuple(map(int, part.split(":"))) for part in parts)


def _conversion_word(conversion: RecipeConversion) -> str:
    name, source, target, how = conversion
    return f"{name}:{source}>{target}{how and '/'}{how}"


def _parse_conversion(word: str) -> RecipeConversion:
    name, _, forms = word.rpartition(":")
    forms, how = _split_lowering(forms)
    source, separator, target = forms.partition(">")
    if not (name and separator):
        raise PlanError("This is not a conversion.", where="recipe", seen=repr(word), allowed="for example t0:G1>I")
    return name, parse_form(source), parse_form(target), how


def _split_lowering(word: str) -> tuple[str, str]:
    """Return a word and its lowering, separated by a slash. Raises PlanError for an unknown lowering."""
    front, _, how = word.partition("/")
    if how and (not {*how.split("+")} <= {*LOWERINGS} or how.count("+") > 1):
        raise PlanError(
            "This is not a lowering of a collective.",
            where=f"recipe, {word}",
            seen=how,
            allowed=f"{', '.join(LOWERINGS)}, or two of them (forward and backward) joined by +",
        )
    return front, how


def _pick_word(pick: OptionPick) -> str:
    if pick.linear >= 0:
        return f"+{pick.linear}"
    if not pick.label:
        return "-"
    what = f"{pick.label}*" if pick.factors else pick.label
    what += "" if pick.settle == PARTIAL else f">{pick.settle}"
    return f"{what}{pick.how and '/'}{pick.how}"


def _parse_pick(word: str) -> OptionPick:
    if word == "-":
        return OptionPick()
    if re.fullmatch(r"\+\d+", word):
        return OptionPick(linear=int(word[1:]))
    word, how = _split_lowering(word)
    label, separator, form = word.partition(">")
    settle = parse_form(form) if separator else PARTIAL
    return OptionPick(label.removesuffix("*"), settle=settle, how=how, factors=label.endswith("*"))
