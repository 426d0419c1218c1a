"""Verdicts on mistakes in phase 2 name their causes, where torch's words are a riddle."""

import math
import re
from pathlib import Path

import pytest
from phase2.drawings import drawn, why_stopped
from wrong_answers.bank import COURSE, OWN, ROOT, hand_in, load
from wrong_answers.changes import changed
from wrong_answers.grading import find_tests, verdicts

from distlab.grade.outcomes import Outcome
from judging.checks import short_beside

ANSWERS = {answer.id: answer for answer in load(OWN)}
OTHER_BLOCK = """\
-        block = action.chunk * self.num_stages + stage + (1 if action.kind == "F" else -1)
+        block = action.chunk * self.num_stages + stage + 1
"""
SHARED_GRAPH = """\
-        if src == dst == self.rank:
+        if src == dst == self.rank and result:
+            self.arrived[next_action] = result
+        elif src == dst == self.rank:
"""
OWN_ORDER = "\n@@\n".join(
    ANSWERS[f"2.12 {name}"].change.strip("\n")
    for name in ("order_of_its_own_list", "gradients_with_a_header")
)
DIVIDED_BY_ZERO = """\
-        loss, num_targets = self.totals.tolist()
+        loss, num_targets = 1 / 0
"""
TWO_CATS = """\
-    bucket = torch.cat([*(gradient.flatten() for gradient in gradients), numbers])
+    bucket = torch.cat([gradient.flatten() for gradient in gradients])
+    bucket = torch.cat([bucket, numbers])
"""
NEW_GRADIENTS = """\
-    _copy_back(mean, gradients)
+    trained = [p for p in model.parameters() if p.requires_grad]
+    for p, part in zip(trained, mean.split([p.numel() for p in trained])):
+        p.grad = part.view(p.shape).clone()
"""


def messages_on(id: str, change: str, test: str, folder: Path) -> list[str]:
    """What the cases of one test of a task say of a change of the solution."""
    task = COURSE.task(id)
    lesson = changed((ROOT / task.solution).read_text(encoding="utf-8"), change)
    chosen = [one for one in find_tests(task) if one.name.startswith(test)]
    found = [verdict for _, verdict in verdicts(hand_in(task, lesson, folder), task, chosen)]
    assert {verdict.outcome for verdict in found} <= {Outcome.FAILED, Outcome.PASSED}
    return [verdict.message for verdict in found]


@pytest.mark.parametrize("change", [TWO_CATS, NEW_GRADIENTS], ids=["two cats", "new gradients"])
def test_what_takes_the_memory_of_a_second_bucket_is_named(change: str, tmp_path: Path) -> None:
    messages = messages_on("2.3", change, "test_memory_is_that_of_one_micro_batch", tmp_path)
    assert any("with one torch.cat, also if loss and number" in message for message in messages)
    assert any("back into the gradients that exist with copy_" in message for message in messages)


@pytest.mark.parametrize(
    ("change", "test", "phrases"),
    [
        (
            OTHER_BLOCK,
            "test_gradients_are_those_of_one_process",
            [
                "does the result of B in block k go to block k-1",
                "what the block before it returned?",
            ],
        ),
        (
            SHARED_GRAPH,
            "test_any_schedule_that_can_be_run_is_run",
            ["a second time", "Detach what goes from a block to the next, on the same rank too"],
        ),
        (
            OWN_ORDER,
            "test_any_schedule_that_can_be_run_is_run",
            ["Mismatch in shape", "both ranks must follow one order of all messages"],
        ),
        (
            DIVIDED_BY_ZERO,
            "test_models_of_many_kinds",
            ["in run_schedule([[F0, F1, F2, B0,", "[Sequential]", "of a tokens model, with micro-"],
        ),
    ],
    ids=["another block", "shared graph", "own order", "an exception"],
)
def test_a_pipelines_mistake_is_named(
    change: str, test: str, phrases: list[str], tmp_path: Path
) -> None:
    messages = messages_on("2.12", change, test, tmp_path)
    assert any(all(phrase in message for phrase in phrases) for message in messages), messages


def test_numbers_have_the_digits_that_tell_them_apart() -> None:
    third = [[1 / 3, 2.0, 12345678.0], math.inf]
    assert short_beside(third, [third[0], 5]) == "[[0.333333, 2.0, 12345678.0], inf]"
    assert short_beside([1 / 3], [1 / 3 + 1e-8]) == "[0.333333333]"
    assert short_beside([1 / 3 + 1e-8], [1 / 3]) == "[0.333333343]"
    assert short_beside(1 / 3, 1 / 3 + 1e-15) == "0.3333333333333333"
    assert short_beside(1 / 3, None) == "0.333333"


def test_a_cut_is_told_as_ranges(tmp_path: Path) -> None:
    change, test = ANSWERS["2.8 a_stage_may_be_empty"].change, "test_every_layer_is_in_one_stage"
    (message,) = messages_on("2.8", change, test, tmp_path)
    assert re.search(r"yours are \[range\(0, \d+\), range\(.*\. Stage \d has no layer:", message)


