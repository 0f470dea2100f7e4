"""`python -m selectivit` is the command line."""

import subprocess
import sys

from selectivit import __version__


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "selectivit", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in done.stdout


def test_its_exit_status_is_the_command_lines():
    done = subprocess.run([sys.executable, "-m", "selectivit", "doctors"], capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean 'doctor'?" in done.stderr
