"""What the size budget counts, on a made-up project."""

from pathlib import Path

import pytest

from benchmarks import sizes

FILES = {
    "prepare_data.py": "from dataprep import reader\nimport utils.a\n",
    "train_reward.py": "import os\n",
    "train_ppo.py": "import torch\nfrom utils.a import f\n",
    "evaluate.py": "x = 1\n",
    "utils/__init__.py": "from utils.c import h\n",
    "utils/a.py": "def f():\n    from .b import g\n    return g\n",
    "utils/b.py": "g = 1\n",
    "utils/c.py": "h = 1\n\n\n",
    "utils/unused.py": "import json\n",
    "dataprep/__init__.py": "",
    "dataprep/reader.py": "from utils import b\n",
    "tests/test_a.py": "import train_ppo\n",
    "README.md": "# A project\n\nof six words.\n",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    write(tmp_path, FILES)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_closure_holds_imports_inside_functions_and_packages(tree):
    def names(file):
        return {str(found.relative_to(tree)) for found in sizes.closure(tree / file, tree)}

    assert names("train_ppo.py") == {"train_ppo.py", "utils/__init__.py", "utils/a.py", "utils/b.py", "utils/c.py"}
    assert names("train_reward.py") == {"train_reward.py"}
    assert names("prepare_data.py") == names("train_ppo.py") - {"train_ppo.py"} | {
        "prepare_data.py",
        "dataprep/__init__.py",
        "dataprep/reader.py",
    }


def test_the_table_counts_lines_and_says_what_is_above_its_limit(tree, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "LIMITS", {"train_ppo.py with what it imports": 10, "utils": 9, "README.md, words": 6})
    assert sizes.main(tree) == 0
    out = capsys.readouterr().out.splitlines()
    # train_ppo 2, utils: __init__ 1, a 3, b 1, c 3; with unused 1
    assert "| train_ppo.py | 2 |  |  |" in out and "| train_ppo.py with what it imports | 10 | 10 |  |" in out
    assert "| utils | 9 | 9 |  |" in out and "| README.md, words | 6 | 6 |  |" in out and "| tests | 1 |  |  |" in out
    (tree / "utils" / "b.py").write_text("g = 1\n\n")
    assert sizes.main(tree) == 1
    out, err = capsys.readouterr()
    assert "| utils | 10 | 9 | above |" in out
    assert err.splitlines() == ["train_ppo.py with what it imports: 11 is above 10", "utils: 10 is above 9"]


@pytest.mark.parametrize(
    "files, wrong",
    [
        ({}, []),
        ({"utils/b.py": "def g():\n    import evaluate\n"}, ["utils/b.py imports evaluate.py"]),
        (
            {"utils/unused.py": "from dataprep.reader import x\n"},
            ["utils/unused.py imports dataprep/__init__.py", "utils/unused.py imports dataprep/reader.py"],
        ),
        ({"dataprep/reader.py": "import train_reward\n"}, ["dataprep/reader.py imports train_reward.py"]),
        (
            {"train_reward.py": "from dataprep import reader\n"},
            ["train_reward.py imports dataprep/__init__.py", "train_reward.py imports dataprep/reader.py"],
        ),
        (
            {"utils/b.py": "from utils.a import f\n"},
            [f"utils/{name}.py imports itself by way of another file" for name in "ab"],
        ),
    ],
)
def test_circles_and_arrows_upwards_are_named(tree, files, wrong):
    write(tree, files)
    assert list(sizes.wrong_imports(tree)) == wrong
    assert sizes.main(tree) == int(bool(wrong))


def test_the_project_has_no_circle_and_no_arrow_upwards():
    assert list(sizes.wrong_imports(sizes.ROOT)) == []