@pytest.mark.parametrize(
    ("answer", "phrase"),
    [
        (
            "warm_up_too_short",
            "B0.1 of stage 3 needs F0.1, which comes later in the same row. Quest",
        ),
        (
            "backward_begins_with_chunk_0",
            "B0 of stage 3 needs B0.1 of stage 0, which comes after B0 in that row, and B0 never "
            "starts either. Question marks follow actions that never start.",
        ),
        (
            "blocks_numbered_stage_by_stage",
            "F3.1 of stage 0 needs F3 of stage 3, which comes after B0 in that row, and B0 never",
        ),
    ],
)
def test_what_stops_a_schedule_is_named(answer: str, phrase: str, tmp_path: Path) -> None:
    change, test = ANSWERS[f"2.13 {answer}"].change, "test_interleaving_divides_the_bubble"
    (message,) = messages_on("2.13", change, test, tmp_path)
    assert phrase in message


def test_one_stage_that_stops_has_one_question_mark() -> None:
    waiting = "B0 of stage 0 needs F0, which comes later in the same row. The question mark follows"
    assert why_stopped(drawn("B0 F0")).startswith(waiting)
    assert why_stopped(drawn("F0 B0")) == ""


NO_ALL_REDUCE = """\
-        self.all_reduce(num_bad, self.group)
"""
COUNT_LOST = ["The first good step should let it grow. The scale alone is not enough"]
SCALE_LOST = """\
-        self.value, self.good_steps = state["value"], int(state["good_steps"])
+        self.good_steps = int(state["good_steps"])
"""


@pytest.mark.parametrize(
    ("change", "test", "phrases", "others"),
    [
        (
            *(NO_ALL_REDUCE, "test_gradients_are_divided_once_and_in_place"),
            ["has called no all-reduce", "skips the step that the others take"],
            ["is enough"],
        ),
        (
            *(ANSWERS["2.4 loading_forgets_the_count"].change, "test_a_loaded_scaler_goes_on"),
            *(COUNT_LOST, ["had found an inf"]),
        ),
        (
            *(ANSWERS["2.4 finding_survives_the_loading"].change, "test_a_loaded_scaler_goes_on"),
            *(["had found an inf before it was loaded"], COUNT_LOST),
        ),
        (
            *(SCALE_LOST, "test_a_loaded_scaler_goes_on"),
            *(["right after loading"], [*COUNT_LOST, "had found an inf"]),
        ),
    ],
    ids=["no all-reduce", "count lost", "finding kept", "scale lost"],
)
def test_a_loss_scalers_mistake_is_named_alone(
    change: str, test: str, phrases: list[str], others: list[str], tmp_path: Path
) -> None:
    messages = messages_on("2.4", change, test, tmp_path)
    assert any(all(phrase in message for phrase in phrases) for message in messages), messages
    assert not any(other in message for message in messages for other in others), messages


SPLIT_AND_GATHERED = "test_a_column_parallel_layer_gathers_its_output"
BLOCK = "test_a_block_on_split_positions_computes_what_it_did"
COPIED_AND_GATHERED = """\
-        _replace(block.attention, name, _ColumnWithoutCopy, group)
+        _replace(block.attention, name, ColumnParallelLinear, group)
@@
-    _replace(block.mlp, "up", _ColumnWithoutCopy, group)
+    _replace(block.mlp, "up", ColumnParallelLinear, group)
"""
SPLITS_THE_BATCH = ["the output should have the shape [3, 4, 2, 3], not [6, 2, 2, 3]. Dim 0 is 2"]


@pytest.mark.parametrize(
    ("id", "change", "test", "phrases"),
    [
        (
            *("2.15", "gather_without_gradient", SPLIT_AND_GATHERED),
            ["does not require grad", "dist.all_gather and the other collectives are not diff"],
        ),
        (
            *("2.15", "gathers_along_dim_0", SPLIT_AND_GATHERED),
            ["Dim 0 is 2 times as long, and dim 2 1/2", "joined or split along the wrong dim"],
        ),
        (
            *("2.19", "splits_the_batch"),
            *("test_a_region_joins_positions_one_way_and_sums_the_other", SPLITS_THE_BATCH),
        ),
        ("2.19", "bias_before_the_sum", BLOCK, ["once for each rank: add them after the reduce-"]),
        ("2.19", COPIED_AND_GATHERED, BLOCK, ["is summed twice: by the column-parallel layers"]),
        (
            *("2.16", "bias_n_times", "test_a_row_parallel_layer_is_the_full_one"),
            ["The bias is in it 2 times: add it once"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else None,
)
def test_a_mistake_in_tensor_parallelism_is_judged_with_its_cause(
    id: str, change: str, test: str, phrases: list[str], tmp_path: Path
) -> None:
    answer = ANSWERS.get(f"{id} {change}")
    messages = messages_on(id, answer.change if answer else change, test, tmp_path)
    found = [one for one in messages if all(phrase in one for phrase in phrases)]
    assert found, messages
    assert not any(" raised " in one for one in found), found


def test_a_part_of_the_wrong_shape_is_named_where_torch_refuses_it(tmp_path: Path) -> None:
    answer = ANSWERS["2.15 columns_for_rows"]
    test = "test_a_column_parallel_layer_is_its_part"
    first = messages_on("2.15", answer.change, test, tmp_path)[0]
    found = re.search(
        r"weight has the shape \[(\d+), (\d+)\], and should have \[(\d+), (\d+)\]", first
    )
    assert found, first
    rows, columns, own_rows, all_columns = map(int, found.groups())
    assert (rows, columns) == (2 * own_rows, all_columns / 2)
