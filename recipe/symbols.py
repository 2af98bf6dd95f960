"""What the overlay imports from vLLM, and whether two releases agree about it.

Everything is read from syntax trees, so that neither release has to be importable.
"""

import ast
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

# Reads one file of a release by its path, None if there is none.
Reader = Callable[[str], bytes | None]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.If, ast.Try, ast.With)
# Methods that are called without being named.
_IMPLICIT = frozenset({"__init__", "__call__", "__post_init__"})


@dataclass(frozen=True, order=True)
class Symbol:
    """Something imported.

    Attributes:
        module: Dotted name of the module it is imported from.
        name: Its name there; empty for the module itself.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Call:
    """How something is called.

    Attributes:
        positional: Number of positional arguments.
        keywords: Names of the keyword arguments.
        unpacks: Whether there are ``*`` or ``**`` arguments too.
    """

    positional: int
    keywords: frozenset[str]
    unpacks: bool

    def fits(self, arguments: ast.arguments, bound: bool) -> bool:
        """Tell whether a function takes this call.

        Args:
            arguments: Its parameters.
            bound: Whether its first parameter is given already.
        """
        names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
        required = set(names[: len(names) - len(arguments.defaults)])
        if bound:
            required -= set(names[:1])
            names = names[1:]
        if self.positional > len(names) and arguments.vararg is None:
            return False
        only = {arg.arg for arg in arguments.kwonlyargs}
        if self.keywords - set(names[self.positional :]) - only and not arguments.kwarg:
            return False
        required |= {
            arg.arg
            for arg, default in zip(
                arguments.kwonlyargs, arguments.kw_defaults, strict=True
            )
            if default is None
        }
        given = {*names[: self.positional], *self.keywords}
        return self.unpacks or required <= given


@dataclass
class Usage:
    """How the overlay uses vLLM.

    Attributes:
        symbols: Where each symbol is imported, as ``path:line``.
        lookups: Likewise for attributes of imported names, which may be modules.
        attributes: Every attribute that is looked up on anything.
        calls: The calls of each imported name or attribute, by its last word.
    """

    symbols: dict[Symbol, list[str]] = field(default_factory=dict)
    lookups: dict[Symbol, list[str]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    calls: dict[str, set[Call]] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    """What a symbol is in one release.

    Attributes:
        path: File that defines it.
        kind: ``module``, ``function``, ``class``, ``value``, ``dynamic``, or
            ``unknown`` where the file does not parse.
        node: Its syntax tree, if there is one.
    """

    path: str
    kind: str
    node: ast.stmt | None


@dataclass(frozen=True)
class Finding:
    """A symbol that is not the same in two releases.

    Attributes:
        symbol: The symbol, with its member after a colon where one is meant.
        broken: Whether code written for the old release may fail with the new one.
        text: What is different.
        where: Where the overlay imports it.
    """

    symbol: str
    broken: bool
    text: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.symbol}: {self.text}"


def usage(files: Mapping[str, bytes], package: str = "vllm") -> Usage:
    """Collect what files import from a package and which attributes they look up.

    Args:
        files: Bytes of Python files by path.
        package: Top-level name of the package.
    """
    found = Usage()
    for path, data in sorted(files.items()):
        tree = ast.parse(data, path)
        aliases = _imports(tree, path, package, found.symbols)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found.attributes.add(node.attr)
                if isinstance(node.value, ast.Name) and node.value.id in aliases:
                    symbol = Symbol(aliases[node.value.id], node.attr)
                    where = f"{path}:{node.lineno}"
                    found.lookups.setdefault(symbol, []).append(where)
            elif isinstance(node, ast.Call):
                name = ""
                if isinstance(node.func, ast.Attribute):
                    name = node.func.attr
                elif isinstance(node.func, ast.Name) and node.func.id in aliases:
                    name = aliases[node.func.id].rpartition(".")[2]
                if name:
                    found.calls.setdefault(name, set()).add(_call(node))
    return found


def _imports(
    tree: ast.Module, path: str, package: str, symbols: dict[Symbol, list[str]]
) -> dict[str, str]:
    """Collect the imports of one file; return what each local name stands for."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            if module.split(".")[0] != package:
                continue
            for alias in node.names:
                symbol = Symbol(module, alias.name)
                symbols.setdefault(symbol, []).append(f"{path}:{node.lineno}")
                aliases[alias.asname or alias.name] = str(symbol)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    symbol = Symbol(alias.name, "")
                    symbols.setdefault(symbol, []).append(f"{path}:{node.lineno}")
                    if alias.asname:
                        aliases[alias.asname] = alias.name
    return aliases


