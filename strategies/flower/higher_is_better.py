"""Whether a higher or a lower value of a metric is better: as it is stated, or by the words of the metric's name.

A name is read from its end, as the last word of an English name says what it is: ``mean-error`` is an error and
``error-free-accuracy`` an accuracy. A name without a known word has no direction, and nothing is picked by it.
"""

import re
from collections.abc import Mapping
from itertools import pairwise

# Prefixes that state a metric's direction: "min:NAME" and "max:NAME".
DIRECTIONS = {"min": False, "max": True}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words of metrics of which a lower value is better.
_COSTS = _words("""
    loss losses error err mistake misclassification cost penalty risk regret deviance divergence surprise entropy
    mae mse rmse msle rmsle mape smape wape mdape wmape mase medae mdae nmse nrmse rmspe crps pinball hinge huber
    nll nlpd logloss brier ece mce ace perplexity ppl bpc bpd wer cer ter eer fpr fnr fdr
    distance kl fid lpips hausdorff hd95 assd std deviation violation
""")

# Words of metrics of which a higher value is better.
_SCORES = _words("""
    accuracy acc top auroc auc roc auprc aupr prauc ap map f1 f2 fbeta fscore precision recall sensitivity specificity
    tpr tnr ppv npv iou miou dice jaccard r2 rsquared kappa mcc matthews correlation corr pearson spearman kendall
    concordance cindex bleu rouge meteor psnr ssim ndcg mrr hit jain
""")

# Words that turn a metric into another, whose direction isn't that of the metric.
_MODIFIERS = _words("""
    neg negative minus inverse reciprocal drop gap difference diff disparity reduction decrease increase improvement
    change delta skill
""")

# What follows such a word says where a metric is measured, not what it is: "recall-at-fpr".
_PREPOSITION = re.compile(r"-(?:at|by|for|per|with|given|over|under|vs|of|on|in)-.*")

# Endings of names of an own metric, in one word.
_COST_ENDINGS, _SCORE_ENDINGS = ("loss", "error", "entropy", "mae", "mse"), ("accuracy", "auc", "auroc")

# Suffixes of the names of metrics that describe the spread over clients.
_SPREAD = ("-mean", "-worst-tenth", "-best")

# Prefix of the names of metrics of clients' personal models.
PERSONAL = "personal-"

# Prefixes of the names of per-client metrics, and of metrics of personal models.
_WHOSE = ("client-", PERSONAL)

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+")


def split_direction(text: str) -> tuple[bool | None, str]:
    """Return whether a higher value is better, as ``min:NAME`` or ``max:NAME`` states, and NAME, or None."""
    prefix, colon, name = text.strip().partition(":")
    return (DIRECTIONS[prefix], name) if colon and prefix in DIRECTIONS else (None, text.strip())


def measured_name(metric: str) -> str:
    """Return the name of a metric without what says over which clients and of whose model it is."""
    for ending in _SPREAD:
        metric = metric.removesuffix(ending)
    for beginning in _WHOSE:
        metric = metric.removeprefix(beginning)
    return metric


def higher_is_better(metric: str, stated: Mapping[str, bool | None] | None = None) -> bool | None:
    """Return True if a higher value of a metric is better, False if a lower one is, None if neither is known.

    Parameters
    ----------
    metric : str
        Also one over clients, such as ``client-accuracy-worst-tenth``. Of a spread over clients, ``-std``, a lower
        value is better, and a higher one of Jain's index, ``-jain``.
    stated : mapping of str to bool, optional
        Directions of metrics by name, which count in place of the words of the name.
    """
    name = measured_name(metric)
    if stated and name in stated:
        return stated[name]
    return _by_words(name)


def unknown_direction(metric: str) -> str:
    """Return the reason against picking by a metric whose direction isn't known."""
    return f"it isn't known whether a lower or a higher {metric} is better"


def _by_words(name: str) -> bool | None:
    """Return the direction that the words of a name give."""
    words = [word.lower() for word in _WORD.findall(_PREPOSITION.sub("", re.sub(r"[\W_]+", "-", name)))]
    if "likelihood" in words:
        return not {"neg", "negative"} & set(words)
    if "false" in words and words[-1] in ("rate", "rates", "positives", "negatives"):
        return False
    if _MODIFIERS & set(words):
        return None
    pairs = [first + second for first, second in pairwise(words)]
    directions = map(_of_word, [*reversed(words), *pairs])
    return next((direction for direction in directions if direction is not None), None)


def _of_word(word: str) -> bool | None:
    """Return the direction that a word gives, also in the plural or with a number; None if it gives none."""
    for form in (word, word.removesuffix("s"), word.rstrip("0123456789")):
        if form in _COSTS or form.endswith(_COST_ENDINGS):
            return False
        if form in _SCORES or form.endswith(_SCORE_ENDINGS):
            return True
    return None
