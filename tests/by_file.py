"""How several processes of pytest share the tests: a file at a time, the bank task by task.

So what the tests of a file share, such as a world that has run, is made once. pytest-xdist would
also group tests by a mark, which it appends to their ids; pytest 9.2 no longer takes such ids.
"""

import re

from xdist.scheduler import LoadScopeScheduling

TASK_OF_THE_BANK = re.compile(r".*wrong_answers/test_bank\.py::\w+\[[\d.]+ ")


class ByFile(LoadScopeScheduling):
    """Sends the tests of a file to one process, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        of_a_task = TASK_OF_THE_BANK.match(nodeid)
        if of_a_task:
            return re.sub(r"::\w+", "", of_a_task[0])
        return nodeid.partition("::")[0]
