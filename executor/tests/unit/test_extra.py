"""`slurm_extra`: sbatch's options in all their spellings, and those that would break the run."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snakemake_executor_plugin_submitit.extra import parse, slurm_seconds, split
from snakemake_executor_plugin_submitit.values import ResourceError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("--licenses=x:1 --hold", {"licenses": "x:1", "hold": True}),
        ("--licenses x:1 --hold", {"licenses": "x:1", "hold": True}),
        ("--hold --licenses x:1", {"hold": True, "licenses": "x:1"}),
        ("-q long -L x:1", {"qos": "long", "licenses": "x:1"}),
        ("-qlong -Lx:1", {"qos": "long", "licenses": "x:1"}),
        ("-HO -s", {"hold": True, "overcommit": True, "oversubscribe": True}),
        ("-Hq long", {"hold": True, "qos": "long"}),
        ("-k --begin now", {"no-kill": True, "begin": "now"}),
        ("--nice --exclusive --hold", {"nice": True, "exclusive": True, "hold": True}),
        ("--nice=5 --exclusive=user", {"nice": "5", "exclusive": "user"}),
        # A site's own options.
        ("--wifi fast --lustre --bar=1", {"wifi": "fast", "lustre": True, "bar": "1"}),
        ("--extra=x", {"extra": "x"}),
        # Quotes: a value with a blank, and a word that holds options.
        ("'--comment2=a b'", {"comment2": "a b"}),
        ("--comment2='a b' --hold", {"comment2": "a b", "hold": True}),
        ('"--comment2=it\'s"', {"comment2": "it's"}),
        (
            "'--mail-type=END --mail-user=a@b -q long'",
            {"mail-type": "END", "mail-user": "a@b", "qos": "long"},
        ),
        ("'-q long'", {"qos": "long"}),
        ("'--mail-type END'", {"mail-type": "END"}),
        ("'--nice=5' '--hold -q long'", {"nice": "5", "hold": True, "qos": "long"}),
        # Abbreviations; the last of two.
        ("--licen=x", {"licenses": "x"}),
        ("--nice=1 --nice=2", {"nice": "2"}),
        ("--requeue --hold --no-requeue", {"hold": True, "requeue": False}),
        ("", {}),
    ],
)
def test_every_spelling_of_an_option_is_read(text: str, options: dict[str, Any]) -> None:
    assert parse(text) == options


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        (
            "-p main -A lab -q long",
            {"slurm_partition": "main", "slurm_account": "lab", "qos": "long"},
        ),
        ("-C ib --reserv=night", {"constraint": "ib", "reservation": "night"}),
        ("-M a,b -x n1 -w n[2-3]", {"clusters": "a,b", "exclude": "n1", "nodelist": "n[2-3]"}),
        ("--exclusive", {"exclusive": True}),
        ("--exclusive=user --gres=nvme:1", {"exclusive": "user", "gres": "nvme:1"}),
        (
            "-N 2 -c 4 --ntasks-per-node=8",
            {"nodes": "2", "cpus_per_task": "4", "tasks_per_node": "8"},
        ),
        ("--cpus-per-gpu=4 --ntasks-per-gpu=2", {"cpus_per_gpu": "4", "tasks_per_gpu": "2"}),
        ("-t 90", {"runtime": 90}),
        ("-t 1-0", {"runtime": 1440}),
        ("--time=1:30:01", {"runtime": 91}),
        ("--time=0:30", {"runtime": 1}),
        ("--mem=4000", {"mem_mb": 4000}),
        ("--mem=4G", {"mem_mb": 4096}),
        ("--mem-per-cpu=1500K", {"mem_mb_per_cpu": 2}),
        ("-G 4", {"gpu": 4}),
        ("--gpus=h200:8", {"gpu": 8, "gpu_model": "h200"}),
        ("--no-requeue", {"requeue": False}),
        ("--requeue", {"requeue": True}),
    ],
)
def test_an_option_that_has_a_resource_is_that_resource(
    text: str, resources: dict[str, Any]
) -> None:
    assert split(text) == (resources, {})


@pytest.mark.parametrize(
    ("text", "signal"),
    [
        ("--signal=USR1@60", "B:USR1@60"),
        ("--signal B:10@60", "B:10@60"),
        ("--signal=R:SIGUSR1@60", "RB:SIGUSR1@60"),
        ("--signal=TERM", "B:TERM"),
    ],
)
def test_a_signal_goes_to_the_batch_step(text: str, signal: str) -> None:
    assert split(text) == ({}, {"signal": signal})


def test_ntasks_stay_those_of_the_whole_job() -> None:
    assert split("-n 8") == ({}, {"ntasks": "8"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--job-name=x", "--job-name: .*--submitit-jobname-prefix"),
        ("-J x", "--job-name: "),
        ("--output=/dev/null", "--output: .*log"),
        ("--outp /dev/null", "--output: "),
        ("-o x", "--output: "),
        ("'--hold -o x'", "--output: "),
        ("-e x", "--error: "),
        ("-Ho x", "--output: "),
        ("--array=1-3", "--array: "),
        ("--parsable", "--parsable: .*id"),
        ("-Q", "--quiet: .*id"),
        ("--wait", "--wait: .*ended"),
        ("--wrap=id", "--wrap: "),
        ("--comment=x", "--comment: "),
        ("--export=NONE", "--export: .*environment"),
        ("--export-file=x", "--export-file: "),
        ("--chdir=/", "--chdir: .*--directory"),
        ("-D /", "--chdir: "),
        ("--workdir=/", "--workdir: "),
        ("--open-mode=truncate", "--open-mode: "),
        ("--test-only", "--test-only: nothing would be submitted"),
        ("-h", "--help: "),
        ("--usage", "--usage: "),
        ("-V", "--version: "),
        ("--uid=bob", "--uid: "),
        ("--exclu=n1", "--exclu may stand for exclude, exclusive"),
        ("licenses=x", "'licenses=x' is no option"),
        ("--hold main", "'main' is no option"),
        ("-", "'-' is no option"),
        ("--", "'--' is no option"),
        ("''", "'' is no option"),
        ("--hold : --hold", "':' is no option"),
        ("-z", "'-z' is no option"),
        ("-Hz", "sbatch has no option -z"),
        ("--licenses", "--licenses needs a value"),
        ("--signal", "--signal needs a value"),
        ("-q", "--qos needs a value"),
        ("--requeue=1", "--requeue takes no value"),
        ("'--signal=B:a b@1'", "expected SIGNAL@SECONDS"),
        ("--time=soon", "expected minutes"),
        ("--time=0", "expected minutes"),
        ("--mem=much", "expected a size"),
        ("--gpus=a:1,b:2", "--gpus=.*expected a number or MODEL:NUMBER"),
        ("--ntasks=0", "--ntasks=0: expected at least 1"),
        ("--a='", "No closing quotation"),
        ("--zz=\\\\", "--zz=.*no backslash"),
        ("--a=x\n--b", "expected a text of one line"),
    ],
)
def test_what_would_break_the_run_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(ResourceError, match=words) as caught:
        split(text)

    assert "resource slurm_extra" in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_yields_an_option_of_more_than_one_line(text: str) -> None:
    try:
        resources, options = split(text)
    except ResourceError:
        return

    for value in (*resources.values(), *options.values()):
        assert str(value).isprintable()
        assert "\\" not in str(value)
    assert all(name.replace("-", "").isalnum() for name in options)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:0:0", 3600),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:45", 217845),
        ("0-1", 3600),
    ],
)
def test_slurms_times_are_read(text: str, seconds: int) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1-", "-1", "1:2:3:4", "1h", "²", "INFINITE", "1:2-3"])
def test_what_is_no_time_of_slurms_is_none(text: str) -> None:
    assert slurm_seconds(text) is None
