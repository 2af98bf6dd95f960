# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The verbs of `vllm expert-map`; each module adds its arguments and runs.

Only the module of the verb in use is imported.
"""

VERBS = {
    "plan": "Make a map from profiles under a budget.",
}
"""Help of each verb, by its name; the module has the same name."""
