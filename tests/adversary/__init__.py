"""An adversary of numfuse: random calls of every public function, held to a truth of its own.

``python -m tests.adversary --minutes 5 --seed 1`` draws calls, function after function, for every
backend and adapter that is there, and breaks off nowhere: what it finds is printed with one word
that makes the same call again (``--replay WORD``). It is no part of an ordinary run of the tests
but for `tests/product/test_adversary.py`, which holds that faults are found.

bounded    numbers with an error bound and a tape: the arithmetic of the truth
curves     activations and functions of formulas, with three derivatives, from the textbook
truths     what every public function returns, written from its mathematics
draws      shapes, layouts, values
layers, fused, networks
           the calls: for each function a way to draw one
checks     makes a call and says what is wrong with it
wrong      calls that must be refused
kinds      where a call runs: backends, and the arrays of other libraries
gradients  derivatives by the libraries that differentiate
scenarios  threads, forks, signals, memory, caches, environments: each in a process of its own
worker     one process that makes calls; __main__ starts and watches them

Nothing of numfuse computes a truth: no formula, shape rule or array of the package is in one. This
is the one place where a second copy of the formulas is the purpose.
"""

import sys
from pathlib import Path

#: The modules that tests share (`oracle`, `simulator`) lie in the folder above.
_TESTS = str(Path(__file__).parents[1])
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
