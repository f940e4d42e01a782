"""The notebooks run from their first cell to the last, and show what came out when they were written."""

import tempfile
from pathlib import Path

import nbformat
import pytest
import sharing
from nbclient import NotebookClient

pytestmark = pytest.mark.system

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["convert", "paper", "quality", "quickstart", "research", "states"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# Of the kernel's connection, not of ours.
@pytest.mark.filterwarnings("ignore")
def test_it_runs(path, shallow, tmp_path, monkeypatch):
    for name, value in sharing.environment().items():
        monkeypatch.setenv(name, value)
    notebook = read(path)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = f"import pathlib\nfrom qspec_jax import demo\ndemo.MODEL = pathlib.Path({str(shallow)!r})\n{first.source}"
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_shows(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs and not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert tempfile.gettempdir() not in str(outputs) and str(Path.home()) not in str(outputs)
