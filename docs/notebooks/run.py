"""Executes the notebooks here and keeps what they show: python docs/notebooks/run.py

Needs nbclient and ipykernel; after a change to a notebook or to what it shows.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Every notebook, from its first cell."""
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": "."}}).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of this run
            if "outputs" in cell:
                cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
