"""The size budget as a Markdown table; exit code 1 when a limit or a direction of imports is broken.

    python benchmarks/sizes.py

Lines are those of the files as `ruff format` leaves them. What a file imports inside the project is found in the
syntax tree, with the imports inside functions.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
STAGES = ("prepare_data", "train_reward", "train_ppo", "evaluate")
WINGS = ("dataprep", "evaluation")
LIMITS = {  # a change that needs a higher one says why
    "prepare_data.py": 600,
    "train_ppo.py": 1_400,
    "train_ppo.py with what it imports": 5_600,
    "utils": 4_700,
    "README.md, words": 1_500,
}


def imports(file: Path, root: Path) -> set[Path]:
    """Files of the project that a file imports: modules, packages and names that are modules of a package."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = file.relative_to(root).parent.parts
            base = ".".join(
                [*above[: len(above) - node.level + 1], node.module or ""] if node.level else [node.module]
            )
            names += [base.strip("."), *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
    parts = [name.split(".")[: i + 1] for name in names for i in range(name.count(".") + 1)]
    places = [place for part in parts for place in (root.joinpath(*part, "__init__.py"), root.joinpath(*part))]
    files = {place if place.suffix else place.with_suffix(".py") for place in places}
    return {found for found in files if found.is_file() and found != file}


def closure(file: Path, root: Path) -> set[Path]:
    """A file and all files of the project that importing it and calling its functions can load."""
    found, todo = set(), [file]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += imports(file, root)
    return found


def project_files(root: Path) -> list[Path]:
    folders = ("utils", *WINGS)
    return [
        *sorted(root.glob("*.py")),
        *(file for folder in folders for file in sorted((root / folder).rglob("*.py"))),
    ]


def wrong_imports(root: Path) -> Iterator[str]:
    """Circles, and arrows that point upwards: stages stand on wings and on utils, wings on utils, utils on nothing."""
    for file in project_files(root):
        name = str(file.relative_to(root))
        layer, stem = file.relative_to(root).parts[0], file.stem
        if any(file in closure(other, root) for other in imports(file, root) if other.name != "__init__.py"):
            yield f"{name} imports itself by way of another file"
        for other in sorted(imports(file, root)):
            top = other.relative_to(root).parts[0].removesuffix(".py")
            up = {"utils": top in (*STAGES, *WINGS)} | dict.fromkeys(WINGS, top in STAGES)
            strange = stem != {"dataprep": "prepare_data", "evaluation": "evaluate"}.get(top, stem) and layer != top
            if up.get(layer, strange):
                yield f"{name} imports {other.relative_to(root)}"


def count_lines(files) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def sizes(root: Path) -> dict[str, int]:
    """What is counted -> lines, or words of the README."""
    found = {}
    for stage in STAGES:
        file = root / f"{stage}.py"
        found[file.name] = count_lines([file])
        found[f"{file.name} with what it imports"] = count_lines(closure(file, root))
    for folder in ("utils", *WINGS, "tests"):
        if (root / folder).is_dir():
            found[folder] = count_lines((root / folder).rglob("*.py"))
    return found | {"README.md, words": len((root / "README.md").read_text(encoding="utf-8").split())}


def main(root: Path = ROOT) -> int:
    """Print the table and what is wrong; the exit code."""
    found, wrong = sizes(root), list(wrong_imports(root))
    print("| what | lines | limit | |\n|---|---:|---:|---|")
    for name, lines in found.items():
        limit = LIMITS.get(name)
        over = limit is not None and lines > limit
        wrong += [f"{name}: {lines:,} is above {limit:,}"] if over else []
        print(f"| {name} | {lines:,} | {'' if limit is None else f'{limit:,}'} | {'above' if over else ''} |")
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
