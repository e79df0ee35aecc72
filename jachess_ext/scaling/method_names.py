"""Names of the selection methods that need losses and sizes alone; importing it costs nothing."""

FROM_LOSSES = (
    "bayes",
    "lensllm",
    "rectified",
    "power",
    "ats",
    "subtuning",
    "zeroshot",
    "modelsize",
)
