# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import argparse
import importlib
import os
import sys
import typing

from vllm.entrypoints.cli.types import CLISubcommand

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
else:
    FlexibleArgumentParser = argparse.ArgumentParser

_PACKAGE = "vllm.model_executor.layers.fused_moe.expert_profile"
_EPILOG = """Exit status: 0 done; 1 an input cannot be used, as explained on standard
error; 2 wrong arguments; 3 done, and a condition that was asked for does not hold."""


class ExpertMapSubcommand(CLISubcommand):
    """The `expert-map` subcommand for the vLLM CLI."""

    name = "expert-map"
    help = "Plan, judge and compare expert maps for --expert-provider pinned_hot."

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        sys.exit(run_verb(args))

    def subparser_init(
        self, subparsers: argparse._SubParsersAction
    ) -> FlexibleArgumentParser:
        parser = subparsers.add_parser(
            self.name,
            help=self.help,
            description=self.help,
            usage=f"vllm {self.name} <verb> [options]",
            epilog=_EPILOG,
        )
        # As for `vllm bench`: other commands do not pay for these imports.
        words = [word for word in sys.argv[1:] if not word.startswith("-")]
        if words[:1] != [self.name]:
            return parser
        # What is asked for goes to stdout, so that it can be piped; logs do not.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        verbs = importlib.import_module(f"{_PACKAGE}.verbs")
        # vLLM's own parser class folds options into groups that `vllm serve` needs.
        actions = parser.add_subparsers(
            required=True,
            dest="verb",
            metavar="verb",
            prog=f"vllm {self.name}",
            parser_class=argparse.ArgumentParser,
        )
        for verb, summary in verbs.VERBS.items():
            verb_parser = actions.add_parser(
                verb, help=summary, description=summary, epilog=_EPILOG
            )
            verb_parser.add_argument(
                "--json", action="store_true", help="Print JSON instead of tables."
            )
            if words[1:2] == [verb]:
                name = verbs.module_of(verb)
                module = importlib.import_module(f"{_PACKAGE}.verbs.{name}")
                module.add_arguments(verb_parser)
                verb_parser.set_defaults(verb_run=module.run)
        return parser


def run_verb(args: argparse.Namespace) -> int:
    """Run a verb and print its answer.

    Returns:
        The exit status, see the command's help.

    """
    errors = importlib.import_module(f"{_PACKAGE}.errors")
    common = importlib.import_module(f"{_PACKAGE}.verbs.common")
    try:
        answer = args.verb_run(args)
    except errors.EXPLAINED as error:
        print(f"vllm expert-map {args.verb}: error: {error}", file=sys.stderr)
        return 1
    for warning in answer.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(common.as_json(answer) if args.json else answer.text)
    return 0 if answer.satisfied else 3


def cmd_init() -> list[CLISubcommand]:
    return [ExpertMapSubcommand()]
