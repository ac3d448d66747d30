"""`slurm_extra`: what passes to sbatch as it is, and what would break the run in every spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snakemake_executor_plugin_submitit.extra import parse
from snakemake_executor_plugin_submitit.values import ResourceError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ()),
        ("--licenses=x:1 --hold", ("--licenses=x:1", "--hold")),
        ("--licenses x:1 --hold", ("--licenses=x:1", "--hold")),
        ("-q long -Lx:1 -t 1-0", ("-qlong", "-Lx:1", "-t1-0")),
        ("-HO -Hq long -k --begin now", ("-HO", "-Hqlong", "-k", "--begin=now")),
        ("--nice --exclusive=user --hold", ("--nice", "--exclusive=user", "--hold")),
        # A site's own options, abbreviations, the last of two: sbatch knows.
        ("--wifi fast --lustre --bar=1", ("--wifi=fast", "--lustre", "--bar=1")),
        ("--licen=x --nice=1 --nice=2", ("--licen=x", "--nice=1", "--nice=2")),
        ("-p main --mem=4G -N 2", ("-pmain", "--mem=4G", "-N2")),
        # Quotes: a value with a blank, and a word that holds options.
        ("'--tres=a b' --prefer='a b'", ("--tres=a b", "--prefer=a b")),
        ('"--prefer=it\'s"', ("--prefer=it's",)),
        ("'--mail-type=END -q long' '-t 5'", ("--mail-type=END", "-qlong", "-t5")),
        ("'--mail-type END'", ("--mail-type=END",)),
    ],
)
def test_options_pass_as_they_are_each_with_its_value(text: str, words: tuple[str, ...]) -> None:
    assert parse(text).words == words


def test_options_on_which_other_resources_depend_are_known() -> None:
    assert {"ntasks", "no-requeue"} <= parse("-Hn 4 --no-requeue").names
    assert "ntasks" in parse("--ntasks=4").names
    assert parse("").names == frozenset()


@pytest.mark.parametrize(
    ("text", "signal"),
    [
        ("--signal=USR1@60", "B:USR1@60"),
        ("--hold --signal B:10@60", "B:10@60"),
        ("--signal=R:SIGUSR1@60", "RB:SIGUSR1@60"),
        ("--signal=USR1@60 --signal=TERM", "B:TERM"),
    ],
)
def test_a_signal_goes_to_the_batch_step(text: str, signal: str) -> None:
    found = parse(text)

    assert found.signal == signal
    assert not any("signal" in word for word in found.words)


# Long options that break the run, with their short ones.
REFUSED = {
    "job-name": "J",
    "output": "o",
    "error": "e",
    "array": "a",
    "wait": "W",
    "quiet": "Q",
    "help": "h",
    "version": "V",
    "chdir": "D",
    **dict.fromkeys(("comment", "open-mode", "wrap", "parsable", "test-only", "usage"), ""),
    **dict.fromkeys(("export", "export-file", "workdir", "uid"), ""),
}
# Options that are read as resources.
READ = {"clusters": "M", "exclude": "x"}
# Short options of sbatch that take no value, or none in a word of its own.
FLAGS = "HOQVWhksv"


@pytest.mark.parametrize(("name", "letter"), REFUSED.items())
def test_an_option_that_would_break_the_run_is_refused_in_every_spelling(
    name: str, letter: str
) -> None:
    long = [f"--{name}", f"--{name}=1", f"--{name} 1", f"--{name[:-1]}=1"]
    short = [f"-{letter}", f"-{letter}1", f"-{letter} 1", f"-HO{letter}", f"-H{letter}1"]
    spellings = long + (short if letter else [])
    nested = [f"'--hold {one}'" for one in spellings] + [f"'{one}'" for one in spellings]
    for text in [*spellings, *(f"--hold {one}" for one in spellings), *nested]:
        with pytest.raises(ResourceError, match=r"resource slurm_extra: .*--[a-z-]+: "):
            parse(text)


@pytest.mark.parametrize(
    "text", ["-x n1 --clusters=east", "-xn1 -M east", "--exclude n1 '--hold -Meast'"]
)
def test_nodes_and_clusters_are_read_as_resources(text: str) -> None:
    found = parse(text)

    assert found.resources == {"exclude": "n1", "clusters": "east"}
    assert set(found.words) <= {"--hold"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--job-name=x", "--job-name: .*--submitit-jobname-prefix"),
        ("-o x", "--output: .*log"),
        ("--export=NONE", "--export: .*environment"),
        ("--exclu=n1", "--exclu may stand for --exclude: write it in full"),
        ("-Hx n1", "give --exclude an option of its own"),
        ("licenses=x", "'licenses=x' is no option"),
        ("--nice=1 main", "'main' is no option"),
        ("-", "'-' is no option"),
        ("--", "'--' is no option"),
        ("''", "'' is no option"),
        ("-qlong : --hold", "':' is no option"),
        ("--signal", "expected SIGNAL@SECONDS"),
        ("'--signal=B:a b@1'", "expected SIGNAL@SECONDS"),
        ("--sig=USR1", "--sig may stand for --signal: write it in full"),
        ("--a='", "No closing quotation"),
        ("--a=x\n--b", "expected a text of one line"),
    ],
)
def test_a_refusal_says_why(text: str, words: str) -> None:
    with pytest.raises(ResourceError, match=words) as caught:
        parse(text)

    assert "resource slurm_extra" in str(caught.value)


PARTS = (
    *(f"--{name}" for name in ("hold", "nice", "out", "output", "wrap", "exclusive", "signal")),
    *("-", "--", "-H", "-o", "-q", "-Ho", "-k", "o", "x", "=", "1", ":", " ", "  ", "'", '"', "\\"),
)
texts = st.text(max_size=40) | st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def breaks_the_run(word: str) -> bool:
    """As getopt_long(3) reads a word for sbatch."""
    if word.startswith("--"):
        name = word[2:].partition("=")[0]
        return name != "" and any(other.startswith(name) for other in {**REFUSED, **READ})
    for letter in word[1:]:
        if letter in {*REFUSED.values(), *READ.values()}:
            return True
        if letter not in FLAGS:
            return False
    return False


@given(texts)
def test_no_text_gives_sbatch_a_script_or_what_would_break_the_run(text: str) -> None:
    try:
        found = parse(text)
    except ResourceError:
        return

    for word in found.words:
        assert word.startswith("-")
        assert word not in ("-", "--")
        assert word.isprintable()
        assert not breaks_the_run(word)
