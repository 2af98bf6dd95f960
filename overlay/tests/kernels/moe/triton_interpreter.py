# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run Triton kernels of vLLM on the CPU, in Triton's interpreter."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec

HAS_INTERPRETER = find_spec("triton") is not None

# CPU builds of vLLM turn Triton off; the interpreter needs no driver.
_PRELUDE = """
import importlib
import torch
import vllm.triton_utils as triton_utils
triton = triton_utils.triton = importlib.import_module("triton")
triton_utils.tl = importlib.import_module("triton.language")
"""


def interpret(script: str) -> str:
    """Run Python code in a process in which Triton kernels are interpreted.

    Args:
        script: The code; a failed assertion fails the caller.

    Returns:
        What it printed.

    """
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(script)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
