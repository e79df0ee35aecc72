"""One HTML page of a selection of models: from a table of losses, or from runs made here."""
