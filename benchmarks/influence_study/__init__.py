"""The study of Group-MATES: ten claims that were written down before a result was there, each with its control.

Here: the claims (`claims`), what they are tested on (`worlds`, `text`), what is measured (`measurements`), intervals
(`statistics`) and the page (`page`). Not here: the methods themselves, which are `dagster_datamask.influence`.
"""
