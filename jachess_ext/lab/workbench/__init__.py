"""What experiments are made of: tasks, models, a recipe, runs that can be killed, pages."""
