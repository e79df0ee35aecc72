"""What experiments are made of: tasks, models, a recipe, runs that can be killed, pages."""

RUN_NEEDS = (
    *("transformers", "accelerate", "safetensors", "scipy", "sklearn", "pandas", "joblib", "tqdm"),
    *("matplotlib", "jinja2"),
)
"""Modules that runs of fine-tuning, their tables and their page need beyond torch and numpy."""
