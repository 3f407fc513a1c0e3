"""What theory predicts: convergence bounds as functions of named constants, and problems where these are known.

By paper: ``convex`` (Dhasade et al.), ``lojasiewicz`` (001), ``asynchronous``, ``representation`` and ``sampling``
(Fraboni et al. 2023), ``perturbed`` and ``perturbed_rounds`` (Buttaci 2024), ``steady_state`` and ``mean_square``
(004); docs/references.md cites them in full. A bound has the shape of its argument ``rounds``. A parameter outside
the range that a bound states raises AssumptionError; a step size outside its range raises StepSizeError, a kind of
it.

``problems`` has losses with known minima, ``newton`` finds minima, and ``estimates`` measures constants. The modules
named so far are pure functions in float64 that know neither Flower nor the app. ``run_bounds`` puts a finished run
beside the bounds that apply to it: the command ``fedapp bounds``.
"""
