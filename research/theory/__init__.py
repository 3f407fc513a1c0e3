"""What theory predicts: convergence bounds as functions of named constants, and problems where these are known.

One module per paper: ``convex`` (000), ``lojasiewicz`` (001), ``asynchronous`` (002), ``perturbed`` (003),
``steady_state`` (004). ``problems`` has losses with known minima, ``newton`` finds them, and ``estimates`` measures
constants. All these are pure functions in float64 that know neither Flower nor the app. ``run_bounds`` puts a
finished run beside the bounds that apply to it: the command ``fedapp bounds``.
"""
