"""A job that goes wrong as its argument says: those of `tests.support.doomed.fit`, as JSON."""

from __future__ import annotations

import json
import sys

from tests.support.doomed import Plan, fit

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    plans = tuple(Plan(**plan) for plan in arguments.pop("plans"))
    fit(plans=plans, **arguments)
    print("the script has come to its end")
