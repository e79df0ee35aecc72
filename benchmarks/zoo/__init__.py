"""Six small language models, made here, that `jachess select --models` can choose between."""
