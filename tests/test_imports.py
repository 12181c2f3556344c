"""Imports go down the layers only, so that an attack cannot reach the truth nor a defense the wire."""

import ast
from pathlib import Path

import gradveil

ROOT = Path(gradveil.__file__).parent
# Packages of one layer may not import each other, except where a pair is listed as allowed.
LAYERS: list[set[str]] = [
    {"core", "errors"},
    {"tree", "check", "jit", "secret", "capture", "files"},
    {"gradients", "wire", "select", "spec"},
    {"data", "models", "theory", "record", "paper", "shares"},
    {"defenses", "metrics"},
    {"veil", "attacks", "generator", "guard"},
    {"gate"},
    {"training", "audit", "cost", "config", "sweep"},
    {"engines", "ui", "reproduce"},
    {"cli", "__main__"},
]
ALLOWED = {
    ("core", "errors"),
    ("models", "data"),
    ("generator", "data"),
    ("audit", "config"),
    ("audit", "training"),
    ("audit", "sweep"),
    ("audit", "cost"),
    ("training", "config"),
    ("cost", "config"),
    ("cost", "training"),
    ("__main__", "cli"),
    ("attacks", "guard"),
    ("attacks", "generator"),
    ("veil", "guard"),
}
# What an attacker must never see: the scores, the truth's way in, the client's shell.
FORBIDDEN = {"attacks": {"metrics", "gate", "veil", "data"}, "defenses": {"wire", "veil", "metrics", "attacks"}}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Return the gradveil parts a file imports, absolute or relative, at any depth of the code."""
    package = ("gradveil", *path.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("gradveil.")}
    return {part for part in found if (ROOT / part).is_dir() or (ROOT / f"{part}.py").exists()}


def test_every_part_has_a_layer() -> None:
    parts = {part_of(p) for p in ROOT.rglob("*.py")} - {"__init__"}
    known = set().union(*LAYERS)
    assert parts <= known, f"give these a layer: {sorted(parts - known)}"


def test_imports_go_down() -> None:
    layer = {part: i for i, parts in enumerate(LAYERS) for part in parts}
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        part = part_of(path)
        if part == "__init__":
            continue
        for other in imported_parts(path) - {part, "__init__"}:
            if other in FORBIDDEN.get(part, ()) or (layer[other] >= layer[part] and (part, other) not in ALLOWED):
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not wrong, "\n".join(wrong)