def _call(node: ast.Call) -> Call:
    starred = any(isinstance(arg, ast.Starred) for arg in node.args)
    keywords = [keyword.arg for keyword in node.keywords]
    return Call(
        positional=sum(not isinstance(arg, ast.Starred) for arg in node.args),
        keywords=frozenset(name for name in keywords if name is not None),
        unpacks=starred or None in keywords,
    )


def _absolute(path: str, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that an import names."""
    if not node.level:
        return node.module or ""
    parts = posixpath.dirname(path).split("/")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


class Release:
    """One release as a set of syntax trees."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> str | None:
        """Return the path of a module, ``None`` if there is none."""
        base = name.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if path in self._trees or self._read(path) is not None:
                return path
        return None

    def _tree(self, path: str) -> ast.Module | None:
        """Return the syntax tree of a file, ``None`` if it does not parse."""
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self._read(path) or b"", path)
            except SyntaxError:
                self._trees[path] = None
        return self._trees[path]

    def find(
        self, symbol: Symbol, seen: frozenset[Symbol] = frozenset()
    ) -> Definition | None:
        """Return what a symbol is, following re-exports; ``None`` if it is nothing."""
        path = self.module(symbol.module)
        if path is None or symbol in seen:
            return None
        if not symbol.name:
            return Definition(path, "module", None)
        tree = self._tree(path)
        if tree is None:
            return Definition(path, "unknown", None)
        dynamic = False
        for node in _statements(tree.body):
            if isinstance(node, _FUNCTIONS) and node.name == symbol.name:
                return Definition(path, "function", node)
            if isinstance(node, ast.ClassDef) and node.name == symbol.name:
                return Definition(path, "class", node)
            if symbol.name in _bound(node):
                return self._instance(symbol, node) or Definition(path, "value", node)
            dynamic |= isinstance(node, _FUNCTIONS) and node.name == "__getattr__"
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) in (symbol.name, "*"):
                        name = symbol.name if alias.name == "*" else alias.name
                        target = Symbol(_absolute(path, node), name)
                        if found := self.find(target, seen | {symbol}):
                            return found
        if inner := self.module(f"{symbol.module}.{symbol.name}"):
            return Definition(inner, "module", None)
        return Definition(path, "dynamic", None) if dynamic else None

    def _instance(self, symbol: Symbol, node: ast.stmt) -> Definition | None:
        """Return the class that a value is annotated with, if it is one to be found."""
        if not isinstance(node, ast.AnnAssign):
            return None
        if not isinstance(node.annotation, ast.Name):
            return None
        found = self.find(Symbol(symbol.module, node.annotation.id))
        return found if found and found.kind == "class" else None

    def member(self, owner: Definition, name: str) -> ast.stmt | None:
        """Return the definition of a class's member, its own or an inherited one."""
        assert isinstance(owner.node, ast.ClassDef)
        for node in _statements(owner.node.body):
            if isinstance(node, _FUNCTIONS) and node.name == name:
                return node
            if name in _bound(node):
                return node
        module = owner.path.removesuffix(".py").removesuffix("/__init__")
        for base in owner.node.bases:
            if isinstance(base, ast.Name):
                parent = self.find(Symbol(module.replace("/", "."), base.id))
                if parent is None or not isinstance(parent.node, ast.ClassDef):
                    continue
                if parent.node is owner.node:
                    continue
                if found := self.member(parent, name):
                    return found
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, _BLOCKS):
            yield from _statements(node.body)
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.orelse)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def compare(used: Usage, old: Release, new: Release) -> list[Finding]:
    """Compare every symbol that is used in two releases.

    Args:
        used: What is imported.
        old: The release that the code was written for.
        new: Another one.

    Returns:
        What differs, each definition once.
    """
    findings: dict[tuple[str, str, str], Finding] = {}
    wanted = dict(used.symbols)
    for symbol, where in used.lookups.items():
        # An attribute of a class or a value is looked at with its members.
        if old.module(symbol.module):
            wanted[symbol] = [*wanted.get(symbol, []), *where]
    for symbol, where in sorted(wanted.items()):
        before, after = old.find(symbol), new.find(symbol)
        if before is None:
            text = "is not found in the release that the overlay is written for"
            found = Finding(str(symbol), False, text, tuple(where))
            findings["", str(symbol), ""] = found
        elif after is None:
            text = f"is gone; it was in {before.path}"
            found = Finding(str(symbol), True, text, tuple(where))
            findings[before.path, symbol.name, ""] = found
        else:
            for member, broken, text in _differences(before, after, used, old, new):
                name = f"{symbol}:{member}" if member else str(symbol)
                key = (before.path, symbol.name, member)
                if earlier := findings.get(key):
                    name, where = earlier.symbol, [*earlier.where, *where]
                findings[key] = Finding(name, broken, text, tuple(where))
    return list(findings.values())


