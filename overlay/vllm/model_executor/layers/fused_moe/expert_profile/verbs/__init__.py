# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The verbs of `vllm expert-map`; each module adds its arguments and runs.

Only the module of the verb in use is imported.
"""

VERBS = {
    "plan": "Make a map from profiles under a budget.",
    "show": "Describe a map or profile, as text or in pictures.",
    "score": "How much of a profile's traffic a map leaves cold.",
    "predict": "Step time and tokens per second that a map will give.",
    "advise": "One map or several, a new map or the old, worth it or not.",
    "diff": "Compare two maps or two profiles.",
    "merge": "Add profiles up, or blend maps.",
    "index": "List a folder of maps, one for each class of traffic.",
    "import": "Make a profile from what other tools recorded.",
}
"""Help of each verb, by its name."""


def module_of(verb: str) -> str:
    """Name of a verb's module in this package."""
    return "import_counts" if verb == "import" else verb
