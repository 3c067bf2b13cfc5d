"""The functions of the placement search by name: plain Python, or compiled by numba. Both give the same placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from types import FunctionType
from typing import Any

from pipefit.plan.placement.kernels import anneal, matching, rings, sets
from pipefit.plan.placement.kernels import transfer_times as kernel
from pipefit.plan.placement.kernels.tables import GROUPS
from pipefit.schedule.taskgraph.compile_notice import watch_numba

Functions = Mapping[str, Callable[..., Any]]


MODULES = (rings, kernel, anneal, matching, sets)
"""Modules whose functions are compiled."""

OUTER = ("anneal", "anneal_sets", "recompute")
"""Functions that are called from Python."""


@lru_cache(maxsize=2)
def kernel_functions(compiled: bool) -> Functions:
    """Return every function of MODULES.

    Numba keeps compiled functions on disk; the first call on a machine takes some seconds. A function refers to others
    as globals, so its compiled twin needs globals in which these names are compiled functions. Inner functions are
    inlined: a call passes every field of the tables, which takes longer than most functions do.
    """
    scope: dict[str, Any] = {name: value for module in MODULES for name, value in vars(module).items()}
    module_names = {module.__name__ for module in MODULES}
    plain = {
        name: value
        for name, value in scope.items()
        if isinstance(value, FunctionType) and value.__module__ in module_names
    }
    if not compiled:
        return plain
    import numba

    watch_numba()
    edition = _kernel_digest(plain, scope)
    for name, function in plain.items():
        twin = FunctionType(function.__code__, scope, name, function.__defaults__)
        twin.__module__, twin.__qualname__ = function.__module__, f"{name}_{edition}"
        inner = name not in OUTER
        scope[name] = numba.njit(
            cache=not inner,
            _nrt=False,
            error_model="numpy",
            no_cfunc_wrapper=True,
            no_cpython_wrapper=inner,
            forceinline=inner,
        )(twin)
    return {name: scope[name] for name in plain}


def _kernel_digest(plain: Functions, scope: Mapping[str, Any]) -> str:
    """Return a digest of all functions, the numbers they refer to and the fields of their tables.

    Numba's own cache checks one file only, and a changed function is often in another one.
    """
    numbers = sorted(
        (name, value) for name, value in scope.items() if name.isupper() and isinstance(value, int | float)
    )
    fields = [group._fields for group in GROUPS]
    codes = [(name, function.__code__) for name, function in sorted(plain.items())]
    text = repr([numbers, fields, [(name, code.co_code, code.co_names, code.co_consts) for name, code in codes]])
    return sha256(text.encode()).hexdigest()[:12]
