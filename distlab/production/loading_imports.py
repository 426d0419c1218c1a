"""What each process that loads images needs, for the server that forks them to import once."""

import warnings

from distlab.production.images import transforms

# the server imports the rank's main module, too; runpy wonders when a child runs it once more
warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
transforms()
