"""Faults of building, of the command line's start, and of processes left behind."""

from python_tests.faults import Edit, Fault

_CUDA = "build_backend/jachess_build/cuda.py"

FAULTS = [
    Fault(
        "processes: ranks outlive the launcher's limit",
        (
            Edit(
                "python_tests/processes.py",
                "for number in _marked(mark):",
                "for number in ():",
            ),
        ),
        ("python_tests/test_processes.py -k sessions",),
    ),
    Fault(
        "processes: a launcher outlives a killed pytest",
        (
            Edit(
                "python_tests/processes.py",
                "        preexec_fn=die_with_parent,\n",
                "",
            ),
        ),
        ("python_tests/test_processes.py -k outlives",),
    ),
    Fault(
        "processes: a worker outlives its grid",
        (Edit("jachess_ext/compare/runs.py", "        os._exit(1)\n", "        return\n"),),
        ("python_tests/compare/test_runs.py -k killed_parent",),
    ),
    Fault(
        "start: torchao's own warnings before every command",
        (Edit("jachess_ext/cli.py", "    quiet_libraries()\n", ""),),
        ("python_tests/commands/test_start.py -k libraries_say",),
    ),
    Fault(
        "start: help of select imports torch",
        (
            Edit(
                "jachess_ext/commands/select.py",
                "from . import check_ending",
                "import torch as _\nfrom . import check_ending",
            ),
        ),
        ("python_tests/commands/test_start.py -k needs_no_extra",),
    ),
    Fault(
        "build: CUDA kernels where there is no GPU",
        (Edit(_CUDA, "if not (listed or gpus or force_cuda):", "if False:"),),
        ("python_tests/packaging/test_toolkit.py -k what_is_built_for",),
    ),
    Fault(
        "build: architectures that ptxas does not know",
        (
            Edit(
                _CUDA,
                "found = [arch for arch in DEFAULT_ARCHS if not supported or "
                "_number(arch) in supported]",
                "found = list(DEFAULT_ARCHS)",
            ),
        ),
        ("python_tests/packaging/test_toolkit.py -k what_is_built_for",),
    ),
    Fault(
        "build: nothing said while it compiles",
        (
            Edit(
                "build_backend/jachess_build/extensions.py", "if line.startswith(_STATUS):", "if 0:"
            ),
        ),
        ("python_tests/packaging/test_toolkit.py -k short_progress",),
    ),
]
