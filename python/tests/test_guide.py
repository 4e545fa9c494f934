"""The programs of docs/guide/python.md, in order, in one process."""

import os
import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs/guide/python.md"


def test_programs_of_the_guide_run() -> None:
    blocks = re.findall(r"^```python( skip)?\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    names: dict[str, object] = {}
    backend = os.environ["DEVICE_IPC_BACKEND"]
    for skip, program in blocks:
        code = compile(program, str(GUIDE), "exec")
        if not skip:
            exec(code, names)
    # Functions of the guide refer to their names.
    names.clear()
    assert os.environ["DEVICE_IPC_BACKEND"] == backend == "mock"
