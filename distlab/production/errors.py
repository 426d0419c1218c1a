"""Exit codes of a training run, which launchers and schedulers act on, and the errors behind them.

0    done
1    anything else: restarting may help
69   another training, perhaps of a lost node, holds run_dir (EX_UNAVAILABLE): run it again later
74   the checkpoint cannot be written (EX_IOERR of sysexits.h)
75   stopped on request, and saved (EX_TEMPFAIL): run it again
78   the configuration or the data is wrong (EX_CONFIG): restarting does not help
"""

EXIT_IN_USE = 69
EXIT_CANNOT_SAVE = 74
EXIT_STOPPED = 75
EXIT_WRONG = 78


class ConfigError(ValueError):
    """The configuration or the data is wrong; the message says what to change."""


class InUseError(RuntimeError):
    """Another training holds the run directory; the message says what to do."""


class CannotSaveError(OSError):
    """The last checkpoint of a run could not be written."""
