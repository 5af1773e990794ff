"""The faults: each is one wrong line of the library, in a file by what it is about."""

from .alike import ALIKE
from .collectives import COLLECTIVE
from .device import DEVICE
from .experts import EXPERTS
from .fault import Fault as Fault
from .folders import FOLDERS
from .kernels import KERNELS
from .model import MODEL
from .planner import PLANNER
from .results import RESULTS
from .splits import SPLITS
from .waits import WAITS

FAULTS = [*DEVICE, *COLLECTIVE, *KERNELS, *EXPERTS, *PLANNER, *ALIKE, *MODEL, *RESULTS, *SPLITS, *WAITS, *FOLDERS]
