"""A bag-of-words baseline, so that the encoder's score has something to stand beside."""

from __future__ import annotations

from ..evaluation.extras import require
from ..tasks.examples import Task


def naive_bayes_score(task: Task) -> float | None:
    """Dev score of multinomial naive Bayes on words and word pairs; None for tasks of text pairs.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    if task.train.pairs is not None:
        return None
    vectoriser = require("sklearn.feature_extraction.text").CountVectorizer(
        ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b"
    )
    counts = vectoriser.fit_transform(task.train.texts)
    classifier = require("sklearn.naive_bayes").MultinomialNB().fit(counts, task.train.labels)
    predictions = classifier.predict(vectoriser.transform(task.dev.texts))
    return task.metric(predictions, task.dev.labels)
