import json
import subprocess
import sys

import pytest

from selectivit.cli.main import COMMANDS


def test_help_names_every_command(run):
    status, out, _ = run("--help")
    assert status == 0 and all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_config(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0 and "--config" in out


@pytest.mark.parametrize("command", ["features", "compare", "segment"])
def test_shared_options_read_the_same_everywhere(run, command):
    _, out, _ = run(command, "--help")
    for words in ("--model NAME", "--out FOLDER", "--device DEVICE", "--seed N", "--size PX"):
        assert words in out


def test_version(run):
    from selectivit import __version__

    assert run("--version") == (0, f"selectivit {__version__}\n", "")


def test_python_dash_m_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "selectivit", "--version"], capture_output=True, text=True)
    from selectivit import __version__

    assert (done.returncode, done.stdout) == (0, f"selectivit {__version__}\n"), done.stderr


def test_an_unknown_command_is_answered_with_the_nearest(run):
    status, out, err = run("feature", "a.jpg")
    assert status == 2 and out == ""
    assert err == (
        "selectivit: error: unknown command 'feature'; did you mean 'features'? "
        f"the commands are: {', '.join(COMMANDS)}\n"
    )


def test_no_command_lists_them(run):
    status, _, err = run()
    assert status == 2 and "doctor, models, features, compare, segment" in err


@pytest.mark.parametrize(
    "arguments",
    [("features",), ("compare",), ("features", "a.jpg", "--sise", "3"), ("compare", "a.jpg", "--alpha", "x")],
)
def test_wrong_options_exit_2_and_say_which(run, arguments):
    status, out, err = run(*arguments)
    assert status == 2 and out == "" and "error:" in err


def test_help_loads_no_host_and_no_matplotlib():
    code = (
        "import sys; from selectivit.cli.main import main; main(['features', '--help']);"
        "heavy = 'timm open_clip transformers matplotlib rich PIL'.split();"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_doctor_says_what_is_here(run):
    status, out, err = run("doctor")
    assert status == 0 and err == ""
    for words in ("selectivit", "torch", "timm", "threads", "compiled CPU", "Triton        none", "dinov2-small"):
        assert words in out


def test_doctor_as_json(run, tmp_path):
    status, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert status == 0 and found["kernels"]["Triton"].startswith("none (")
    assert (
        found["weights"]["cache"] == str(tmp_path / "cache") and "not in the cache" in found["weights"]["dinov2-small"]
    )


def test_doctor_tells_how_to_install_what_is_missing(run, monkeypatch):
    from selectivit.cli import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "open_clip" else name)
    _, out, _ = run("doctor")
    assert 'not installed: pip install "selectivit[open_clip]"' in out
    assert "CoCa" not in out


def test_what_doctor_says_can_be_swapped_is_what_the_hosts_know():
    pytest.importorskip("timm")
    from selectivit.cli.doctor import SWAPPABLE
    from selectivit.swap import timm

    assert all(kind.__name__ in SWAPPABLE["timm"] for kind in timm.SELECTIVE)
    pytest.importorskip("transformers")
    from selectivit.swap import transformers

    assert SWAPPABLE["transformers"] == ", ".join(transformers.ATTENTION)


def test_models_lists_names_and_their_forms(run):
    status, out, _ = run("models")
    assert status == 0 and out.startswith("name ") and "dinov2-small  " in out and "Accepted names" in out
    entries = json.loads(run("models", "--json")[1])
    assert {"name", "source", "params", "note"} <= set(entries[0])


def test_output_that_nobody_reads_is_no_error(environment):
    done = subprocess.run(
        f"{sys.executable} -c 'from selectivit.cli.main import main; raise SystemExit(main())' models | head -1",
        shell=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0 and done.stderr == ""


def test_a_fault_of_ours_keeps_its_traceback(run, monkeypatch):
    from selectivit.cli import doctor

    monkeypatch.setattr(doctor, "report", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_a_fault_of_ours_is_no_status_of_a_job_that_was_done(environment):
    code = (
        "from selectivit.cli import doctor, main; doctor.report = lambda: 1 / 0\n"
        "import sys; sys.argv = ['selectivit', 'doctor']; sys.exit(main.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 70 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
