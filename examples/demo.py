"""A real language model on several ranks: `iris-tp demo`, whose code is `iris_tp/demo.py`.

python -m examples.demo --ranks 3
"""

import sys

from iris_tp.demo import main

if __name__ == "__main__":
    sys.exit(main())
