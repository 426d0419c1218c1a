"""docs/results.md: its commands exist, and its virtual times match the simulator."""

import re
import shlex

import pytest
import test_docs
from test_docs import COURSE, ROOT, unknown_commands, without_code

from distlab.course import anchor
from distlab.sim import Cluster, Options
from distlab.sim.script import run_script
from distlab.util.text import seconds_text

pytestmark = pytest.mark.usefixtures("forked")

README = test_docs.README.read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"`((?:distlab|python|pytest|mpirun|make) [^`]+)`")


# --- commands ------------------------------------------------------------------------------------


def missing(command: str) -> list[str]:
    """Return the files, subcommands and options of a command that do not exist."""
    words = shlex.split(command)
    files = [word for word in words if word.endswith((".py", ".sh", ".yaml")) or "tests/" in word]
    found = [file for file in files if not (ROOT / file).exists()]
    if words[0] == "python" and "-m" not in words and not found:
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        found += [word for word in words[2:] if not re.search(rf"{re.escape(word)}\b", text)]
    return found + (unknown_commands(f"```console\n$ {command}\n```") if "distlab" in words else [])


COMMANDS = [*dict.fromkeys(COMMAND.findall(without_code(RESULTS)))]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_names_is_there(command: str) -> None:
    assert missing(command) == []


@pytest.mark.parametrize("page", [README, RESULTS], ids=["README", "results"])
def test_commands_of_the_trainer_are_there(page: str) -> None:
    configs = re.findall(r"^distlab train --config (\S+)", page, flags=re.MULTILINE)
    assert configs
    assert [name for name in configs if not (ROOT / name).exists()] == []


SIMULATED = re.findall(
    r"^\| .* \| (\S+ \S+) \| `distlab sim --cluster (\S+) --ranks (\d+) (scripts/\S+) (\w+)` \|$",
    RESULTS,
    flags=re.MULTILINE,
)


@pytest.mark.parametrize("row", SIMULATED, ids=lambda row: row[-1])
def test_virtual_times_are_those_of_the_simulator(row: tuple[str, ...]) -> None:
    quoted, cluster, ranks, program, subject = row
    world = Cluster.preset(cluster)
    run = run_script(ROOT / program, [subject], int(ranks), world, Options())
    assert seconds_text(run.seconds) == quoted


RATIO = re.compile(r"[\d.]+(?= ×)")
LINKED = re.findall(r"\[([^]]+ × [^]]+)\]\(docs/results\.md#([\w-]+)\)", README)
SECTIONS = {
    anchor(section.partition("\n")[0]): section
    for section in re.split(r"^#+ ", RESULTS, flags=re.MULTILINE)
}


@pytest.mark.parametrize(("text", "section"), LINKED)
def test_ratios_of_the_readme_are_in_the_section_to_which_they_link(
    text: str, section: str
) -> None:
    measured = re.findall(r"[\d.]*\d", SECTIONS[section])
    assert [ratio for ratio in RATIO.findall(text) if ratio not in measured] == []


# --- the picture ---------------------------------------------------------------------------------


def test_the_picture_has_the_phases_and_lessons_of_today() -> None:
    picture = (ROOT / "docs/images/course.svg").read_text(encoding="utf-8")
    texts = set(re.findall(r">([^<>]+)</text>", picture))
    for phase in COURSE.phases:
        assert f"{len(phase.tasks)} tasks, {phase.points} points" in texts
        wanted = {name for lesson in phase.lessons for name in (lesson.title, f"{lesson.name}.py")}
        assert wanted <= texts, "python scripts/course_map.py draws it again"