def _differences(
    before: Definition, after: Definition, used: Usage, old: Release, new: Release
) -> Iterator[tuple[str, bool, str]]:
    """Yield member, whether it breaks callers, and what differs."""
    if after.kind == "unknown":
        yield "", True, f"cannot be looked up, {after.path} does not parse"
    elif before.kind != after.kind:
        yield "", True, f"was a {before.kind}, is a {after.kind}"
    elif isinstance(before.node, ast.ClassDef):
        assert isinstance(after.node, ast.ClassDef)
        for name in sorted(used.attributes | _IMPLICIT):
            mine = old.member(before, name)
            if mine is None:
                continue
            theirs = new.member(after, name)
            if theirs is None:
                yield name, True, "is gone"
                continue
            called = before.node.name if name == "__init__" else name
            yield from (
                (name, broken, text)
                for broken, text in _changed(mine, theirs, used.calls.get(called), True)
            )
    elif isinstance(before.node, _FUNCTIONS) and after.node is not None:
        calls = used.calls.get(before.node.name)
        for broken, text in _changed(before.node, after.node, calls, False):
            yield "", broken, text


def _changed(
    old: ast.stmt, new: ast.stmt, calls: set[Call] | None, bound: bool
) -> Iterator[tuple[bool, str]]:
    if isinstance(old, _FUNCTIONS) != isinstance(new, _FUNCTIONS):
        yield True, "was a function or a value and is now the other"
    elif isinstance(old, _FUNCTIONS) and isinstance(new, _FUNCTIONS):
        if (text := _signature_change(old, new)) is None:
            return
        if type(old) is not type(new):
            yield True, text
            return
        mine = {call for call in calls or () if call.fits(old.args, bound)}
        fine = (
            all(call.fits(new.args, bound) for call in mine)
            if mine
            else (accepts(old.args, new.args))
        )
        yield not fine, text
    elif isinstance(old, ast.AnnAssign) and isinstance(new, ast.AnnAssign):
        was, now = ast.unparse(old.annotation), ast.unparse(new.annotation)
        if was != now:
            yield False, f"was of type {was}, is of type {now}"


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _signature_change(old: _Function, new: _Function) -> str | None:
    """Say what differs between two signatures, ``None`` if nothing does."""
    before, after = _parameters(old), _parameters(new)
    words = [f"takes {text} no more" for text in before if text not in after]
    words += [f"takes {text}" for text in after if text not in before]
    if not words and before != after:
        words.append("takes its parameters in another order")
    if type(old) is not type(new):
        words.append("is asynchronous on one side only")
    returns = [ast.unparse(n.returns) if n.returns else "?" for n in (old, new)]
    if returns[0] != returns[1]:
        words.append(f"returns {returns[1]} instead of {returns[0]}")
    return ", ".join(words) or None


def _parameters(node: _Function) -> list[str]:
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(plain, defaults, strict=True)]
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    texts = [
        ast.unparse(arg) + (f"={ast.unparse(default)}" if default is not None else "")
        for arg, default in pairs
    ]
    texts += [f"*{ast.unparse(args.vararg)}"] if args.vararg else []
    texts += [f"**{ast.unparse(args.kwarg)}"] if args.kwarg else []
    return texts


def accepts(old: ast.arguments, new: ast.arguments) -> bool:
    """Tell whether every call that ``old`` takes is taken by ``new``.

    Used for what is handed on and not called by name.
    """
    before = [arg.arg for arg in (*old.posonlyargs, *old.args)]
    after = [arg.arg for arg in (*new.posonlyargs, *new.args)]
    was, now = _optional(old), _optional(new)
    by_name = {arg.arg for arg in old.kwonlyargs}
    there = {*after, *(arg.arg for arg in new.kwonlyargs)}
    return (
        after[: len(before)] == before
        and len(new.posonlyargs) <= len(old.posonlyargs)
        and (by_name <= there or new.kwarg is not None)
        and there - set(before) - by_name <= now
        and was & there <= now
        and (old.vararg is None or new.vararg is not None)
        and (old.kwarg is None or new.kwarg is not None)
    )


def _optional(arguments: ast.arguments) -> set[str]:
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    optional = set(names[len(names) - len(arguments.defaults) :])
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return optional | {arg.arg for arg, default in pairs if default is not None}
