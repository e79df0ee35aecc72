"""The numbers in the help of `jachess select --models` are the settings' own."""

import argparse
import re
from dataclasses import fields

from jachess_ext.commands import live_arguments
from jachess_ext.experiment.grid import Recipe
from jachess_ext.live_selection.settings import LiveSettings


def test_defaults_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    live_arguments.add_options(parser)
    given = {one.name: one.default for one in (*fields(LiveSettings), *fields(Recipe))}
    settings = {name: value for name, value in given.items() if value is not None}
    said = {
        action.dest: float(found[1])
        for action in parser._actions
        if (found := re.search(r"default (\d[\d.e-]*)", action.help or ""))
    }
    shared = said.keys() & settings.keys()
    assert {"promote", "screen_rows", "batch_size", "max_length", "seeds"} <= shared
    assert {name: said[name] for name in shared} == {name: settings[name] for name in shared}
