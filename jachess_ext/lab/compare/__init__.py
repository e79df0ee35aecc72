"""Methods compared over tasks and seeds: data, runs that can be killed, judgement, report."""
