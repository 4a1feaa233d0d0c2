"""Bugs that come back by copying, by counting or by leaving something unused: held off by the shape of the source."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("ling_serve", "kernels/ling_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
OWN = ("ling_serve", "ling_kernels")
Function = ast.FunctionDef | ast.AsyncFunctionDef

CREATORS = ("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like")
POOLS = {"ling_serve/cache/latent_pool.py": "LatentPool", "ling_serve/cache/state_slots.py": "StateSlotPool"}
LEAST_COPY = 5
"""Statements from which on two equal functions are a copy and no coincidence."""


def functions() -> Iterator[tuple[str, Function]]:
    for name, module in MODULES.items():
        for node in ast.walk(module):
            if isinstance(node, Function):
                yield f"{name}:{node.lineno} {node.name}", node


def calls(module: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Each call, with the last name of what is called."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func).rpartition(".")[2]


def without_docstring(function: Function) -> list[ast.stmt]:
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1:] if is_docstring else function.body


def test_layers_are_listed_and_never_counted_by_subtraction() -> None:
    """All minus one kind is the other kind only as long as there are two."""
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, module in MODULES.items()
        for node in ast.walk(module)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and all("layer" in ast.unparse(side) for side in (node.left, node.right))
    ]
    assert not found


def test_only_the_two_pools_make_cache_arrays() -> None:
    made = {
        name: [call.lineno for call, called in calls(module) if called in CREATORS]
        for name, module in MODULES.items()
        if name.startswith("ling_serve/cache/")
    }
    assert {name for name, lines in made.items() if lines} == set(POOLS)
    for name, pool in POOLS.items():
        [init] = [
            method
            for node in MODULES[name].body
            if isinstance(node, ast.ClassDef) and node.name == pool
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        ]
        assert all(init.lineno < line <= (init.end_lineno or 0) for line in made[name]), name


def test_pools_are_made_in_one_place_and_no_other_cache_is_used() -> None:
    makers = {
        name
        for name, module in MODULES.items()
        for _, called in calls(module)
        if called in (*POOLS.values(), "make_prompt_cache", "make_cache")
    }
    assert makers == {"ling_serve/cache/caches.py"}
    foreign = [
        name
        for name, module in MODULES.items()
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm") and "cache" in str(node.module)
    ]
    assert not foreign


def test_no_function_is_a_copy_of_another() -> None:
    """Names and numbers aside: a loop for one family of caches, then the same loop for the next."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for place, function in functions():
        body = without_docstring(function)
        if sum(isinstance(node, ast.stmt) for statement in body for node in ast.walk(statement)) >= LEAST_COPY:
            groups[_shape(body)].append(place)
    copies = [places for places in groups.values() if len(places) > 1]
    assert not copies


def test_every_parameter_is_used() -> None:
    """One that nobody reads, `**kwargs` above all, lets a caller believe that it had an effect.

    `del parameter` counts: it says that somebody else's interface demands it.
    """
    unused = list[str]()
    for place, function in functions():
        body, arguments = without_docstring(function), function.args
        is_stub = all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in body)
        if is_stub or function.name == "__exit__":
            continue
        variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *variadic]
        read = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        is_asgi = [argument.arg for argument in named[1:]] == ["scope", "receive", "send"]
        exempt = {"self", "cls", "scope"} if is_asgi else {"self", "cls"}
        unused += [
            f"{place}({argument.arg})"
            for argument in named
            if argument.arg not in read | exempt and not argument.arg.startswith("_")
        ]
    assert not unused


def test_no_workaround_for_a_dependency_hides_in_a_feature() -> None:
    """A new version of a dependency is a change of its own: no code asks for versions or patches what it imports."""
    found = list[str]()
    for name, module in MODULES.items():
        imported = _imported(module)
        for node in ast.walk(module):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and node.attr == "__version__":
                found.append(f"{place} reads a version")
            if isinstance(node, ast.Import | ast.ImportFrom) and "importlib.metadata" in ast.unparse(node):
                found.append(f"{place} reads a version")
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                targets = [ast.Attribute(node.args[0], "?")]
            for target in targets:
                root = ast.unparse(target).partition(".")[0]
                if isinstance(target, ast.Attribute) and root in imported:
                    found.append(f"{place} patches {root}")
    assert not found


def _imported(module: ast.Module) -> set[str]:
    """Names that stand for something of another project."""
    names = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] not in OWN
            }
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in OWN:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _shape(body: list[ast.stmt]) -> str:
    parts = [_Nameless().visit(ast.parse(ast.unparse(statement))) for statement in body]
    return "\n".join(ast.dump(part) for part in parts)


class _Nameless(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("_", node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg("_")

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(type(node.value).__name__)
