"""Commands of `jachess` that are no package of their own: one file of options, one that runs."""
