"""Write two made-up tables of hospitals' patients: hospitals.csv to train on, and new-patients.csv to predict.

    python examples/hospitals.py

The tables have numbers and words, gaps, an id, dates and the hospital of each patient; the second has no outcome.
"""

import numpy as np
import pandas as pd

SITES = ("Genève", "Zürich", "Basel", "Hospital 2", "Hospital 10")
SHARES = (0.3, 0.25, 0.2, 0.15, 0.1)


def patients(number: int, seed: int) -> pd.DataFrame:
    """Return a row for each patient; who died follows from age, smoking, CRP and chance."""
    rng = np.random.default_rng(seed)  # noqa: TID251 - the example stands alone
    site = rng.choice(len(SITES), number, p=SHARES)
    age = rng.normal(58 + 2 * site, 12).clip(18, 98).round()
    smoker = rng.choice(["never", "former", "current"], number, p=[0.5, 0.3, 0.2])
    crp = rng.lognormal(2 + 0.1 * site, 0.9).round(1)
    risk = 0.07 * (age - 62) + 1.1 * (smoker == "current") + 0.8 * np.log(crp / 8)
    frame = pd.DataFrame(
        {
            "patient": [f"P{seed}{place:05d}" for place in range(number)],
            "admitted": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 700, number), unit="D"),
            "site": np.array(SITES)[site],
            "age": age,
            "sex": rng.choice(["female", "male"], number),
            "smoker": smoker,
            "crp": crp,
            "pulse": rng.normal(80, 12, number).round(),
            "died": np.where(risk + rng.logistic(0, 0.6, number) > 0.5, "yes", "no"),
        }
    )
    for column, share in (("crp", 0.08), ("smoker", 0.04), ("pulse", 0.05)):
        frame.loc[rng.random(number) < share, column] = None
    return frame


if __name__ == "__main__":
    patients(1200, seed=1).to_csv("hospitals.csv", index=False)
    patients(40, seed=2).drop(columns="died").to_csv("new-patients.csv", index=False)
