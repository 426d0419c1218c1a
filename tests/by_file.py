"""Distribute tests to pytest-xdist's workers by file, and the bank of wrong answers by task.

That way, anything that the tests of a file share, such as the results of running a world, is
computed only once. pytest-xdist could also group tests by a mark, but it appends the mark to their
ids, and pytest 9.2 no longer accepts such ids.
"""

import re

from xdist.scheduler import LoadScopeScheduling

TASK_OF_THE_BANK = re.compile(r".*wrong_answers/test_bank\.py::\w+\[[\d.]+ ")


class ByFile(LoadScopeScheduling):
    """Sends the tests of a file, or of a task in the bank, to one worker, in collection order."""

    def _split_scope(self, nodeid: str) -> str:
        of_a_task = TASK_OF_THE_BANK.match(nodeid)
        if of_a_task:
            return re.sub(r"::\w+", "", of_a_task[0])
        return nodeid.partition("::")[0]
