"""A shell script, or a line of one, as the words of the one command in it that trains.

Followed are comments, continued lines, assignments of strings and arrays, and `$NAME`, `${NAME}`, `${NAME[@]}`,
`${NAME:-default}` and `$((A * B))`. What a condition, a loop or a program decides is not: a variable that it sets
has no value, and the command that needs one is refused. No jax.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from parallax.config import ConfigError, brief

Value = str | list[str]

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_EXPANSION = (
    r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`"
    r"|\$\{(?:[^{}]|\$\{[^{}]*\})*\}|\$[A-Za-z_]\w*|\$[0-9@*#?$!]"
)
_PLAIN = re.compile(
    rf"""(?P<joined>\\\n) | (?P<escaped>\\.) | (?P<single>'[^']*') | (?P<quote>")
    | (?P<skipped>(?<![^\s;|&(])\#[^\n]* | (?:\d*|&)[<>]+(?:&\d|[ \t]*[^\s;|&]+))
    | (?P<expansion>{_EXPANSION}) | (?P<end>\|\||&&|[;&|\n]) | (?P<open>\() | (?P<close>\)) | (?P<text>[\w/.,:=@%+-]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(
    rf'(?P<joined>\\\n)|(?P<escaped>\\.)|(?P<quote>")|(?P<expansion>{_EXPANSION})|(?P<text>[^\\"$`]+|.)', re.DOTALL
)
_DECLARE = r"(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?"
_ARRAY = re.compile(rf"\s*{_DECLARE}(\w+)(\+?)=\((.*)\)\s*", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPENERS = frozenset(("if", "for", "while", "until", "case", "select"))
_CLOSERS = frozenset(("fi", "done", "esac"))
_TESTS = frozenset(("[", "[[", "test"))
_OTHERS = frozenset(
    ("echo", "printf", "cat", "mkdir", "cd", "rm", "cp", "ls", "source", ".", "set", "ulimit", "module")
)
_MODEL_FLAGS = frozenset(("--num-layers", "--hidden-size", "--micro-batch-size", "--tensor-model-parallel-size"))
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


_PRINT = "put echo before the command, run the script, and give what it prints"


class _Unresolved(Exception):
    """What a part of the script is cannot be known here. The message is one line."""


def training_command(
    text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[str]:
    """The words of the command. `arguments` are $1, $2, ... of the script. Raises ConfigError where there is none or
    more than one, or where a variable of it has no value."""
    commands, unresolved = _commands(text.replace("\r\n", "\n"), arguments, environment or {})
    with_model = [words for words in commands if _MODEL_FLAGS & {word.partition("=")[0] for word in words}]
    if unresolved and not with_model:
        raise ConfigError(unresolved[-1:])  # a script trains at its end
    found = with_model or commands
    if len(found) > 1:
        rule = f"there are {len(found)} commands that train; give one of them alone"
        raise ConfigError([f"{rule}: {brief(' '.join(found[0][:3]))} ... is the first"])
    if not found:
        use = "'torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 ...', or the path of a script"
        raise ConfigError([f"{brief(text.strip())} holds no command that trains; use for example {use}"])
    return found[0]


def _commands(text: str, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[list[str]], list[str]]:
    """The commands that train, and why others that may do so have no words. Raises ConfigError."""
    variables: dict[str, Value | _Unresolved] = {**environment, "@": list(arguments), "*": list(arguments)}
    variables |= {str(i): word for i, word in enumerate(arguments, start=1)}
    commands, unresolved, depth, conditional = [], [], 0, False
    for statement, end in _statements(text):
        first = (statement.split() or [""])[0]
        depth += first in _OPENERS
        words: list[str] = []
        try:
            words = _run(statement, variables, depth > 0 or conditional)
        except _Unresolved as error:
            unresolved += [str(error)] if _may_train(statement) else []
        except ValueError as error:
            raise ConfigError([f"{brief(statement.strip())} is not shell: {error}; close what is open"]) from None
        if _trains(words) and depth:
            where = f"{brief(' '.join(words[:2]))} ... stands inside of a condition or a loop"
            raise ConfigError([f"{where}, which is not followed; {_PRINT}"])
        if _trains(words):
            commands.append(words)
        depth = max(depth - (first in _CLOSERS), 0)
        conditional = end in ("&&", "||") and (first in _TESTS or conditional)
    return commands, unresolved


def _pieces(text: str) -> Iterator[tuple[str, str, bool]]:
    """Kind, text, and whether it stands in double quotes."""
    at, quoted = 0, False
    while at < len(text):
        found = (_QUOTED if quoted else _PLAIN).match(text, at)
        assert found and found.lastgroup
        yield found.lastgroup, found[0], quoted
        quoted ^= found.lastgroup == "quote"
        at = found.end()


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """Each with what ends it; comments, redirections and line breaks inside of arrays are left out."""
    statement, depth = "", 0
    for kind, piece, _ in _pieces(text):
        if kind == "joined":
            continue
        if kind == "end" and (not depth or piece != "\n"):
            yield statement, piece
            statement, depth = "", 0
            continue
        if kind == "open" and (depth or re.search(r"\w\+?=$", statement)):
            depth += 1
        elif kind == "close" and depth:
            depth -= 1
        statement += " " if kind in ("skipped", "end") else piece
    yield statement, "\n"


def _run(statement: str, variables: dict[str, Value | _Unresolved], conditional: bool) -> list[str]:
    """The words of a command; none of an assignment, which is made. Raises ValueError where a quote is open."""
    if conditional:
        for name in re.findall(r"(?:^|\s)([A-Za-z_]\w*)\+?=", statement):
            variables[name] = _Unresolved(f"${name} is set under a condition, which is not followed; {_PRINT}")
    elif array := _ARRAY.fullmatch(statement):
        name, more, _ = array.groups()
        try:
            inside = _ARRAY.fullmatch(_expand(statement, variables))
            assert inside
            before = variables.get(name, []) if more else []
            before = [before] if isinstance(before, str) else before
            variables[name] = before if isinstance(before, _Unresolved) else [*before, *shlex.split(inside[3])]
        except _Unresolved as error:
            variables[name] = error
        return []
    elif names := _assigned(statement):
        try:
            return _assign(shlex.split(_expand(statement, variables)), variables)
        except _Unresolved as error:
            variables |= dict.fromkeys(names, error)
            return []
    if not statement.strip():
        return []
    if statement.split()[0] == "shift":
        for name in [name for name in variables if not name[0].isalpha() and name[0] != "_"]:
            variables[name] = _Unresolved(
                f"${name} comes after `shift`, which is not followed; write its value instead"
            )
    words = shlex.split(_expand(statement, variables))
    while words and words[0] in ("then", "else", "do", "{"):
        words = words[1:]
    return words if conditional else _assign(words, variables)


def _assigned(statement: str) -> list[str]:
    """The names that a statement sets, where it does nothing else."""
    plain = "".join(
        "x" if quoted or kind in ("expansion", "single") else piece for kind, piece, quoted in _pieces(statement)
    )
    words = re.sub(rf"^\s*{_DECLARE}", "", plain).split()
    found = [_ASSIGNMENT.match(word) for word in words]
    return [one[1] for one in found if one] if all(found) else []


def _assign(words: list[str], variables: dict[str, Value | _Unresolved]) -> list[str]:
    """Makes the assignments that a command begins with; what follows them."""
    if words and words[0] in ("export", "declare", "local", "readonly", "typeset"):
        words = [word for word in words[1:] if _ASSIGNMENT.fullmatch(word)]
    assigned = []
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        assigned.append(found.groups())
        words = words[1:]
    if not words:  # otherwise they are of the command's environment alone
        for name, more, value in assigned:
            before = variables.get(name, "") if more else ""
            if not isinstance(before, _Unresolved):
                variables[name] = [*before, value] if isinstance(before, list) else before + value
    return words


def _expand(statement: str, variables: dict[str, Value | _Unresolved]) -> str:
    """The statement with its variables written out and quoted, for shlex. Raises _Unresolved."""
    out = ""
    for kind, piece, quoted in _pieces(statement):
        if kind != "expansion":
            out += piece
            continue
        value = _value(piece, variables)
        if quoted:
            words = [value] if isinstance(value, str) else value
            out += '" "'.join(re.sub(r'([\\"$`])', r"\\\1", word) for word in words)
        elif re.search(r"(?:^|\s)\w+\+?=\S*$", out):  # an assignment is not split
            out += shlex.quote(value if isinstance(value, str) else " ".join(value))
        else:
            words = [value] if isinstance(value, str) else value
            out += " ".join(shlex.quote(part) for word in words for part in word.split())
    return out


def _value(piece: str, variables: dict[str, Value | _Unresolved]) -> Value:
    if piece.startswith("$(("):
        return str(_arithmetic(piece, variables))
    if piece.startswith(("$(", "`")):
        raise _Unresolved(f"{brief(piece)} is the output of a program, which is not run; write its value instead")
    inside = piece[2:-1] if piece[1] == "{" else piece[1:]
    found = re.fullmatch(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?", inside, re.DOTALL)
    if found is None:
        raise _Unresolved(f"{brief(piece)} is an expansion that is not followed; write its value instead")
    name, whole, operation, default = found.groups()
    value = variables.get(name)
    if operation and (value is None or (":" in operation and value in ("", []))):
        value = shlex.split(_expand(f'"{default}"', variables))[0]
        if "=" in operation:
            variables[name] = value
    if value is None:
        value = _Unresolved(f"${name} has no value; {_give(name)}")
    if isinstance(value, _Unresolved):
        raise value
    if isinstance(value, list) and not whole and name not in "@*":
        return value[0] if value else ""  # as the shell has it
    return [value] if whole and isinstance(value, str) else value


def _give(name: str) -> str:
    if name.isdigit():
        return "give the script's arguments after its path"
    return f"set it in the script, or before the command: {name}=... parallax translate ..."


def _arithmetic(piece: str, variables: dict[str, Value | _Unresolved]) -> int:
    """Of `$((A * B))`. Raises _Unresolved."""
    names = re.sub(r"\$\{?(\w+)\}?", r"\1", piece[3:-2])
    numbers = re.sub(r"[A-Za-z_]\w*", lambda found: f"({_value('$' + found[0], variables)})", names)
    try:
        return _evaluate(ast.parse(numbers.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        raise _Unresolved(f"{brief(piece)} is not arithmetic of integers; write its value instead") from None


def _evaluate(node: ast.expr) -> int:
    """Raises ValueError where it is more than integers, + - * / % and parentheses."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError


def _trains(words: Sequence[str]) -> bool:
    if not words or words[0] in _OTHERS:
        return False
    starts = any(os.path.basename(word) in LAUNCHERS or word.endswith(".py") for word in words)
    return words[0].startswith("--") or (starts and any(word.startswith("--") for word in words))


def _may_train(statement: str) -> bool:
    """Of a statement whose variables are not all known."""
    first = (statement.split() or [""])[0]
    return first not in _OTHERS and any(part in statement for part in (*LAUNCHERS, ".py", "--"))
